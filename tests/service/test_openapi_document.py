"""GET /openapi.json of both services: valid, and true of what they answer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from lean_selector import __version__
from lean_selector.service.application import openapi_route
from lean_selector.service.gate import Gate
from tests.documents import openapi_meanings as meanings
from tests.documents.openapi_document import (
    DESCRIBED,
    FOLDER,
    components,
    service_document,
    service_text,
)
from tests.documents.openapi_routes import GATEWAY_ROUTES
from tests.documents.pages import ROOT
from tests.support.gates import (
    answered,
    request,
    routes_of,
    selection_gate,
    selection_gate_16,
    slot_tracker_gate,
)

DATA = Path(__file__).parents[1] / "data"
TABLES = DESCRIBED
RECORDED = {
    "selector": "selection.jsonl",
    "selector_16": "selection_16.jsonl",
    "slot_tracker": "slot_tracker.jsonl",
}


def served(service: str, *, asks_tokens: bool = False, without: object = ()) -> dict[str, Any]:
    """What a service answers, without these routes."""
    routes = tuple(route for route in routes_of(service) if route[:2] not in without)  # type: ignore[operator]
    gate = Gate([openapi_route(service, routes, asks_tokens=asks_tokens)])
    status, text = answered(gate, request("GET", "/openapi.json"))
    assert status == 200
    document: dict[str, Any] = json.loads(text)
    return document


class Tree(msgspec.Struct):
    """One that is made of itself."""

    left: "Tree | None" = None
    right: "Tree | None" = None


def test_a_struct_is_looked_into_once_wherever_it_stands() -> None:
    assert list(components([Tree, list[Tree]])[1]) == ["Tree"]


class Parcel(msgspec.Struct):
    """One of whom a part stays encoded."""

    content: msgspec.Raw = msgspec.Raw(b"null")
    labels: list[str] = msgspec.field(default_factory=list)
    weight: int = 3


def test_what_is_left_encoded_may_be_absent_and_the_other_defaults_stand() -> None:
    shown = components([Parcel])[1]["Parcel"]
    assert shown.get("required", []) == []
    assert shown["properties"]["labels"]["default"] == []
    assert shown["properties"]["weight"]["default"] == 3


DOCUMENTS = {service: served(service, without=GATEWAY_ROUTES) for service in TABLES}


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


@pytest.mark.parametrize("name", TABLES)
def test_it_is_valid_openapi(name: str) -> None:
    OpenAPIV31SpecValidator(DOCUMENTS[name]).validate()


@pytest.mark.parametrize("name", TABLES)
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


@pytest.mark.parametrize("name", TABLES)
def test_what_is_served_is_made_of_the_routes_as_they_are(name: str) -> None:
    assert (ROOT / FOLDER / f"{name}.json").read_bytes() == service_text(name), (
        ".venv/bin/python -m tests.documents.fields_page writes it anew"
    )


def test_only_the_routes_that_are_served_are_described() -> None:
    whole = service_document("selector")
    some = served("selector", without={("GET", "/ui"), ("GET", "/workers")})
    assert set(whole["paths"]) - set(some["paths"]) == {"/ui"}
    assert set(whole["paths"]["/workers"]) - set(some["paths"]["/workers"]) == {"get"}
    assert some["info"]["version"] == __version__


def test_a_role_is_the_security_of_its_route_and_a_refusal_has_the_shape_of_its_errors() -> None:
    document = served("selector", asks_tokens=True)
    OpenAPIV31SpecValidator(document).validate()
    for _, path, operation in operations(document):
        assert ("security" in operation) == (path not in ("/health", "/ready", "/ui"))
        refusal = response_of(document, operation, 401)["content"]["application/json"]["schema"]
        assert ("anyOf" in refusal) == (path == "/route/{path}")


@pytest.mark.parametrize("name", TABLES)
def test_every_schema_and_every_field_says_what_it_means(name: str) -> None:
    schemas = DOCUMENTS[name]["components"]["schemas"]
    mute = [name for name, schema in schemas.items() if not schema.get("description")]
    mute += [
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, shown in schema["properties"].items()
        if "description" not in shown
    ]
    assert mute == [], (
        "a schema needs a docstring, a field a line in the glossary or in meanings.py"
    )


def test_no_meaning_is_left_of_a_field_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = {name: f"{name} everywhere" for name in meanings.GLOSSARY}
    own = {name: f"{name} alone" for name in meanings.OWN}
    monkeypatch.setattr(meanings, "GLOSSARY", everywhere)
    monkeypatch.setattr(meanings, "OWN", own)
    said = {
        field["description"]
        for name in DESCRIBED
        for document in [service_document(name)]
        for schema in document["components"]["schemas"].values()
        for field in schema["properties"].values()
    }
    known = {*everywhere.values(), *own.values()}
    assert sorted(known - said) == []


# -- what the services answer ---------------------------------------------------------------------


def gate_of(name: str) -> Gate:
    if name == "slot_tracker":
        return slot_tracker_gate()
    return selection_gate_16() if name == "selector_16" else selection_gate()


def recorded(name: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    scenarios: dict[str, list[dict[str, Any]]] = {}
    for line in (DATA / RECORDED[name]).read_text(encoding="utf-8").splitlines():
        step = json.loads(line)
        scenarios.setdefault(step["scenario"], []).append(step)
    yield from scenarios.items()


@pytest.mark.parametrize("name", TABLES)
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
