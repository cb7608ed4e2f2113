"""What a registration's answer says of endpoints that cannot be meant so."""

import http.client
import json
from collections.abc import Iterator, Sequence

import pytest

from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.catalog import HttpPlaces, Worker
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.service.header_warnings import NO_EVENTS, registration_warnings
from lean_selector.service.replies import warning_line
from tests.support.running_service import DEADLINE_S, RunningService


class Nobody:
    """Listens or asks anywhere."""

    def listeners(self, key: str) -> Sequence[RankKey]:
        return []

    def askers(self, key: str) -> Sequence[RankKey]:
        return []


def warnings(**fields: object) -> list[str]:
    events = "tcp://host:15557"
    told: dict[str, object] = {"worker_id": 1, "endpoint": "http://Host:8000"}
    told |= {"kv_events_endpoint": events, **fields}
    spec = WorkerSpec(**told)  # type: ignore[arg-type]
    return registration_warnings(Worker(spec, [], {}), HttpPlaces(), Nobody())


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


def test_a_worker_that_is_chosen_by_load_alone_is_told_of() -> None:
    assert warnings(kv_events_endpoint=None) == [NO_EVENTS]


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
    own = {"worker_id": worker_id, "endpoint": f"http://w:{8000 + worker_id}", "block_size": 16}
    return {**own, **fields}


def test_a_registration_says_so_in_a_header_and_nowhere_else(service: RunningService) -> None:
    body = worker(1, kv_events_endpoint="tcp://*:5557", replay_endpoint="tcp://w:8001")
    status, warning, record = sent(service, "POST", "/workers", body)
    assert (status, record["lifecycle"]) == (201, "schedulable")
    assert warning == (
        "kv_events_endpoint tcp://*:5557 is where an engine listens, not where it is reached: name "
        "its host; replay_endpoint tcp://w:8001 is the address of the worker's HTTP endpoint"
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


def warned(service: RunningService, body: dict[str, object]) -> str | None:
    """What the registration of a worker warns of; the worker is gone again."""
    status, warning, _ = sent(service, "POST", "/workers", body)
    assert status == 201
    assert service.request("DELETE", f"/workers/{body['worker_id']}")[0] == 200
    return warning


@pytest.fixture(scope="module")
def neighbour(service: RunningService) -> dict[str, object]:
    """Worker 20, with an endpoint of each kind and two ranks."""
    body = worker(
        20,
        endpoint="http://n:8000/v1",
        data_parallel_size=2,
        kv_events_endpoints={"0": "tcp://n:5557", "1": "tcp://n:5558"},
        replay_endpoint="tcp://n:6557",
    )
    assert sent(service, "POST", "/workers", body)[:2] == (201, None)
    return body


@pytest.mark.parametrize(
    ("fields", "warning"),
    [
        (
            {"kv_events_endpoint": "tcp://m:5557", "replay_endpoint": "tcp://N:06557"},
            "replay_endpoint tcp://N:06557 is also that of worker 20 dp_rank 0",
        ),
        (
            {"kv_events_endpoint": "tcp://m:5557", "replay_endpoint": "tcp://n:6558"},
            "replay_endpoint tcp://n:6558 is also that of worker 20 dp_rank 1",
        ),
        (
            {
                "data_parallel_size": 2,
                "kv_events_endpoints": {"0": "tcp://m:5557", "1": "tcp://m:5558"},
                "replay_endpoint": "tcp://n:6556",
            },
            "replay_endpoint of dp_rank 1 tcp://n:6557 is also that of worker 20 dp_rank 0",
        ),
        (
            {"kv_events_endpoint": "tcp://m:5557", "replay_endpoint": "tcp://n:5558"},
            "replay_endpoint tcp://n:5558 is the kv_events endpoint of worker 20 dp_rank 1",
        ),
        (
            {"kv_events_endpoint": "tcp://m:5557", "replay_endpoint": "tcp://n:8000"},
            "replay_endpoint tcp://n:8000 is the address of the HTTP endpoint of worker 20",
        ),
        (
            {"kv_events_endpoint": "tcp://n:6558"},
            "kv_events_endpoint tcp://n:6558 is the replay endpoint of worker 20 dp_rank 1",
        ),
        (
            {"kv_events_endpoint": "tcp://n:8000"},
            "kv_events_endpoint tcp://n:8000 is the address of the HTTP endpoint of worker 20",
        ),
        (
            {"kv_events_endpoint": "tcp://m:5557", "replay_endpoint": "tcp://M:5557"},
            "replay_endpoint tcp://M:5557 is where the worker's events are expected",
        ),
        (
            {"kv_events_endpoint": "tcp://m:5557", "endpoint": "http://N:8000"},
            "endpoint http://N:8000 is also that of worker 20",
        ),
        (
            {"kv_events_endpoint": "tcp://m:5557", "endpoint": "http://n:5557"},
            "endpoint http://n:5557 is the kv_events endpoint of worker 20 dp_rank 0",
        ),
        (
            {"kv_events_endpoint": "tcp://m:5557", "endpoint": "http://n:6557"},
            "endpoint http://n:6557 is the replay endpoint of worker 20 dp_rank 0",
        ),
    ],
)
@pytest.mark.usefixtures("neighbour")
def test_whatever_is_at_another_worker_is_named(
    service: RunningService, fields: dict[str, object], warning: str
) -> None:
    assert warned(service, worker(21, **fields)) == warning


@pytest.mark.usefixtures("neighbour")
def test_other_endpoints_of_the_same_host_are_no_fault(service: RunningService) -> None:
    """The next rank of one engine, as a worker of its own; and an engine behind the same proxy."""
    ranks = {"data_parallel_start_rank": 2, "endpoint": "http://n:8000/v1"}
    source = {"kv_events_endpoint": "tcp://n:5559", "replay_endpoint": "tcp://n:6559"}
    assert warned(service, worker(21, **ranks, **source)) is None
    assert warned(service, worker(21, **source, endpoint="http://n:8000/b/v1")) is None


def test_the_ranks_of_one_worker_may_ask_at_one_endpoint(service: RunningService) -> None:
    events = {"0": "tcp://w:7557", "1": "tcp://w:7558"}
    one = {"0": "tcp://w:7600", "1": "tcp://w:7600"}
    body = worker(21, data_parallel_size=2, kv_events_endpoints=events, replay_endpoints=one)
    assert warned(service, body) is None
    body = worker(
        21, data_parallel_size=2, kv_events_endpoints=events, replay_endpoint="ipc:///run/replay"
    )
    assert warned(service, body) is None


def test_a_rank_with_a_replay_endpoint_of_its_own_needs_no_port_beside_the_first(
    service: RunningService,
) -> None:
    taken = worker(22, kv_events_endpoint="tcp://w:7901", replay_endpoint="tcp://w:7911")
    assert sent(service, "POST", "/workers", taken)[1] is None
    body = worker(
        21,
        data_parallel_size=2,
        kv_events_endpoints={"0": "tcp://w:7902", "1": "tcp://w:7903"},
        replay_endpoint="tcp://w:7910",
    )
    named = "replay_endpoint of dp_rank 1 tcp://w:7911 is also that of worker 22 dp_rank 0"
    assert warned(service, body) == named
    assert warned(service, {**body, "replay_endpoints": {"1": "tcp://w:7912"}}) is None


def test_a_replay_that_meets_the_events_of_the_next_rank_is_named(service: RunningService) -> None:
    body = worker(
        21,
        data_parallel_size=2,
        kv_events_endpoints={"0": "tcp://w:7557", "1": "tcp://w:7558"},
        replay_endpoint="tcp://w:7558",
    )
    assert warned(service, body) == (
        "replay_endpoint tcp://w:7558 is where the worker's events are expected"
    )


def test_of_a_replay_that_binds_every_host_the_first_rank_is_named_alone(
    service: RunningService,
) -> None:
    body = worker(
        21,
        data_parallel_size=4,
        kv_events_endpoints={str(rank): f"tcp://w:{7557 + rank}" for rank in range(4)},
        replay_endpoint="tcp://*:7600",
    )
    assert warned(service, body) == (
        "replay_endpoint tcp://*:7600 is where an engine listens, not where it is reached: name "
        "its host"
    )


def test_a_replay_endpoint_is_that_of_others_until_they_go(service: RunningService) -> None:
    replay = "tcp://w:7700"
    first = worker(30, kv_events_endpoint="tcp://w:7730", replay_endpoint=replay)
    second = worker(31, kv_events_endpoint="tcp://w:7731", replay_endpoint=replay)
    assert sent(service, "POST", "/workers", first)[1] is None
    assert sent(service, "POST", "/workers", first)[1] is None  # again
    named = f"replay_endpoint {replay} is also that of worker 30 dp_rank 0"
    assert warned(service, second) == named
    assert service.request("DELETE", "/workers/30")[0] == 200
    assert warned(service, second) is None


def test_of_many_at_one_endpoint_the_first_are_named(service: RunningService) -> None:
    for worker_id in range(40, 45):
        events = f"tcp://w:{7800 + worker_id}"
        body = worker(worker_id, endpoint="http://many", kv_events_endpoint=events)
        sent(service, "POST", "/workers", body)
    four = "worker 40, worker 41, worker 42, worker 43 and more"
    one_more = worker(45, endpoint="many:80", kv_events_endpoint="tcp://many:80")
    assert warned(service, one_more) == (
        "endpoint many:80 has no scheme: http://many:80 is probably meant; "
        f"endpoint many:80 is also that of {four}; "
        "kv_events_endpoint tcp://many:80 is the address of the worker's HTTP endpoint"
    )
    one_more = worker(45, kv_events_endpoint="tcp://many:80")
    assert warned(service, one_more) == (
        f"kv_events_endpoint tcp://many:80 is the address of the HTTP endpoint of {four}"
    )


def test_without_kv_events_their_endpoints_are_nobodys_concern() -> None:
    with RunningService("--use-kv-events", "false") as service:
        body = worker(1, kv_events_endpoint="tcp://*:5557")
        assert sent(service, "POST", "/workers", body)[1] is None
