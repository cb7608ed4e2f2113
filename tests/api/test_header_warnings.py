"""What answers say in headers: endpoints that cannot be meant so, models and tenants that exist,
fields that no route reads."""

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from lean_selector.api.header_warnings import (
    known_models_line,
    registration_warnings,
)
from lean_selector.api.replies import warning_line
from lean_selector.core.selection.catalog import Worker
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.core.settings import API_1_6
from lean_selector.wire.discovery_states import EVENTS_PORT
from tests.support.asked import worker as any_worker
from tests.support.gates import InProcess, NoEngines, selection_gate, selector
from tests.support.running_service import DEADLINE_S, RunningService

# -- endpoints of a registration -------------------------------------------------------------------


LISTENS = "is a wildcard that an engine binds to: give its host"


DEFAULT = RouterSettings()


def warnings(settings: RouterSettings = DEFAULT, **fields: object) -> list[str]:
    events = "tcp://host:15557"
    told: dict[str, object] = {"worker_id": 1, "endpoint": "http://Host:8000"}
    told |= {"kv_events_endpoint": events, **fields}
    spec = WorkerSpec(**told)  # type: ignore[arg-type]
    return registration_warnings(Worker(spec, [], {}), NoEngines(), settings)


@pytest.mark.parametrize(
    "endpoint", ["tcp://host:5557", "tcp://[::1]:5557", "ipc:///run/engine", "tcp://host:18000"]
)
def test_nothing_is_said_of_what_may_be_right(endpoint: str) -> None:
    assert warnings(kv_events_endpoint=endpoint, replay_endpoint="tcp://host:5558") == []


@pytest.mark.parametrize(
    ("endpoint", "fault"),
    [
        ("tcp://*:5557", LISTENS),
        ("tcp://0.0.0.0:5557", LISTENS),
        ("tcp://[::]:5557", LISTENS),
        ("host:5557", "has no scheme: tcp://host:5557 is probably meant"),
        ("http://host:5557", "is not a ZMQ endpoint (tcp://host:port)"),
        ("inproc://events", "is not reachable outside of the engine's process"),
    ],
)
def test_what_cannot_be_meant_is_named(endpoint: str, fault: str) -> None:
    assert warnings(kv_events_endpoint=endpoint) == [f"kv_events_endpoint {endpoint} {fault}"]
    assert warnings(replay_endpoint=endpoint) == [f"replay_endpoint {endpoint} {fault}"]
    by_rank = warnings(kv_events_endpoints={3: endpoint}, replay_endpoints={4: endpoint})
    assert by_rank == [
        f"kv_events_endpoints[3] {endpoint} {fault}",
        f"replay_endpoints[4] {endpoint} {fault}",
    ]


@pytest.mark.parametrize(
    ("settings", "assumed"),
    [
        (RouterSettings(), "load alone decides"),
        (RouterSettings(predicted_ttl_s=10.0), "routed in the last 10 s"),
    ],
)
def test_a_worker_without_events_is_told_what_stands_in_for_them(
    settings: RouterSettings, assumed: str
) -> None:
    [warning] = warnings(settings, kv_events_endpoint=None)
    assert assumed in warning
    assert EVENTS_PORT in warning
    assert warnings(RouterSettings(use_kv_events=False), kv_events_endpoint=None) == []


def test_many_faults_make_a_short_line() -> None:
    found = warnings(kv_events_endpoints=dict.fromkeys(range(4096), "tcp://*:5557"))
    assert len(found) == 5
    assert found[-1] == "and more of its endpoints"


def test_a_warning_is_one_header_line_whatever_is_in_it() -> None:
    assert warning_line(["a", "b"]) == b"x-warning: a; b\r\n"
    assert (
        warning_line(["x\r\ny: \u00e9\x7f\U0001f980"])
        == b"x-warning: x\\u000d\\u000ay: \\u00e9\\u007f\\ud83e\\udd80\r\n"
    )
    assert len(warning_line(["a" * 10_000])) < 2_100
    cut = warning_line(["a" + "\u00e9" * 10_000])
    assert len(cut) < 2_100
    assert cut.endswith(b"\\u00e9...\r\n"), "no escape is cut"


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService() as running:
        yield running


def sent(
    service: RunningService, method: str, path: str, body: Mapping[str, object]
) -> tuple[int, str | None, dict[str, object]]:
    """Status, warning and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=DEADLINE_S)
    with closing(connection):
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.getheader("x-warning"), json.loads(answer.read())


def worker(worker_id: int, **fields: object) -> dict[str, object]:
    return any_worker(worker_id, **{"endpoint": f"http://w:{8000 + worker_id}", **fields})


def test_a_registration_says_so_in_a_header_and_nowhere_else(service: RunningService) -> None:
    body = worker(1, kv_events_endpoint="tcp://*:5557", replay_endpoint="tcp://0.0.0.0:1")
    status, warning, record = sent(service, "POST", "/workers", body)
    assert (status, record["lifecycle"]) == (201, "schedulable")
    replay = f"replay_endpoint tcp://0.0.0.0:1 {LISTENS}"
    assert warning == f"kv_events_endpoint tcp://*:5557 {LISTENS}; {replay}"
    mended = {"kv_events_endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://w:5558"}
    status, warning, record = sent(service, "PATCH", "/workers/1", mended)
    assert (status, warning, record["lifecycle"]) == (200, None, "schedulable")


def warned(service: RunningService, body: dict[str, object]) -> str | None:
    """What the registration of a worker warns of; the worker is gone again."""
    status, warning, _ = sent(service, "POST", "/workers", body)
    assert status == 201
    assert service.request("DELETE", f"/workers/{body['worker_id']}")[0] == 200
    return warning


@pytest.fixture(scope="module")
def neighbours(service: RunningService) -> None:
    """Worker 20, with an endpoint of each kind and two ranks; and worker 22."""
    body = worker(
        20,
        endpoint="http://n:8000/v1",
        data_parallel_size=2,
        kv_events_endpoints={"0": "tcp://n:5557", "1": "tcp://n:5558"},
        replay_endpoint="tcp://n:6557",
    )
    assert sent(service, "POST", "/workers", body)[:2] == (201, None)
    taken = worker(22, kv_events_endpoint="tcp://w:7901", replay_endpoint="tcp://w:7911")
    assert sent(service, "POST", "/workers", taken)[1] is None


@pytest.mark.parametrize(
    ("field", "endpoint", "said"),
    [
        ("replay_endpoint", "tcp://N:06557", "is also that of worker 20 dp_rank 0"),
        ("replay_endpoint", "tcp://n:6558", "is also that of worker 20 dp_rank 1"),
        ("replay_endpoint", "tcp://n:5558", "is also that of worker 20 dp_rank 1"),
        ("kv_events_endpoint", "tcp://N:5557", "is also that of worker 20 dp_rank 0"),
        ("kv_events_endpoint", "tcp://n:6558", "is also that of worker 20 dp_rank 1"),
    ],
)
@pytest.mark.usefixtures("neighbours")
def test_an_endpoint_of_another_worker_is_named(
    service: RunningService, field: str, endpoint: str, said: str
) -> None:
    fields: dict[str, object] = {"kv_events_endpoint": "tcp://m:5557", field: endpoint}
    assert warned(service, worker(21, **fields)) == f"{field} {endpoint} {said}"


def test_without_kv_events_their_endpoints_are_not_judged() -> None:
    body = worker(1, kv_events_endpoint="tcp://*:5557")
    assert "x-warning" not in selector().with_headers("POST", "/workers", body)[1]


# -- what exists, and what is not read -------------------------------------------------------------


def headers(
    service: InProcess, path: str, body: Any, method: str = "POST"
) -> tuple[int, dict[str, str]]:
    return service.with_headers(method, path, body)[:2]


def gate_with(*models: str) -> InProcess:
    gate = InProcess(selection_gate())
    for number, model in enumerate(models):
        gate.add_worker(number, model_name=model)
    return gate


def test_of_a_worker_with_other_blocks_the_way_out_is_named() -> None:
    gate = gate_with("m")
    worker = {"worker_id": 0, "model_name": "m", "endpoint": "http://w", "block_size": 999}
    for call in (("/workers", worker), ("/workers/0", {"block_size": 998}, "PATCH")):
        status, lines = headers(gate, *call)
        assert status in (200, 201)
        assert "DELETE" in lines["x-warning"]


def test_a_field_that_was_dropped_is_ignored_and_named() -> None:
    gate = gate_with("m")
    worker = {"worker_id": 0, "model_name": "m", "endpoint": "http://w", "block_size": 4}
    dropped = {"load_endpoint": "tcp://w:1"}
    for call in (("/workers", worker | dropped), ("/workers/0", dropped, "PATCH")):
        status, lines = headers(gate, *call)
        assert status in (200, 201)
        assert "load_endpoint is ignored" in lines["x-warning"]
    assert "load_endpoint" not in gate.get("/workers")[1][0]
    assert "x-warning" not in headers(gate, "/select", {"token_ids": [1], **dropped})[1]


def test_a_model_that_nobody_serves_is_answered_with_those_that_exist() -> None:
    gate = gate_with("llama", "a, b", "ö", "llama", "\U0001f980\x7f")
    status, lines = headers(gate, "/select", {"model_name": "lama", "token_ids": [1]})
    assert status == 503
    assert lines["x-known-models"] == r'"a, b", "llama", "\u00f6", "\ud83e\udd80\u007f"'
    assert "x-known-models" not in headers(gate_with(), "/select", {"token_ids": [1]})[1]


def test_a_model_of_another_tenant_is_answered_with_the_tenants_that_it_has() -> None:
    gate = gate_with("llama")
    for worker_id, tenant in enumerate(("b", "acme"), 7):
        gate.add_worker(worker_id, model_name="qwen", tenant_id=tenant)
    for body in ({"token_ids": [1]}, {"token_ids": [1], "tenant": "acme"}):
        status, lines = headers(gate, "/select", {"model_name": "qwen", **body})
        assert (status, lines["x-known-models"]) == (503, '"llama", "qwen"')
        said, _, more = lines["x-warning"].partition("; ")
        assert said == "model qwen has workers of another tenant: acme, b"
        assert ("is tenant_id meant?" in more) == ("tenant" in body)
    assert "x-warning" not in headers(gate, "/select", {"token_ids": [1]})[1]
    for worker_id in range(10, 15):
        gate.add_worker(worker_id, model_name="qwen", tenant_id=f"c{worker_id}")
    lines = headers(gate, "/select", {"model_name": "qwen", "token_ids": [1]})[1]
    assert lines["x-warning"].endswith(": acme, b, c10, c11 and 3 more")


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


@pytest.mark.parametrize("gate_of", [gate_with, lambda: selector(dialect=API_1_6)])
def test_a_report_is_told_of_them_though_it_counts(gate_of: Callable[[], InProcess]) -> None:
    gate = gate_of()
    gate.add_worker(0, data_parallel_size=2)
    path = "/workers/0/report"
    status, lines = headers(gate, path, {"outcome": "refused", "rank": 1, "ttft": 4})
    assert status == 200
    assert lines["x-warning"] == (
        "unknown field rank is ignored: is dp_rank meant?; "
        "unknown field ttft is ignored: is ttft_ms meant?"
    )
    right = {"outcome": "ok", "dp_rank": 1, "ttft_ms": 4.0, "cached_tokens": 3, "trace": "a"}
    assert "x-warning" not in headers(gate, path, right)[1]


def test_a_registration_for_another_model_than_meant_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    body = {"worker_id": 1, "model": "llama", "endpoint": "http://a:8000", "block_size": 16}
    assert headers(selector(), "/workers", body)[0] == 201
    assert "model is ignored: is model_name meant?" in caplog.text


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
