"""Creates the answer of GET /openapi.json from the files in `openapi/`: `schemas.json` describes
the structs of bodies and answers; each service has a file that describes its routes.

The files are written by hand, and tests compare them with the routes and the structs. A schema
lists the fields that its struct declares; `allOf` names the schema of the base struct. With `--api
1.6`, a schema `...16` replaces the schema of the same name without `16`."""

from importlib.resources import files
from typing import Any, Final

import msgspec

from lean_selector import __version__

Schemas = dict[str, dict[str, Any]]
_PLACE: Final = "#/components/schemas/"
_DIALECT: Final = "_16"


def openapi_text(document: str, served: set[tuple[str, str]], asks_tokens: bool) -> bytes:
    """Returns the OpenAPI document for the routes `served`, given as (method, path). `document` is
    the name of the service's file in `openapi/`, followed by `_16` for the API of Dynamo 1.6."""
    described = _file(document.removesuffix(_DIALECT))
    described["info"]["version"] = __version__
    paths = described["paths"]
    for path, operations in list(paths.items()):
        for method, operation in list(operations.items()):
            if (method, path) not in served:
                del operations[method]
            elif asks_tokens and operation["x-role"] != "open":
                operation["security"] = [{"token": [operation["x-role"]]}]
        if not operations:
            del paths[path]
    schemas: Schemas = {}
    described["components"]["schemas"] = schemas
    dialect = "16" if document.endswith(_DIALECT) else ""
    if dialect:
        described["info"]["title"] += " --api 1.6"
    _add_schemas(described, _file("schemas"), dialect, schemas)
    return msgspec.json.encode(described)


def _file(name: str) -> dict[str, Any]:
    file = files("lean_selector.service").joinpath("openapi", f"{name}.json")
    decoded: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    return decoded


def _add_schemas(node: Any, known: Schemas, dialect: str, found: Schemas) -> None:
    """Adds all schemas used in `node` to `found`. If `dialect` is "16", schema X16 replaces X."""
    if isinstance(node, list):
        for each in node:
            _add_schemas(each, known, dialect, found)
    elif isinstance(node, dict):
        name = str(node.get("$ref", "")).removeprefix(_PLACE)
        if name in known and name not in found:
            found[name] = _whole(known.get(name + dialect, known[name]), known)
            _add_schemas(found[name], known, dialect, found)
        _add_schemas(list(node.values()), known, dialect, found)


def _whole(schema: dict[str, Any], known: Schemas) -> dict[str, Any]:
    """Returns the schema with the fields of its base schemas (`allOf`) added."""
    schema = dict(schema)
    for base in schema.pop("allOf", ()):
        extended = _whole(known[base["$ref"].removeprefix(_PLACE)], known)
        schema["properties"] = extended["properties"] | schema.get("properties", {})
        required = [*extended.get("required", ()), *schema.get("required", ())]
        if required:
            schema["required"] = required
    return schema
