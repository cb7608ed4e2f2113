"""What answers say in headers: the models that exist, and fields that nobody reads."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from lean_selector.service.gate import Gate
from lean_selector.service.header_warnings import known_models_line, refusal_lines
from tests.support.gates import request, selection_gate, selection_gate_16


def headers(gate: Gate, path: str, body: Any, method: str = "POST") -> tuple[int, dict[str, str]]:
    answer = gate(request(method, path, json.dumps(body).encode()))
    assert isinstance(answer, bytes)
    head = answer.partition(b"\r\n\r\n")[0].decode()
    lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
    return int(head[9:12]), lines


def gate_with(*models: str) -> Gate:
    gate = selection_gate(lines=refusal_lines)
    for number, model in enumerate(models):
        body = {"worker_id": number, "model_name": model, "endpoint": "http://w", "block_size": 16}
        assert headers(gate, "/workers", body)[0] == 201
    return gate


def test_a_model_that_nobody_serves_is_answered_with_those_that_exist() -> None:
    gate = gate_with("llama", "a, b", "ö", "llama")
    status, lines = headers(gate, "/select", {"model_name": "lama", "token_ids": [1]})
    assert status == 503
    assert lines["x-known-models"] == r'"a, b", "llama", "\u00f6"'
    assert "x-known-models" not in headers(gate_with(), "/select", {"token_ids": [1]})[1]


def test_a_model_of_another_tenant_is_answered_with_the_tenants_that_it_has() -> None:
    gate = gate_with("llama")
    worker = {"model_name": "qwen", "endpoint": "http://w", "block_size": 16}
    for worker_id, tenant in enumerate(("b", "acme"), 7):
        headers(gate, "/workers", {**worker, "worker_id": worker_id, "tenant_id": tenant})
    for body in ({"token_ids": [1]}, {"token_ids": [1], "tenant": "acme"}):
        status, lines = headers(gate, "/select", {"model_name": "qwen", **body})
        assert (status, lines["x-known-models"]) == (503, '"llama", "qwen"')
        said, _, more = lines["x-warning"].partition("; ")
        assert said == "model qwen has workers of another tenant: acme, b"
        assert ("is tenant_id meant?" in more) == ("tenant" in body)
    assert "x-warning" not in headers(gate, "/select", {"token_ids": [1]})[1]
    for worker_id in range(10, 15):
        one = {**worker, "worker_id": worker_id, "tenant_id": f"c{worker_id}"}
        headers(gate, "/workers", one)
    lines = headers(gate, "/select", {"model_name": "qwen", "token_ids": [1]})[1]
    assert lines["x-warning"].endswith(": acme, b, c10, c11 and 3 more")


def test_a_tenant_whose_own_workers_are_gone_is_told_of_the_others_too() -> None:
    gate = gate_with("llama")
    worker = {"model_name": "llama", "endpoint": "http://w", "block_size": 16, "tenant_id": "acme"}
    headers(gate, "/workers", {**worker, "worker_id": 7})
    assert headers(gate, "/workers/0", None, "DELETE")[0] == 200
    lines = headers(gate, "/select", {"model_name": "llama", "token_ids": [1]})[1]
    assert lines["x-warning"] == "model llama has workers of another tenant: acme"


def test_the_models_that_are_named_are_bounded() -> None:
    many = known_models_line(f"m{number:04}" for number in range(10_000))
    assert many.endswith(b', "m0031", ...\r\n')
    assert known_models_line(["x" * 5000]) == b"x-known-models: ...\r\n"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/select", {"model": "llama", "token_ids": [1]}, "model is ignored: is model_name meant?"),
        ("/select", {"model_name": "llama", "prompt": [1]}, "prompt is ignored: is token_ids"),
        ("/select_and_reserve", {"model_name": "llama", "block_hash": [1]}, "is block_hashes"),
        ("/reservations", {"model_name": "llama", "worker": 0}, "is worker_id meant?"),
        ("/workers/0/report", {"status": "failed"}, "status is ignored: is outcome meant?"),
    ],
)
def test_a_request_that_fails_is_told_of_fields_that_look_like_known_ones(
    path: str, body: dict[str, Any], said: str
) -> None:
    status, lines = headers(gate_with("llama"), path, body)
    assert status >= 400
    assert said in lines["x-warning"]


def test_a_registration_is_told_of_them_though_it_succeeds_and_of_a_missing_scheme() -> None:
    body = {"worker_id": 1, "model": "llama", "endpoint": "10.0.0.1:8000", "block_size": 16}
    status, lines = headers(gate_with(), "/workers", body)
    assert status == 201
    assert "model is ignored: is model_name meant?" in lines["x-warning"]
    answer = gate_with()(request("POST", "/workers", json.dumps(body).encode()))
    assert isinstance(answer, bytes)
    assert b"endpoint 10.0.0.1:8000 has no scheme: http://10.0.0.1:8000 is probably" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["model_name"] == "default"


@pytest.mark.parametrize("gate_of", [gate_with, selection_gate_16])
def test_a_report_is_told_of_them_though_it_counts(gate_of: Callable[[], Gate]) -> None:
    gate = gate_of()
    worker = {"worker_id": 0, "endpoint": "http://w", "block_size": 16, "data_parallel_size": 2}
    headers(gate, "/workers", worker)
    path = "/workers/0/report"
    status, lines = headers(gate, path, {"outcome": "refused", "rank": 1, "ttft": 4})
    assert status == 200
    assert lines["x-warning"] == (
        "unknown field rank is ignored: is dp_rank meant?; "
        "unknown field ttft is ignored: is ttft_ms meant?"
    )
    right = {"outcome": "ok", "dp_rank": 1, "ttft_ms": 4.0, "cached_tokens": 3, "trace": "a"}
    assert "x-warning" not in headers(gate, path, right)[1]


def test_fields_of_ones_own_and_those_beside_the_right_one_are_nobodys_concern() -> None:
    for body in (
        {"model_name": "lama", "model": "llama", "token_ids": [1]},
        {"model_name": "lama", "token_ids": [1], "trace": "abc"},
        {"model_name": "lama", "token_ids": [1], "x" * 100: 1},
    ):
        assert "x-warning" not in headers(gate_with("llama"), "/select", body)[1], body


def test_a_request_that_succeeds_is_told_nothing() -> None:
    status, lines = headers(gate_with("default"), "/select", {"token_ids": [1], "model": "m"})
    assert (status, "x-warning" in lines) == (200, False)
