"""GET /openapi.json of both services: valid, complete, and true of what they answer."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

import lean_selector
from lean_selector import __version__
from lean_selector.core.index import shapes as index_shapes
from lean_selector.core.load import shapes as load_shapes
from lean_selector.core.selection import shapes as selection_shapes
from lean_selector.core.settings import API_1_3, API_1_6
from lean_selector.service.access import NAMES
from lean_selector.service.gate import Gate
from lean_selector.wire import (
    discovery_states,
    fleet,
    replica_shapes,
    selection_16_bodies,
    selection_bodies,
    slot_tracker_bodies,
)
from tests.support.gates import (
    answered,
    described,
    request,
    routes_of,
    selection_gate,
    selection_service,
    slot_tracker_gate,
)

DATA = Path(__file__).parents[1] / "data"
PACKAGE = Path(lean_selector.__file__).parent
FILES = sorted((PACKAGE / "service/openapi").glob("*.json"))
DOCUMENTS = {name: described(name) for name in ("selector", "selector_16", "slot_tracker")}
RECORDED = {
    "selector": "selection.jsonl",
    "selector_16": "selection_16.jsonl",
    "slot_tracker": "slot_tracker.jsonl",
}


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """The same, where an answer has no field that is not described."""
    described = document["components"]["schemas"]
    schemas = {name: {**each, "additionalProperties": False} for name, each in described.items()}
    return {**document, "components": {**document["components"], "schemas": schemas}}


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def operation_of(document: dict[str, Any], method: str, path: str) -> dict[str, Any] | None:
    """The operation that a request means."""
    for declared, template, operation in operations(document):
        pattern = re.sub(r"{\w+}", "[^/]+", template)
        if declared == method and re.fullmatch(pattern, path):
            return operation
    return None


def response_of(document: dict[str, Any], operation: dict[str, Any], status: int) -> Any:
    found = operation["responses"].get(str(status), operation["responses"]["default"])
    if "$ref" in found:
        return document["components"]["responses"][found["$ref"].rpartition("/")[2]]
    return found


# -- the document ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTS)
def test_it_is_valid_openapi(name: str) -> None:
    OpenAPIV31SpecValidator(described(name, asks_tokens=True)).validate()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_its_examples_are_what_its_schemas_say(name: str) -> None:
    document = DOCUMENTS[name]
    checked = 0
    for _, _, operation in operations(document):
        media = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
        if "example" in media:
            validator(document, media["schema"]).validate(media["example"])
            checked += 1
    assert checked >= 6


@pytest.mark.parametrize(
    ("key", "is_rank"),
    [
        *((str(n), True) for n in (0, 1, 9, 10, 999_999_999, 3_999_999_999, 4_294_967_295)),
        *((f"{n}", False) for n in (4_294_967_296, 4_300_000_000, 9_999_999_999, "01", "-1", "")),
    ],
)
def test_a_key_is_a_rank_exactly_where_the_service_takes_it_for_one(
    key: str, is_rank: bool
) -> None:
    worker = {"worker_id": 1, "kv_events_endpoints": {key: "tcp://127.0.0.1:1"}}
    schema = {"$ref": "#/components/schemas/WorkerRequest"}
    assert validator(DOCUMENTS["selector"], schema).is_valid(worker) == is_rank
    body = json.dumps(worker).encode()
    assert (answered(selection_gate(), request("POST", "/workers", body))[0] == 201) == is_rank


# -- routes and structs ---------------------------------------------------------------------------

# Rooms whose routes are of no service of ours: those of simulated engines.
OTHER_ROOMS = {"tools"}
METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE"}
STRUCTS: Final[dict[str, Any]] = {
    name: value
    for module in (
        *(discovery_states, fleet, replica_shapes, selection_bodies, selection_16_bodies),
        *(slot_tracker_bodies, index_shapes, load_shapes, selection_shapes),
    )
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, msgspec.Struct)
}


def declared() -> Iterator[tuple[str, str]]:
    """Path and method of every route in the sources, whether a service has it today or not."""
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in OTHER_ROOMS:
            continue
        text = path.read_text(encoding="utf-8")
        if not any(f'"{method}"' in text for method in METHODS):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Tuple) and len(node.elts) == 4:  # as in service/gate.py
                method, template = map(written, node.elts[:2])
                if method in METHODS:
                    yield template.replace("*}", "}"), method


def written(node: ast.expr) -> str:
    """A literal as it is; what is not one as the source has it, which no description is of."""
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def test_every_route_is_described_and_nothing_else() -> None:
    files = [json.loads(path.read_bytes()) for path in FILES if path.stem != "schemas"]
    found = {
        (path, method.upper())
        for each in files
        for path, operations in each["paths"].items()
        for method in operations
    }
    assert sorted(found ^ {*declared()}) == [], "CONTRIBUTING.md, How to add a route"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_route_is_described_as_it_is(name: str) -> None:
    for method, template, role, endpoint in routes_of(name):
        operation = DOCUMENTS[name]["paths"][template.replace("*}", "}")][method.lower()]
        at = f"{method} {template}"
        assert operation["x-role"] == NAMES.get(role, "open"), at
        parameters = operation.get("parameters", ())
        in_path = {each["name"] for each in parameters if each["in"] == "path"}
        assert in_path == {*re.findall(r"{(\w+)", template)}, at
        in_query = {
            each["name"]
            for each in parameters
            if each["in"] == "query"
            and (name == "selector_16" or not each["description"].endswith("`--api 1.6`"))
        }
        assert in_query == {*endpoint.query}, at
        assert ("requestBody" in operation) == (endpoint.body is not None), at
        if endpoint.body is not None:
            taken = operation["requestBody"]
            assert taken["required"] != endpoint.is_body_optional, at
            kinds = {media: kind_of(each["schema"]) for media, each in taken["content"].items()}
            assert {*kinds.values()} == {endpoint.body.__name__.removesuffix("16")}, at
            assert "example" in taken["content"]["application/json"], at
            is_prompt = issubclass(endpoint.body, selection_bodies.PromptFields)
            assert ("application/msgpack" in kinds) == is_prompt, at


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_has_the_fields_of_its_struct(name: str) -> None:
    for schema, shown in DOCUMENTS[name]["components"]["schemas"].items():
        struct = STRUCTS[schema]
        if name == "selector_16":
            struct = STRUCTS.get(f"{schema}16", struct)
        fields = {each.encode_name: each for each in msgspec.structs.fields(struct)}
        required = {name for name, field in fields.items() if is_required(field)}
        assert {*shown.get("required", ())} == required, schema
        wanted = {name: kind_of_type(field.type) for name, field in fields.items()}
        kinds = {name: kind_of(field) for name, field in shown["properties"].items()}
        as_it_came = {name: kinds.get(name) for name, kind in wanted.items() if kind == "any"}
        assert kinds == wanted | as_it_came, schema


def test_every_schema_is_of_a_body_or_an_answer() -> None:
    known = json.loads((PACKAGE / "service/openapi/schemas.json").read_bytes())
    used = {name for each in DOCUMENTS.values() for name in each["components"]["schemas"]}
    used |= {f"{name}16" for name in DOCUMENTS["selector_16"]["components"]["schemas"]}
    bases = {
        base["$ref"].rpartition("/")[2] for each in known.values() for base in each.get("allOf", ())
    }
    assert sorted(known.keys() - used - bases) == []


def is_required(field: msgspec.structs.FieldInfo) -> bool:
    return field.required and msgspec.UnsetType not in get_args(field.type)


def kind_of_type(kind: Any) -> str:
    """The type of a field in short, without its bounds; "any" of what stays encoded."""
    [schema], _ = msgspec.json.schema_components([kind], schema_hook=lambda _: {"title": "text"})
    return kind_of(schema)


def kind_of(schema: dict[str, Any]) -> str:
    """The type of a schema in short, without its bounds."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2].removesuffix("16"))
    if "anyOf" in schema:
        return "|".join(sorted({*map(kind_of, schema["anyOf"])}))
    if "enum" in schema:
        return "|".join(sorted(schema["enum"]))
    if items := schema.get("items"):
        return f"[{kind_of(items)}]"
    if values := schema.get("additionalProperties"):
        return f"{{{kind_of(values)}}}"
    return str(schema.get("type", "any"))


# -- what is served -------------------------------------------------------------------------------


def test_only_the_routes_that_are_served_are_described() -> None:
    whole = DOCUMENTS["selector"]
    some = described("selector", without={("GET", "/ui"), ("GET", "/workers")})
    assert set(whole["paths"]) - set(some["paths"]) == {"/ui"}
    assert set(whole["paths"]["/workers"]) - set(some["paths"]["/workers"]) == {"get"}
    assert some["info"]["version"] == __version__


def test_a_role_is_the_security_of_its_route_and_a_refusal_has_the_shape_of_its_errors() -> None:
    document = described("selector", asks_tokens=True)
    for _, path, operation in operations(document):
        assert ("security" in operation) == (path not in ("/health", "/ready", "/ui"))
        refusal = response_of(document, operation, 401)["content"]["application/json"]["schema"]
        assert ("anyOf" in refusal) == (path == "/route/{path}")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_schema_and_every_field_says_what_it_means(name: str) -> None:
    schemas = DOCUMENTS[name]["components"]["schemas"]
    mute = [name for name, schema in schemas.items() if not schema.get("description")]
    mute += [
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, shown in schema["properties"].items()
        if "description" not in shown
    ]
    assert mute == []


# -- what the services answer ---------------------------------------------------------------------


def gate_of(name: str) -> Gate:
    if name == "slot_tracker":
        return slot_tracker_gate()
    dialect = API_1_6 if name == "selector_16" else API_1_3
    return selection_gate(service=selection_service(dialect=dialect))


def recorded(name: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    scenarios: dict[str, list[dict[str, Any]]] = {}
    for line in (DATA / RECORDED[name]).read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        scenarios.setdefault(step["scenario"], []).append(step)
    yield from scenarios.items()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_answer_to_the_recorded_requests_is_described(name: str) -> None:
    """Some 1 500 requests, right and wrong ones, as the services answer them in process."""
    document = DOCUMENTS[name]
    strict = closed(document)
    looked_at = 0
    for scenario, steps in recorded(name):
        gate = gate_of(name)
        for step in steps:
            path, _, query = step["path"].partition("?")
            operation = operation_of(document, step["method"], path)
            if path == "/metrics" or operation is None or not isinstance(step["body"], str | None):
                continue
            headers = {key.lower(): value for key, value in step["headers"].items()}
            kind = headers.get("content-type")
            status, body = answered(
                gate,
                request(
                    step["method"],
                    path,
                    (step["body"] or "").encode(),
                    content_type=None if kind is None else kind.encode(),
                    query=query.encode() or None,
                ),
            )
            at = f"{scenario}: {step['method']} {path} {status} {body[:200]!r}"
            response = response_of(document, operation, status)
            content = response.get("content", {})
            if "application/json" in content:
                faults = list(
                    validator(strict, content["application/json"]["schema"]).iter_errors(
                        json.loads(body)
                    )
                )
                assert faults == [], at
                looked_at += 1
            else:
                assert body == b"", at
    assert looked_at > 100
