"""Makes the answer of GET /openapi.json from the routes and from the structs of their bodies and
answers, whose docstrings say what they are for.

`openapi_texts.json` has the rest: the frame of the document, the parameters of paths and queries,
an example of each body, rules that no struct can express, and
what each field means. `Struct.field` is for a struct and its subclasses, if the field means
something else there than elsewhere."""

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Annotated, Any, Final, get_args

import msgspec
from msgspec import Meta, Raw, Struct, UnsetType

from lean_selector import __version__
from lean_selector.api.access import NAMES, OPEN
from lean_selector.api.routes import Route
from lean_selector.wire.selection_bodies import (
    ErrorBody,
    OpenAiErrorBody,
    OverloadBody,
    PromptFields,
)

Schema = dict[str, Any]
_PLACE: Final = "#/components/schemas/{name}"
_HASHES: Final[Any] = list[Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]]
_NO_WORKER: Final = "all workers are busy (with --overload-status); 503: or none is eligible"


def openapi_parts(title: str, routes: Sequence[Route], asks_tokens: bool) -> Iterator[bytes]:
    """Yields the OpenAPI document for `routes` as one part, and empty parts before it, between
    which a few milliseconds pass: msgspec takes most of the time to describe a struct."""
    file = files("lean_selector.api").joinpath("openapi_texts.json")
    texts = msgspec.json.decode(file.read_bytes())
    document: Schema = texts["document"]
    document["info"] |= {"title": title, "version": __version__}
    document["tags"] = [{"name": tag} for tag in dict.fromkeys(route.tag for route in routes)]
    components: dict[str, Schema] = {}
    described: dict[Any, Schema] = {}
    for kind in dict.fromkeys([kind for route in routes for kind in _kinds_of(route)]):
        [described[kind]], found = msgspec.json.schema_components(
            [_as_sent(kind)], schema_hook=_list_of_workers, ref_template=_PLACE
        )
        structs = _structs_of(kind)
        for name, schema in found.items():
            if name not in components:
                _explain(schema, structs[name], texts["fields"])
                components[name] = schema | texts["rules"].get(name, {})
        yield b""
    document["components"]["schemas"] = components
    for route in routes:
        operation = _operation(route, described, texts)
        if asks_tokens and route.role != OPEN:
            operation["security"] = [{"token": [operation["x-role"]]}]
        path = document["paths"].setdefault(route.path.replace("*}", "}"), {})
        path[route.method.lower()] = operation
    yield msgspec.json.encode(document)


# -- routes ----------------------------------------------------------------------------------------


def _kinds_of(route: Route) -> Iterator[Any]:
    yield ErrorBody
    if route.sheds:
        yield OverloadBody
    if route.refused is not None:
        yield OpenAiErrorBody
    if route.body is not None:
        yield route.body
    yield from _answers_of(route)


def _answers_of(route: Route) -> tuple[Any, ...]:
    return route.gives if isinstance(route.gives, tuple) else (route.gives,)


def _operation(route: Route, schemas: dict[Any, Schema], texts: Schema) -> Schema:
    method, path = route.method.lower(), route.path
    names = [*re.findall(r"{(\w+)", path), *sorted(route.query)]
    told: Schema = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": route.summary,
        "tags": [route.tag],
        **({"parameters": [texts["parameters"][name] for name in names]} if names else {}),
        "responses": _responses(route, schemas),
        "x-role": NAMES.get(route.role, "open"),
    }
    if route.body is not None:
        example = texts["examples"][route.body.__name__.removesuffix("16")]
        content = {"application/json": {"schema": schemas[route.body], "example": example}}
        if issubclass(route.body, PromptFields):
            content["application/msgpack"] = {"schema": schemas[route.body]}
        told["requestBody"] = {"required": not route.is_body_optional, "content": content}
    return told


def _responses(route: Route, schemas: dict[Any, Schema]) -> Schema:
    answer = _response("the answer", [schemas[kind] for kind in _answers_of(route)], route.media)
    told = {str(status): answer for status in (route.status, route.also) if status}
    error = schemas[ErrorBody]
    for status in (429, 503, 529) if route.sheds else ():
        told[str(status)] = _response(_NO_WORKER, [error, schemas[OverloadBody]])
    told["default"] = {"$ref": "#/components/responses/Error"}
    if route.refused is not None:
        told["default"] = _response("what was wrong", [schemas[OpenAiErrorBody], error])
    return told


def _response(text: str, schemas: list[Schema], media: str = "application/json") -> Schema:
    if not schemas:
        return {"description": "no body"}
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"description": text, "content": {media: {"schema": schema}}}


# -- structs ---------------------------------------------------------------------------------------


def _structs_of(kind: Any) -> dict[str, type[Struct]]:
    """Return the structs in a type, and in their fields, by name."""
    found: dict[str, type[Struct]] = {}
    if isinstance(kind, type) and issubclass(kind, Struct):
        found[kind.__name__] = kind
        for field in msgspec.structs.fields(kind):
            found |= _structs_of(field.type)
    for each in get_args(kind):
        found |= _structs_of(each)
    return found


def _as_sent(kind: Any) -> Any:
    """Return a struct with lists in place of the encoded lists of hashes; other types as is."""
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        return kind
    fields = msgspec.structs.fields(kind)
    if not any(field.type is Raw for field in fields):
        return kind
    hashes = {True: (_HASHES,), False: (_HASHES | None, None)}
    return msgspec.defstruct(
        kind.__name__,
        [
            (field.name, *hashes[field.required])
            if field.type is Raw
            else (field.name, field.type, *([] if field.required else [field.default]))
            for field in fields
        ],
        namespace={"__doc__": kind.__doc__},
        kw_only=True,
    )


def _list_of_workers(kind: type) -> Schema:
    """Describes JsonText: the only field of this type is the list of workers in GET /ready."""
    return {"type": "array", "items": {"$ref": _PLACE.format(name="WorkerRecord")}}


def _explain(schema: Schema, struct: type[Struct], texts: dict[str, str]) -> None:
    """Adds what a struct and its fields mean, and which fields are always present."""
    del schema["title"]
    schema["description"] = " ".join(schema["description"].split())
    schema["required"] = []
    for field in msgspec.structs.fields(struct):
        name = field.encode_name
        special = (f"{each.__name__}.{name}" for each in struct.__mro__)
        key = next((key for key in special if key in texts), name)
        schema["properties"][name]["description"] = texts[key]
        if field.required and UnsetType not in get_args(field.type):
            schema["required"].append(name)
