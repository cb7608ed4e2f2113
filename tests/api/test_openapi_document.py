"""GET /openapi.json of both services: valid, complete, and true of what they answer."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

import lean_selector
from lean_selector import __version__
from lean_selector.api.application import openapi_route
from lean_selector.api.gate import Gate
from lean_selector.api.replies import SLICE_S
from lean_selector.core.settings import API_1_3, API_1_6
from lean_selector.http.response import PendingReply
from tests.support.gates import (
    TITLES,
    Turns,
    answered,
    described,
    request,
    routes_of,
    selection_gate,
    selection_service,
    slot_tracker_gate,
)
from tests.support.recorded_cases import scenarios

TEXTS = Path(lean_selector.__file__).parent / "api/openapi_texts.json"
DOCUMENTS = {name: described(name) for name in ("selector", "selector_16", "slot_tracker")}
RECORDED = {"selector": "selection", "selector_16": "selection_16", "slot_tracker": "slot_tracker"}


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


# -- the document ----------------------------------------------------------------------------------


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


@pytest.mark.one_form
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_handler_takes_the_body_of_its_route(name: str) -> None:
    """The types of a Route do not say so. In the 1.6 dialect some handlers take any. A compiled
    handler has no annotations."""
    for route in routes_of(name):
        if route.body is not None:
            hints = get_type_hints(route.handler)
            taken = [hints[each] for each in hints if each != "return"]
            kinds = {kind for each in taken for kind in get_args(each) or (each,)}
            assert Any in kinds or any(issubclass(route.body, kind) for kind in kinds), route.path


def test_the_document_is_made_once_and_in_slices() -> None:
    turns = Turns()
    clock = itertools.count(step=SLICE_S).__next__  # every look at it is a slice's time
    routes = tuple(routes_of("selector"))
    whole = openapi_route(TITLES["selector"], routes, turns.call_soon, clock)
    gate, asked = Gate([whole]), request("GET", "/openapi.json")
    first, second = gate(asked), gate(asked)
    assert isinstance(first, PendingReply)
    assert isinstance(second, PendingReply)
    assert turns.run() > 20
    assert first.response is not None
    assert first.response == second.response
    status, text = answered(gate, asked)  # at once
    assert (status, text) == (200, bytes(first.response).partition(b"\r\n\r\n")[2])
    assert json.loads(text) == DOCUMENTS["selector"]


# -- what is served --------------------------------------------------------------------------------


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


def test_every_text_is_used() -> None:
    """That every field, parameter and body has one, the documents would fail without."""
    texts = json.loads(TEXTS.read_bytes())
    schemas = [each["components"]["schemas"] for each in DOCUMENTS.values()]
    told = {
        (field, shown["description"])
        for each in schemas
        for schema in each.values()
        for field, shown in schema["properties"].items()
    }
    unused = [
        key for key, text in texts["fields"].items() if (key.rpartition(".")[2], text) not in told
    ]
    assert unused == []
    mute = [name for each in schemas for name, schema in each.items() if not schema["description"]]
    assert mute == []


# -- what the services answer ----------------------------------------------------------------------


def gate_of(name: str) -> Gate:
    if name == "slot_tracker":
        return slot_tracker_gate()
    dialect = API_1_6 if name == "selector_16" else API_1_3
    return selection_gate(service=selection_service(dialect=dialect))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_answer_to_the_recorded_requests_is_described(name: str) -> None:
    """Some 1 500 requests, right and wrong ones, as the services answer them in process."""
    document = DOCUMENTS[name]
    strict = closed(document)
    looked_at = 0
    for scenario, steps in scenarios(RECORDED[name]).items():
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
