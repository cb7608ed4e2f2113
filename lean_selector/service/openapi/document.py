"""The document itself: OpenAPI 3.1 of one service, from its routes and what is said of them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from lean_selector import __version__
from lean_selector.service.openapi.routes import (
    DOOR_ROUTES,
    SELECTOR_16_ROUTES,
    SELECTOR_ROUTES,
    SLOT_TRACKER_ROUTES,
)
from lean_selector.service.openapi.schemas import Schema, components
from lean_selector.service.openapi.shapes import QueryField, RouteDescription, Text
from lean_selector.wire.busy import OverloadBody
from lean_selector.wire.prompt_fields import PromptFields
from lean_selector.wire.selection import ErrorBody

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
# What the connection answers before a route is known, and what a service that fails says.
CONNECTION_ERRORS: Final = {
    400: "no HTTP request, or one that cannot be read",
    408: "the request did not come in time",
    414: "the target is too long",
    431: "the header section is too large",
    500: "the service has failed; its log says why",
    501: "a transfer-encoding that is not known",
    503: "too many connections, or too much is being received",
    505: "another version of HTTP than 1.0 and 1.1",
}
_OF_BODIES: Final = {
    400: "the body is no JSON",
    413: "the body is too large",
    415: "the content-type is another",
    422: "the body is JSON, and not of this shape",
}
OPEN: Final = "open"  # the role of whoever has no token
_LEAST: Final = "read"  # every token's
_NO_ROLES: Final[dict[tuple[str, str], str]] = {}
_REFUSALS: Final = {401: "no token, or one that is not known", 403: "the token's role is too small"}
_SCHEME: Final = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token of --auth-token-file. Of its roles each holds the ones before it: read,"
    " write, admin.",
}
_ABOUT: Final = """\
Every error is `{"error": "..."}` and names what was wrong. Answers are MessagePack where `accept`
names it; bodies with a prompt may be. Unknown fields are ignored. HEAD is answered as GET.
"""


def document(
    title: str,
    routes: Iterable[tuple[str, str]],
    described: Mapping[tuple[str, str], RouteDescription],
    roles: Mapping[tuple[str, str], str] = _NO_ROLES,
    *,
    asks_tokens: bool = False,
) -> dict[str, Any]:
    """`routes` are methods and path templates, in the order shown. One that is not described is
    shown as such. `roles` are those of tokens, OPEN for a route of everybody; where the service
    `asks_tokens` they are also its security."""
    kept = {route: described.get(route, _undescribed(route)) for route in routes}
    shapes = _Shapes(kept.values())
    paths: dict[str, dict[str, Any]] = {}
    for (method, template), about in kept.items():
        path = template.replace("*}", "}")
        operation = _operation(method, path, about, shapes)
        role = roles.get((method, template))
        if role is not None:
            operation["x-role"] = role
            if asks_tokens and role != OPEN:
                _secure(operation, role, about.refusal, shapes)
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": each} for each in dict.fromkeys(one.group for one in kept.values())],
        "paths": paths,
        "components": {
            "schemas": shapes.named,
            "responses": {
                **(_refusals(shapes.of(ErrorBody)) if asks_tokens else {}),
                **{str(each): _error([text], shapes) for each, text in CONNECTION_ERRORS.items()},
            },
            **({"securitySchemes": {"token": _SCHEME}} if asks_tokens else {}),
        },
    }


def _secure(operation: dict[str, Any], role: str, refusal: Any, shapes: "_Shapes") -> None:
    operation["security"] = [{"token": [role]}]
    responses = operation["responses"]
    own = {} if refusal is ErrorBody else _refusals(shapes.of(refusal))
    for status in map(str, _REFUSALS if role != _LEAST else [401]):
        responses[status] = own.get(status, {"$ref": f"#/components/responses/{status}"})
    operation["responses"] = dict(sorted(responses.items()))


def _refusals(schema: Schema) -> dict[str, Any]:
    line = {"description": "RFC 6750", "schema": {"type": "string"}}
    return {
        str(status): {
            **_response(text, {JSON: {"schema": schema}}),
            "headers": {"www-authenticate": line},
        }
        for status, text in _REFUSALS.items()
    }


def _undescribed(route: tuple[str, str]) -> RouteDescription:
    return RouteDescription(summary="Not described", group="other", answers={200: dict[str, Any]})


class _Shapes:
    """The schema of every type that the routes name."""

    def __init__(self, described: Iterable[RouteDescription]) -> None:
        types: list[Any] = [ErrorBody, OverloadBody]
        for each in described:
            answers = [one for answer in each.answers.values() for one in _alternatives(answer)]
            types += [one for one in (*answers, each.body, each.refusal) if one is not None]
        self._types = types
        self._schemas, self.named = components(types)

    def of(self, kind: Any) -> Schema:
        return self._schemas[self._types.index(kind)]


def _alternatives(answer: Any) -> list[Any]:
    return [one for one in (answer if isinstance(answer, list) else [answer]) if _is_json(one)]


def _is_json(answer: Any) -> bool:
    return answer is not None and not isinstance(answer, Text)


def _operation(method: str, path: str, about: RouteDescription, shapes: _Shapes) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", path)
    parameters = [*map(_path_parameter, names), *map(_query_parameter, about.query)]
    operation: dict[str, Any] = {
        "operationId": _operation_id(method, path),
        "summary": about.summary,
        "tags": [about.group],
    }
    if parameters:
        operation["parameters"] = parameters
    if about.body is not None:
        operation["requestBody"] = _body(about, shapes)
    operation["responses"] = {
        str(status): answer for status, answer in sorted(_responses(about, names, shapes).items())
    }
    return operation


def _operation_id(method: str, path: str) -> str:
    words = re.findall(r"\w+", path)
    return "_".join([method.lower(), *words])


def _path_parameter(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": _PARAM_MEANINGS.get(name, name),
        "schema": _PARAMS.get(name, {"type": "string"}),
        "example": _PARAM_EXAMPLES.get(name, name),
    }


def _query_parameter(field: QueryField) -> dict[str, Any]:
    schema: Schema = {"type": "string"}
    if field.pattern is not None:
        schema["pattern"] = field.pattern
    shown = {"name": field.name, "in": "query", "required": field.is_required}
    return {**shown, "description": field.meaning, "schema": schema}


def _body(about: RouteDescription, shapes: _Shapes) -> dict[str, Any]:
    media: dict[str, Any] = {"schema": shapes.of(about.body)}
    content = {JSON: {**media, "example": about.example}}
    if issubclass(about.body, PromptFields):
        content[MSGPACK] = media
    return {"required": not about.is_body_optional, "content": content}


def _responses(
    about: RouteDescription, params: list[str], shapes: _Shapes
) -> dict[int, dict[str, Any]]:
    texts: dict[int, list[str]] = {}

    def add(found: Mapping[int, str]) -> None:
        for status, text in found.items():
            texts.setdefault(status, []).append(text)

    add(about.errors)
    if about.body is not None and not about.is_body_optional:
        add(_OF_BODIES)
    if params:
        add({400: "the path cannot be read"})
    if about.query:
        add({400: "the query cannot be read"})
    add(CONNECTION_ERRORS)
    error = shapes.of(ErrorBody)
    sheds = 429 in about.errors
    responses = {}
    for status, reasons in texts.items():
        if reasons == [CONNECTION_ERRORS.get(status)] and status not in about.answers:
            responses[status] = {"$ref": f"#/components/responses/{status}"}
        else:
            responses[status] = _error(reasons, shapes, sheds=sheds and status in _SHED)
    for status, answer in about.answers.items():
        others = responses.get(status)
        schemas = [shapes.of(one) for one in _alternatives(answer)]
        if others is not None:
            schemas.append(error)
        responses[status] = _answer(answer, schemas)
        if others is not None:
            responses[status]["description"] += f"; or {others['description']}"
    return responses


def _error(reasons: list[str], shapes: _Shapes, *, sheds: bool = False) -> dict[str, Any]:
    schema = shapes.of(ErrorBody)
    if sheds:
        schema = {"anyOf": [schema, shapes.of(OverloadBody)]}
    return _response("; or ".join(reasons), {JSON: {"schema": schema}})


def _answer(answer: Any, schemas: list[Schema]) -> dict[str, Any]:
    if isinstance(answer, Text):
        return _response("text", {answer.media_type: {"schema": {"type": "string"}}})
    if not schemas:
        return {"description": "no body"}
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return _response("the answer", {JSON: {"schema": schema}})


def _response(text: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": content}


def encoded(made: dict[str, Any]) -> bytes:
    """The document as JSON text."""
    return msgspec.json.encode(made)


# -- services ------------------------------------------------------------------------------------
#
# Which service has which document.

DESCRIBED: Final = {
    "selector": ("lean-selector", SELECTOR_ROUTES | DOOR_ROUTES),
    "selector_16": ("lean-selector --api 1.6", SELECTOR_16_ROUTES | DOOR_ROUTES),
    "slot_tracker": ("lean-slot-tracker", SLOT_TRACKER_ROUTES),
}


def service_document(
    service: str,
    routes: Iterable[tuple[str, str]],
    roles: Mapping[tuple[str, str], str] = _NO_ROLES,
    *,
    asks_tokens: bool = False,
) -> bytes:
    """The document of a service with these routes, as JSON text; `roles` as in `document`."""
    title, described = DESCRIBED[service]
    return encoded(document(title, routes, described, roles, asks_tokens=asks_tokens))
