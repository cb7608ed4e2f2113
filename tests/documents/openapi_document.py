"""lean_selector/service/openapi/*.json: OpenAPI 3.1 of each service, made from its routes, the
structs of their bodies and answers, and their descriptions (`openapi_routes`, `openapi_meanings`).

`python -m tests.documents.fields_page` writes them anew; a test holds them against the routes.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from inspect import cleandoc
from typing import Any, Final, get_args

import msgspec
from msgspec import Raw, UnsetType

from lean_selector.core.numbers import U64_MAX
from lean_selector.service.access import NAMES
from lean_selector.service.gate import Endpoint, Route
from lean_selector.wire.scalars import JsonText
from lean_selector.wire.selection_bodies import ErrorBody, OverloadBody, PromptFields
from tests.documents.openapi_meanings import meaning_of
from tests.documents.openapi_routes import (
    GATEWAY_ROUTES,
    SELECTOR_16_ROUTES,
    SELECTOR_ROUTES,
    SLOT_TRACKER_ROUTES,
    RouteDescription,
    Text,
)
from tests.support.gates import routes_of

# -- schemas of structs, made by msgspec and told what their types cannot say ----------------------

Schema = dict[str, Any]
PLACE: Final = "#/components/schemas/{name}"

_HASHES: Final[Schema] = {
    "type": "array",
    "items": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
}
_OR_NULL: Final[Schema] = {"type": "null"}
# The text of a number up to 2**32 - 1. No other keys have a pattern.
_RANK: Final = (
    "^(0|[1-9][0-9]{0,8}|[1-3][0-9]{9}|4[01][0-9]{8}|42[0-8][0-9]{7}|429[0-3][0-9]{6}"
    "|4294[0-8][0-9]{5}|42949[0-5][0-9]{4}|429496[0-6][0-9]{3}|4294967[01][0-9]{2}"
    "|42949672[0-8][0-9]|429496729[0-5])$"
)
# By struct: which of its fields belong together.
_TOGETHER: Final[dict[str, Schema]] = {
    "ReservationRequest": {
        "anyOf": [
            {
                "required": ["reservation_id", "worker_id"],
                "properties": {"worker_id": {"type": "integer"}},
            },
            {
                "required": ["selection_id"],
                "properties": {"selection_id": {"type": "string"}, "worker_id": _OR_NULL},
            },
        ]
    }
}
# By struct and field: what its type does not say; of a struct of 1.6 unless it has its own.
_MORE: Final[dict[tuple[str, str], Schema]] = {
    ("RouterOverride", "overlap_score_credit"): {"minimum": 0, "maximum": 1},
    ("RouterOverride", "prefill_load_scale"): {"minimum": 0},
    ("RouterOverride", "overlap_score_weight"): {"minimum": 0},
    ("RouterOverride", "router_temperature"): {"minimum": 0},
    ("RouterOverride", "shared_cache_multiplier"): {"minimum": 0, "maximum": 1},
    ("RouterOverride16", "overlap_score_credit"): {"minimum": 0},
    ("OutputBlockRequest", "decay_fraction"): {"minimum": 0, "maximum": 1},
    ("ThresholdRequest", "active_decode_blocks_threshold"): {"minimum": 0, "maximum": 1},
    ("ThresholdRequest", "active_prefill_tokens_threshold_frac"): {"minimum": 0},
    ("RegisterRequest", "block_size"): {"minimum": 1},
    ("RegisterRequest", "dp_size"): {"minimum": 1},
}


def components(types: Iterable[Any]) -> tuple[list[Schema], dict[str, Schema]]:
    """The schema of each type, and the named ones that they refer to."""
    wanted = [_without_raw_default(each) for each in types]
    seen: dict[int, Any] = {}
    structs = [found for each in wanted for found in _structs_of(each, seen)]
    made, named = msgspec.json.schema_components(
        [*wanted, *structs], schema_hook=_hook_of(structs), ref_template=PLACE
    )
    for struct in structs:
        _complete(struct, named[struct.__name__])
    return list(made[: len(wanted)]), named


@cache
def _without_raw_default(kind: Any) -> Any:
    """A struct of the same name and fields, where what is left encoded may be absent: msgspec
    would show how that is, and cannot."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return kind
    fields = msgspec.structs.fields(kind)
    if not any(isinstance(field.default, Raw) for field in fields):
        return kind
    shown: list[tuple[str, Any, Any]] = []
    for field in fields:
        default = None if isinstance(field.default, Raw) else field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.field(default_factory=field.default_factory)
        shown.append((field.name, field.type, default))
    return msgspec.defstruct(
        kind.__name__, shown, kw_only=True, namespace={"__doc__": kind.__doc__}
    )


def _structs_of(kind: Any, seen: dict[int, Any]) -> Iterator[type[msgspec.Struct]]:
    """The structs that a type is made of. Types in `seen`, by id, are skipped, because most
    routes share most of theirs."""
    if id(kind) in seen:
        return
    seen[id(kind)] = kind
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for field in msgspec.structs.fields(kind):
            yield from _structs_of(field.type, seen)
    for part in get_args(kind):
        yield from _structs_of(part, seen)


def _hook_of(structs: list[type[msgspec.Struct]]) -> Callable[[type], Schema]:
    """For what msgspec does not know: JSON text in an answer, which tells of workers."""
    names = [each.__name__ for each in structs]
    record = next((name for name in names if name.startswith("WorkerRecord")), "")

    def hook(kind: type) -> Schema:
        if kind is JsonText and record:
            return {"type": "array", "items": {"$ref": PLACE.format(name=record)}}
        raise NotImplementedError

    return hook


def _complete(struct: type[msgspec.Struct], schema: Schema) -> None:
    schema.pop("title", None)
    schema["description"] = cleandoc(schema.get("description", ""))
    required = set(schema.get("required", ()))
    for field in msgspec.structs.fields(struct):
        properties = schema["properties"]
        shown = properties[field.encode_name]
        if field.type is Raw and field.name.endswith("hashes"):
            shown = _HASHES if field.required else {"anyOf": [_HASHES, _OR_NULL]}
        elif UnsetType in get_args(field.type):
            required.discard(field.encode_name)  # an answer leaves it out
        shown = _bounded(shown)
        name, older = struct.__name__, struct.__name__.removesuffix("16")
        if more := _MORE.get((name, field.name), _MORE.get((older, field.name))):
            shown = _narrowed(shown, more)
        if meaning := meaning_of(struct.__name__, field.encode_name):
            shown = {**shown, "description": meaning}
        properties[field.encode_name] = shown
    schema.update(_TOGETHER.get(struct.__name__, {}))
    if required:
        schema["required"] = [name for name in schema["properties"] if name in required]
    else:
        schema.pop("required", None)


def _narrowed(shown: Schema, more: Schema) -> Schema:
    """The schema with the bounds of its numbers added."""
    if "anyOf" in shown:
        return {**shown, "anyOf": [_narrowed(each, more) for each in shown["anyOf"]]}
    return {**shown, **more} if shown.get("type") in ("number", "integer") else shown


def _bounded(shown: Any) -> Any:
    """With the ends that msgspec cannot check."""
    if isinstance(shown, list):
        return [_bounded(each) for each in shown]
    if not isinstance(shown, dict):
        return shown
    bounded = {name: _bounded(value) for name, value in shown.items()}
    if bounded.get("type") == "integer" and bounded.get("minimum") == 0:
        bounded.setdefault("maximum", U64_MAX)
    if "propertyNames" in bounded:
        bounded["propertyNames"] = {"type": "string", "pattern": _RANK}
    return bounded


# -- the document ----------------------------------------------------------------------------------

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
_SHED: Final = {429, 503, 529}
_PARAMS: Final[dict[str, Schema]] = {
    "worker_id": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
    "reservation_id": {"type": "string", "minLength": 1},
}
_PARAM_MEANINGS: Final = {
    "worker_id": "the worker's id",
    "reservation_id": "the name of the booking",
    "path": "the path of the request as the gateway's client sent it",
}
_PARAM_EXAMPLES: Final[dict[str, Any]] = {"worker_id": 1, "reservation_id": "request-1"}
# The fields of queries, in the order shown.
_QUERY: Final = {
    "model": "the model",
    "model_name": "only of this model",
    "tenant_id": "only of this tenant",
    "routing_group": "the other name of tenant_id",
    "detail": "`true`: with what is known of each besides",
}
_OTHER: Final = """\
What was wrong. 400: the request, its path, query or body cannot be read. 401, 403: the token is
absent, not known, or its role is too small (RFC 6750). 408: it did not come in time. 413, 414, 431:
its body, target or headers are too large. 415: another content-type. 422: the body is not of this
shape. 500: the service has failed; its log says why. 501, 505: not supported. 503: too many
connections, or too much is being received.
"""
_OPEN: Final = "open"  # the role that needs no token
_SCHEME: Final = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token of --auth-token-file. Of its roles each holds the ones before it: read,"
    " write, admin.",
}
_ABOUT: Final = """\
Every error is `{"error": "..."}` and names what was wrong. Bodies with a prompt may be MessagePack.
Unknown fields are ignored. HEAD is answered as GET.
"""


def document(
    title: str,
    routes: Iterable[Route],
    described: Mapping[tuple[str, str], RouteDescription],
) -> dict[str, Any]:
    """The document; `routes` are in the order shown. Who serves it fills in the version, and the
    roles of the routes as their security where tokens are asked for."""
    kept = [(route, described[route[:2]]) for route in routes]
    shapes = _Shapes(kept)
    paths: dict[str, dict[str, Any]] = {}
    for (method, template, role, endpoint), about in kept:
        path = template.replace("*}", "}")
        operation = _operation(method, path, endpoint, about, shapes)
        operation["x-role"] = NAMES.get(role, _OPEN)
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": "",
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": each} for each in dict.fromkeys(about.group for _, about in kept)],
        "paths": paths,
        "components": {
            "schemas": shapes.named,
            "responses": {"Error": _response(_OTHER, [shapes.of(ErrorBody)])},
            "securitySchemes": {"token": _SCHEME},
        },
    }


class _Shapes:
    """The schema of every type in the routes."""

    def __init__(self, described: Iterable[tuple[Route, RouteDescription]]) -> None:
        types: list[Any] = [ErrorBody, OverloadBody]
        for (_, _, _, endpoint), about in described:
            answers = [one for answer in about.answers.values() for one in _alternatives(answer)]
            types += [one for one in (*answers, endpoint.body, about.refusal) if one is not None]
        self._types = types
        self._schemas, self.named = components(types)

    def of(self, kind: Any) -> Schema:
        return self._schemas[self._types.index(kind)]


def _alternatives(answer: Any) -> list[Any]:
    """The types of an answer that is JSON."""
    if answer is None or isinstance(answer, Text):
        return []
    return answer if isinstance(answer, list) else [answer]


def _operation(
    method: str, path: str, endpoint: Endpoint, about: RouteDescription, shapes: _Shapes
) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", path)
    fields = [name for name in _QUERY if name in endpoint.query]
    parameters = [*map(_path_parameter, names), *map(_query_parameter, fields)]
    operation: dict[str, Any] = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "summary": about.summary,
        "tags": [about.group],
    }
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = _body(endpoint, about, shapes)
    operation["responses"] = _responses(about, shapes)
    return operation


def _path_parameter(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": _PARAM_MEANINGS.get(name, name),
        "schema": _PARAMS.get(name, {"type": "string"}),
        "example": _PARAM_EXAMPLES.get(name, name),
    }


def _query_parameter(name: str) -> dict[str, Any]:
    schema: Schema = {"type": "string"}
    if name == "detail":
        schema["pattern"] = "^([Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]|1|0|)$"
    shown = {"name": name, "in": "query", "required": name == "model"}
    return {**shown, "description": _QUERY[name], "schema": schema}


def _body(endpoint: Endpoint, about: RouteDescription, shapes: _Shapes) -> dict[str, Any]:
    media: dict[str, Any] = {"schema": shapes.of(endpoint.body)}
    content = {JSON: {**media, "example": about.example}}
    if issubclass(endpoint.body, PromptFields):
        content[MSGPACK] = media
    return {"required": not endpoint.is_body_optional, "content": content}


def _responses(about: RouteDescription, shapes: _Shapes) -> dict[str, dict[str, Any]]:
    """By status; what is not the route's own is in `default`."""
    error, shed = shapes.of(ErrorBody), shapes.of(OverloadBody)
    responses: dict[int, dict[str, Any]] = {}
    for status, text in about.errors.items():
        is_shed = 429 in about.errors and status in _SHED
        responses[status] = _response(text, [error, shed] if is_shed else [error])
    for status, answer in about.answers.items():
        if isinstance(answer, Text):
            content = {answer.media_type: {"schema": {"type": "string"}}}
            responses[status] = {"description": "text", "content": content}
        elif answer is None:
            responses[status] = {"description": "no body"}
        else:
            schemas = [shapes.of(one) for one in _alternatives(answer)]
            responses[status] = _response("the answer", schemas)
    others = {"$ref": "#/components/responses/Error"}
    if about.refusal is not ErrorBody:
        others = _response("what was wrong", [shapes.of(about.refusal), error])
    return {**{str(each): responses[each] for each in sorted(responses)}, "default": others}


def _response(text: str, schemas: list[Schema]) -> dict[str, Any]:
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"description": text, "content": {JSON: {"schema": schema}}}


# -- services ------------------------------------------------------------------------------------
#
# The document of each service.

DESCRIBED: Final = {
    "selector": ("lean-selector", SELECTOR_ROUTES | GATEWAY_ROUTES),
    "selector_16": ("lean-selector --api 1.6", SELECTOR_16_ROUTES | GATEWAY_ROUTES),
    "slot_tracker": ("lean-slot-tracker", SLOT_TRACKER_ROUTES),
}


FOLDER: Final = "lean_selector/service/openapi"


def service_document(service: str) -> dict[str, Any]:
    """The document of a service with all its routes, in the order of their descriptions."""
    title, described = DESCRIBED[service]
    order = [*described]
    routes = sorted(routes_of(service), key=lambda route: order.index(route[:2]))
    return document(title, routes, described)


def service_text(service: str) -> bytes:
    """The file of a service."""
    return msgspec.json.format(msgspec.json.encode(service_document(service)), indent=1) + b"\n"
