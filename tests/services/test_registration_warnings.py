"""What a registration's answer says of endpoints that cannot be meant so."""

import http.client
import json
from collections.abc import Iterator, Sequence

import pytest

from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.workers import WorkerSpec
from lean_selector.services.registration_warnings import registration_warnings
from lean_selector.services.replies import warning_line
from tests.running_service import DEADLINE_S, RunningService


def nobody(endpoint: str) -> Sequence[RankKey]:
    return []


def warnings(**fields: object) -> list[str]:
    spec: dict[str, object] = {"worker_id": 1, "endpoint": "http://Host:8000", **fields}
    return registration_warnings(WorkerSpec(**spec), nobody)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "endpoint", ["tcp://host:5557", "tcp://[::1]:5557", "ipc:///run/engine", "tcp://host:18000"]
)
def test_nothing_is_said_of_what_may_be_right(endpoint: str) -> None:
    assert warnings(kv_events_endpoint=endpoint, replay_endpoint="tcp://host:5558") == []


@pytest.mark.parametrize(
    ("endpoint", "fault"),
    [
        ("tcp://*:5557", "is where an engine listens, not where it is reached: name its host"),
        (
            "tcp://0.0.0.0:5557",
            "is where an engine listens, not where it is reached: name its host",
        ),
        ("tcp://[::]:5557", "is where an engine listens, not where it is reached: name its host"),
        ("host:5557", "has no scheme: tcp://host:5557 is probably meant"),
        ("http://host:5557", "is no ZMQ endpoint (tcp://host:port)"),
        ("tcp://host:8000", "is the address of the worker's HTTP endpoint"),
        ("tcp://HOST:08000", "is the address of the worker's HTTP endpoint"),
        ("inproc://events", "reaches nobody outside of the engine's process"),
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


@pytest.mark.parametrize("endpoint", [None, "", "http://host:99999", "http://[", "nonsense"])
def test_any_endpoint_of_the_worker_is_survived(endpoint: str | None) -> None:
    found = warnings(endpoint=endpoint, kv_events_endpoint="tcp://host:5557")
    assert [each for each in found if not each.startswith("endpoint ")] == []


def test_many_faults_make_a_short_line() -> None:
    found = warnings(kv_events_endpoints=dict.fromkeys(range(4096), "tcp://*:5557"))
    assert len(found) == 5
    assert found[-1] == "and more of its endpoints"


def test_a_warning_is_one_header_line_whatever_is_in_it() -> None:
    assert warning_line(["a", "b"]) == b"x-warning: a; b\r\n"
    assert (
        warning_line(["x\r\ny: \u00e9\x7f"]) == b"x-warning: x\\u000d\\u000ay: \\u00e9\\u007f\r\n"
    )
    assert len(warning_line(["a" * 10_000])) < 2_100


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService() as running:
        yield running


def sent(
    service: RunningService, method: str, path: str, body: dict[str, object]
) -> tuple[int, str | None, dict[str, object]]:
    """Status, warning and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=DEADLINE_S)
    connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    record = json.loads(answer.read())
    connection.close()
    return answer.status, answer.getheader("x-warning"), record


def worker(worker_id: int, **fields: object) -> dict[str, object]:
    return {"worker_id": worker_id, "endpoint": "http://w:8000", "block_size": 16, **fields}


def test_a_registration_says_so_in_a_header_and_nowhere_else(service: RunningService) -> None:
    body = worker(1, kv_events_endpoint="tcp://*:5557", replay_endpoint="tcp://w:8000")
    status, warning, record = sent(service, "POST", "/workers", body)
    assert (status, record["lifecycle"]) == (201, "schedulable")
    assert warning == (
        "kv_events_endpoint tcp://*:5557 is where an engine listens, not where it is reached: name "
        "its host; replay_endpoint tcp://w:8000 is the address of the worker's HTTP endpoint"
    )
    mended: dict[str, object] = {
        "kv_events_endpoint": "tcp://127.0.0.1:1",
        "replay_endpoint": "tcp://w:5558",
    }
    status, warning, record = sent(service, "PATCH", "/workers/1", mended)
    assert (status, warning, record["lifecycle"]) == (200, None, "schedulable")


def test_a_missing_scheme_is_named_beside_the_reason_in_the_record(service: RunningService) -> None:
    status, warning, record = sent(
        service, "POST", "/workers", worker(2, kv_events_endpoint="w:5557")
    )
    assert (status, record["lifecycle"]) == (201, "incomplete")
    assert warning == "kv_events_endpoint w:5557 has no scheme: tcp://w:5557 is probably meant"


def test_the_endpoint_of_another_worker_is_named_until_it_goes(service: RunningService) -> None:
    endpoint = "tcp://127.0.0.1:2"
    first = worker(10, kv_events_endpoint=endpoint)
    second = worker(11, kv_events_endpoint=endpoint)
    assert sent(service, "POST", "/workers", first)[1] is None
    assert sent(service, "POST", "/workers", first)[1] is None  # again
    warning = sent(service, "POST", "/workers", second)[1]
    assert warning == f"kv_events_endpoint {endpoint} is also that of worker 10 dp_rank 0"
    assert service.request("DELETE", "/workers/10")[0] == 200
    assert sent(service, "POST", "/workers", second)[1] is None
    ranks = worker(
        12, data_parallel_size=2, kv_events_endpoints={"0": "tcp://w:7", "1": "tcp://w:7"}
    )
    warning = sent(service, "POST", "/workers", ranks)[1]
    assert warning == (
        "kv_events_endpoints[0] tcp://w:7 is also that of worker 12 dp_rank 1; "
        "kv_events_endpoints[1] tcp://w:7 is also that of worker 12 dp_rank 0"
    )


def test_without_kv_events_their_endpoints_are_nobodys_concern() -> None:
    with RunningService("--use-kv-events", "false") as service:
        body = worker(1, kv_events_endpoint="tcp://*:5557")
        assert sent(service, "POST", "/workers", body)[1] is None
