"""Every rule of the request-rejection document, over HTTP."""

import http.client
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.running_service import DEADLINE_S, RunningService, free_port, wait_until

MODEL = "Qwen/Qwen3-0.6B"
SHED = {
    "error": "All workers are busy, please retry later",
    "message": "Service temporarily unavailable: All workers are busy, please retry later",
    "type": "service_unavailable",
    "code": 503,
}
NOT_FOUND = "Model 'nope' not found. Thresholds can only be set for discovered models."


def worker(worker_id: int = 1, ranks: int = 1, **fields: object) -> dict[str, object]:
    return {
        "worker_id": worker_id,
        "model_name": MODEL,
        "endpoint": f"http://worker-{worker_id}:8000",
        "block_size": 16,
        "data_parallel_size": ranks,
        "total_kv_blocks": 100,
        **fields,
    }


def prompt(tokens: int, blocks: int = 0, **fields: object) -> dict[str, object]:
    hashes = random.sample(range(2**60), blocks)
    return {
        "model_name": MODEL,
        "block_hashes": hashes,
        "sequence_hashes": hashes,
        "isl_tokens": tokens,
        **fields,
    }


def start(*flags: str, env: dict[str, str] | None = None) -> RunningService:
    return RunningService("--use-kv-events", "false", *flags, env=env)


def register(service: RunningService, *workers: dict[str, object]) -> None:
    for each in workers:
        status, record = service.post("/workers", each)
        assert (status, record["lifecycle"]) == (201, "schedulable")


def occupy(
    service: RunningService, tokens: int, blocks: int = 0, *, worker_id: int = 1, dp_rank: int = 0
) -> str:
    """Books a rank; lifecycle calls are never shed."""
    reservation_id = f"occupies-{random.getrandbits(64):x}"
    body = prompt(
        tokens,
        blocks,
        reservation_id=reservation_id,
        worker_id=worker_id,
        dp_rank=dp_rank,
        effective_prefill_tokens=tokens,
    )
    assert service.post("/reservations", body)[0] == 201
    return reservation_id


def set_threshold(service: RunningService, **limits: object) -> dict[str, Any]:
    names = {
        "blocks": "active_decode_blocks_threshold",
        "tokens": "active_prefill_tokens_threshold",
        "frac": "active_prefill_tokens_threshold_frac",
    }
    body = {"model": MODEL, **{names.get(name, name): value for name, value in limits.items()}}
    status, answer = service.post("/busy_threshold", body)
    assert status == 200
    assert isinstance(answer, dict)
    return answer


def is_shed(service: RunningService, **fields: object) -> bool:
    status, body = service.post("/select", prompt(16, 1, **fields))
    assert (status, body) == (503, SHED) or status == 200
    return bool(status == 503)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningService]:
    with start() as running:
        yield running


@pytest.fixture
def nothing(running: RunningService) -> Iterator[RunningService]:
    """A service without flags, workers, load and thresholds, for one test after the other."""
    yield running
    for row in running.get("/busy_threshold")[1]["thresholds"]:
        named = urlencode({key: row[key] for key in ("model", "tenant_id") if key in row})
        assert running.request("DELETE", f"/busy_threshold?{named}")[0] == 200
    for record in running.get("/workers")[1]:
        assert running.request("DELETE", f"/workers/{record['worker_id']}")[0] == 200
    assert running.get("/loads") == (200, [])


@pytest.fixture
def service(nothing: RunningService) -> RunningService:
    """The same with a worker."""
    register(nothing, worker())
    return nothing


# -- /busy_threshold ------------------------------------------------------------------------------


def test_thresholds_are_set_and_listed_as_the_document_prints_them(service: RunningService) -> None:
    entry = json.loads("""{
        "model": "Qwen/Qwen3-0.6B",
        "active_decode_blocks_threshold": 0.85,
        "active_prefill_tokens_threshold": 10000
    }""")
    assert service.post("/busy_threshold", entry) == (200, entry)
    assert service.get("/busy_threshold") == (200, {"thresholds": [entry]})


def test_every_model_with_a_worker_is_listed_also_without_thresholds(
    nothing: RunningService,
) -> None:
    service = nothing
    assert service.get("/busy_threshold") == (200, {"thresholds": []})
    register(service, worker(1), worker(2, tenant_id="b"))
    off = {
        "model": MODEL,
        "active_decode_blocks_threshold": None,
        "active_prefill_tokens_threshold": None,
    }
    assert service.get("/busy_threshold")[1]["thresholds"] == [{**off, "tenant_id": "b"}, off]


def test_null_and_absent_leave_a_threshold_as_it_is(service: RunningService) -> None:
    set_threshold(service, blocks=0.5, tokens=7)
    answer = set_threshold(service, tokens=None, frac=2)
    assert answer == {
        "model": MODEL,
        "active_decode_blocks_threshold": 0.5,
        "active_prefill_tokens_threshold": 7,
        "active_prefill_tokens_threshold_frac": 2.0,
    }


def test_a_tenant_has_thresholds_of_its_own_under_either_name(service: RunningService) -> None:
    register(service, worker(2, tenant_id="b"))
    assert set_threshold(service, tokens=5, routing_group="b")["tenant_id"] == "b"
    rows = service.get("/busy_threshold")[1]["thresholds"]
    assert [row["active_prefill_tokens_threshold"] for row in rows] == [5, None]
    body = {"model": MODEL, "tenant_id": "b", "routing_group": "c"}
    assert service.post("/busy_threshold", body)[0] == 400


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        pytest.param(
            {"active_decode_blocks_threshold": 1.01},
            400,
            "active_decode_blocks_threshold must be between 0.0 and 1.0, got 1.01",
            id="blocks above 1",
        ),
        pytest.param(
            {"active_decode_blocks_threshold": -0.5},
            400,
            "active_decode_blocks_threshold must be between 0.0 and 1.0, got -0.5",
            id="blocks below 0",
        ),
        pytest.param(
            {"active_prefill_tokens_threshold_frac": -0.1},
            400,
            "active_prefill_tokens_threshold_frac must be a finite value "
            "greater than or equal to 0.0, got -0.1",
            id="negative part of the batch",
        ),
        pytest.param(
            {"active_prefill_tokens_threshold": -1},
            422,
            "active_prefill_tokens_threshold",
            id="negative tokens",
        ),
        pytest.param(
            {"active_prefill_tokens_threshold": 2**64},
            422,
            "active_prefill_tokens_threshold",
            id="more tokens than a u64",
        ),
        pytest.param(
            {"active_prefill_tokens_threshold": 1.5},
            422,
            "active_prefill_tokens_threshold",
            id="half a token",
        ),
        pytest.param(
            {"active_decode_blocks_threshold": "0.5"},
            422,
            "active_decode_blocks_threshold",
            id="a string",
        ),
        pytest.param({"model": None}, 422, "model", id="no model"),
        pytest.param({"model": "nope"}, 404, NOT_FOUND, id="a model without a worker"),
        pytest.param(
            {"model": "nope", "active_decode_blocks_threshold": 2},
            400,
            "must be between 0.0 and 1.0",
            id="the range is judged before the model",
        ),
    ],
)
def test_a_bad_threshold_is_refused_and_changes_nothing(
    service: RunningService, change: dict[str, object], status: int, text: str
) -> None:
    set_threshold(service, blocks=0.5)
    before = service.get("/busy_threshold")
    body = {"model": MODEL, "active_prefill_tokens_threshold": 3, **change}
    answer = service.post("/busy_threshold", body)
    assert answer[0] == status
    assert text in answer[1]["error"]
    assert service.get("/busy_threshold") == before


def test_delete_switches_off_also_what_a_flag_set() -> None:
    with start("--active-prefill-tokens-threshold", "0") as service:
        register(service, worker())
        occupy(service, 1)
        assert is_shed(service)
        path = f"/busy_threshold?model={MODEL.replace('/', '%2F')}"
        status, row = service.request("DELETE", path)
        assert (status, row["active_prefill_tokens_threshold"]) == (200, None)
        assert not is_shed(service)
        assert service.get("/busy_threshold")[1]["thresholds"] == [row]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        ("?model=nope", 404),
        (f"?model={MODEL}&tenant_id=other", 404),
        (f"?model={MODEL}&model={MODEL}", 400),
        (f"?model={MODEL}&tenant_id=a&routing_group=b", 400),
        (f"?model={MODEL}&tenant_id=default", 200),
    ],
)
def test_delete_names_one_model_that_has_a_worker(
    service: RunningService, query: str, status: int
) -> None:
    assert service.request("DELETE", f"/busy_threshold{query}")[0] == status


def test_a_threshold_is_there_again_when_the_models_only_worker_restarts(
    service: RunningService,
) -> None:
    set_threshold(service, tokens=0)
    assert service.request("DELETE", "/workers/1")[0] == 200
    assert service.get("/busy_threshold") == (200, {"thresholds": []})
    register(service, worker())
    occupy(service, 1)
    assert is_shed(service)


# -- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_environment", [False, True])
def test_the_flags_of_the_document_hold_for_every_model(by_environment: bool) -> None:
    flags = {
        "--active-decode-blocks-threshold": "0.85",
        "--active-prefill-tokens-threshold": "10000",
        "--active-prefill-tokens-threshold-frac": "1.5",
    }
    env = {
        "DYN_" + name.removeprefix("--").replace("-", "_").upper(): value
        for name, value in flags.items()
    }
    words = [] if by_environment else [word for pair in flags.items() for word in pair]
    with start(*words, env=env if by_environment else None) as service:
        register(service, worker())
        assert service.get("/busy_threshold")[1]["thresholds"] == [
            {
                "model": MODEL,
                "active_decode_blocks_threshold": 0.85,
                "active_prefill_tokens_threshold": 10000,
                "active_prefill_tokens_threshold_frac": 1.5,
            }
        ]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--active-decode-blocks-threshold", "1.5"),
        ("--active-decode-blocks-threshold", "nan"),
        ("--active-prefill-tokens-threshold", "-1"),
        ("--active-prefill-tokens-threshold", "many"),
        ("--active-prefill-tokens-threshold-frac", "inf"),
        ("--active-prefill-tokens-threshold-frac", "-0.1"),
        ("--overload-status", "200"),
    ],
)
def test_a_bad_flag_ends_the_start_with_one_line(flag: str, value: str) -> None:
    command = [sys.executable, "-m", "lean_selector", f"{flag}={value}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert flag in line


def test_the_word_none_leaves_a_threshold_off() -> None:
    with start("--active-prefill-tokens-threshold", "None") as service:
        register(service, worker())
        row = service.get("/busy_threshold")[1]["thresholds"][0]
        assert row["active_prefill_tokens_threshold"] is None


def test_without_thresholds_everything_is_accepted(service: RunningService) -> None:
    occupy(service, 10**9, 100)
    assert not is_shed(service)


# -- detection ------------------------------------------------------------------------------------


def test_the_blocks_example_of_the_document_87_of_100_against_85_percent(
    service: RunningService,
) -> None:
    set_threshold(service, blocks=0.85)
    occupy(service, 0, 85)
    assert not is_shed(service)  # at the limit, not above it
    occupy(service, 0, 2)
    assert is_shed(service)


def test_the_tokens_example_of_the_document_12000_against_10000(service: RunningService) -> None:
    set_threshold(service, tokens=10_000)
    occupy(service, 10_000)
    assert not is_shed(service)
    occupy(service, 2_000)
    assert is_shed(service)


def test_output_blocks_count_and_a_finished_prefill_does_not(service: RunningService) -> None:
    set_threshold(service, blocks=0.02, tokens=100)
    reservation_id = occupy(service, 101, 2)
    assert is_shed(service)
    path = f"/reservations/{reservation_id}"
    assert service.request("POST", f"{path}/prefill_complete")[0] == 200
    assert not is_shed(service)
    assert service.post(f"{path}/output_block", {})[0] == 200
    assert is_shed(service)
    assert service.request("DELETE", path)[0] == 200
    assert not is_shed(service)


def test_a_part_of_the_batch_is_rounded_down_as_recorded(nothing: RunningService) -> None:
    service = nothing
    register(service, worker(max_num_batched_tokens=50))
    occupy(service, 17)
    set_threshold(service, frac=0.35)
    assert not is_shed(service)
    set_threshold(service, frac=0.33)
    assert is_shed(service)


def test_an_unknown_capacity_is_never_exceeded(nothing: RunningService) -> None:
    service = nothing
    register(service, worker(total_kv_blocks=None))
    set_threshold(service, blocks=0.0, frac=0.5)  # of 10 000 000, which stands for unknown
    occupy(service, 5_000_000, 1000)
    assert not is_shed(service)
    assert service.request("PATCH", "/workers/1", {"total_kv_blocks": 1000})[0] == 200
    assert is_shed(service)


def test_total_kv_blocks_is_per_rank_and_a_worker_is_busy_only_with_all_its_ranks(
    nothing: RunningService,
) -> None:
    service = nothing
    register(service, worker(ranks=2))
    set_threshold(service, blocks=0.5)
    occupy(service, 0, 51, dp_rank=0)
    answers = [service.post("/select", prompt(16, 1))[1] for _ in range(5)]
    assert {answer["dp_rank"] for answer in answers} == {1}
    occupy(service, 0, 50, dp_rank=1)
    assert not is_shed(service)
    occupy(service, 0, 1, dp_rank=1)
    assert is_shed(service)


def test_a_silent_rank_counts_as_free() -> None:
    with start("--active-prefill-tokens-threshold", "0") as service:
        register(service, worker(ranks=2))
        occupy(service, 1, dp_rank=0)
        assert not is_shed(service)


# -- rejection ------------------------------------------------------------------------------------


def raw_select(service: RunningService) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=DEADLINE_S)
    body = json.dumps(prompt(16, 1))
    connection.request("POST", "/select", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.body = answer.read()  # type: ignore[attr-defined] # so that the connection can go
    connection.close()
    return answer


@pytest.mark.parametrize("status", [503, 429, 529])
def test_a_shed_request_is_answered_in_the_documents_words(status: int) -> None:
    with start(
        "--overload-status", str(status), "--active-prefill-tokens-threshold", "0"
    ) as service:
        register(service, worker())
        occupy(service, 1)
        answer = raw_select(service)
        assert answer.status == status
        assert answer.getheader("content-type") == "application/json"
        assert answer.getheader("retry-after") == "1"
        body = json.loads(answer.body)  # type: ignore[attr-defined] # as above
        assert body == {**SHED, "code": status}


def test_no_schedulable_worker_stays_an_answer_of_its_own() -> None:
    with start("--active-prefill-tokens-threshold", "0") as service:
        register(service, worker())
        occupy(service, 1)
        assert is_shed(service)
        assert service.request("DELETE", "/workers/1")[0] == 200
        answer = service.post("/select", prompt(16, 1))
        assert answer == (503, {"error": "no schedulable workers are available"})


def test_only_selections_are_shed(service: RunningService) -> None:
    set_threshold(service, tokens=0)
    reservation_id = occupy(service, 1, 1)
    assert service.post("/select", prompt(16, 1)) == (503, SHED)
    assert service.post("/select_and_reserve", prompt(16, 1)) == (503, SHED)
    occupy(service, 1)  # a decision already made
    assert service.post("/potential_loads", prompt(16, 1))[0] == 200
    assert service.post("/overlap_scores", prompt(16, 1))[0] == 200
    for path in ("/loads", "/workers", "/ready", "/health", "/dump", "/busy_threshold"):
        assert service.get(path)[0] == 200
    path = f"/reservations/{reservation_id}"
    assert service.post(f"{path}/output_block", {})[0] == 200
    assert service.request("POST", f"{path}/prefill_complete")[0] == 200
    assert service.request("DELETE", path)[0] == 200


def test_a_shed_request_books_nothing(service: RunningService) -> None:
    set_threshold(service, tokens=0)
    occupy(service, 1)
    before = service.get("/loads")
    body = prompt(16, 1, reservation_id="shed")
    assert service.post("/select_and_reserve", body) == (503, SHED)
    assert service.get("/loads") == before
    assert service.request("DELETE", "/reservations/shed")[0] == 404


def test_a_request_never_rejects_itself(service: RunningService) -> None:
    set_threshold(service, tokens=0)
    assert service.post("/select_and_reserve", prompt(1000, 1))[0] == 200
    assert is_shed(service)


def test_busy_workers_are_no_candidates_however_much_they_have_cached(
    nothing: RunningService,
) -> None:
    service = nothing
    register(service, worker(1), worker(2))
    active = prompt(16, 8, reservation_id="a", worker_id=1, effective_prefill_tokens=0)
    assert service.post("/reservations", active)[0] == 201
    shares = {name: active[name] for name in ("model_name", "sequence_hashes", "isl_tokens")}
    same = {**shares, "block_hashes": active["block_hashes"]}
    occupy(service, 0, 8, worker_id=2)
    assert service.post("/select", same)[1]["worker_id"] == 1  # shares its active blocks
    set_threshold(service, blocks=0.08)
    occupy(service, 0, 1, worker_id=1)
    assert service.post("/select", same)[1]["worker_id"] == 2
    assert service.post("/select", {**same, "router_config_override": {}})[1]["worker_id"] == 2


@pytest.mark.parametrize(
    "narrowed",
    [
        pytest.param({"allowed_worker_ids": [1]}, id="an allow list"),
        pytest.param({"pinned_worker": {"worker_id": 1, "dp_rank": 0}}, id="a pin"),
        pytest.param({"routing_constraints": {"required_taints": ["t"]}}, id="a taint"),
    ],
)
def test_only_the_eligible_workers_decide(
    narrowed: dict[str, object], nothing: RunningService
) -> None:
    service = nothing
    register(service, worker(1, taints=["t"]), worker(2))
    set_threshold(service, tokens=0)
    assert not is_shed(service, **narrowed)
    occupy(service, 1, worker_id=1)
    assert is_shed(service, **narrowed)
    assert not is_shed(service)


def test_nobody_eligible_is_not_an_overload(service: RunningService) -> None:
    set_threshold(service, tokens=0)
    occupy(service, 1)
    answer = service.post("/select", prompt(16, 1, allowed_worker_ids=[7]))
    assert answer == (503, {"error": "no endpoints available to route work"})


def test_a_pin_on_a_busy_rank_holds_while_its_worker_is_not_busy(nothing: RunningService) -> None:
    service = nothing
    register(service, worker(ranks=2))
    set_threshold(service, tokens=0)
    occupy(service, 1, dp_rank=0)
    pin = {"pinned_worker": {"worker_id": 1, "dp_rank": 0}}
    assert service.post("/select", prompt(16, 1, **pin))[1]["dp_rank"] == 0
    occupy(service, 1, dp_rank=1)
    assert is_shed(service, **pin)


def test_with_a_temperature_busy_ranks_are_not_drawn_either() -> None:
    with start("--router-temperature", "1000") as service:
        register(service, worker(1), worker(2))
        set_threshold(service, tokens=0)
        occupy(service, 1, worker_id=1)
        chosen = {service.post("/select", prompt(16, 1))[1]["worker_id"] for _ in range(20)}
        assert chosen == {2}


def test_a_change_of_thresholds_acts_on_the_next_selection(service: RunningService) -> None:
    occupy(service, 100, 10)
    assert not is_shed(service)
    set_threshold(service, tokens=99)
    assert is_shed(service)
    set_threshold(service, tokens=100)
    assert not is_shed(service)
    set_threshold(service, blocks=0.09)
    assert is_shed(service)


def test_shedding_comes_before_the_queue() -> None:
    with start("--queue-threshold", "0") as service:
        register(service, worker(max_num_batched_tokens=1000))
        set_threshold(service, tokens=0)
        occupy(service, 1)  # above both
        assert is_shed(service)
        assert service.get("/loads")[1][0]["pending_count"] == 0


def test_a_parked_request_waits_while_all_workers_are_busy_and_goes_when_they_are_not() -> None:
    with start("--queue-threshold", "0") as service:
        register(service, worker(max_num_batched_tokens=1000))
        first, second = occupy(service, 1, 1), occupy(service, 0, 50)
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=DEADLINE_S)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/select", json.dumps(prompt(16, 1)), headers)

        def pending() -> int:
            return int(service.get("/loads")[1][0]["pending_count"])

        wait_until(lambda: pending() == 1, "the request is parked")
        set_threshold(service, blocks=0.1)
        assert service.request("DELETE", f"/reservations/{first}")[0] == 200
        assert pending() == 1
        assert service.request("DELETE", f"/reservations/{second}")[0] == 200
        assert connection.getresponse().status == 200
        connection.close()
        assert pending() == 0


def test_switching_off_lets_a_parked_request_go() -> None:
    with start("--queue-threshold", "0") as service:
        register(service, worker(max_num_batched_tokens=1000))
        first = occupy(service, 1, 1)
        occupy(service, 0, 50)
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=DEADLINE_S)
        headers = {"content-type": "application/json"}
        connection.request("POST", "/select", json.dumps(prompt(16, 1)), headers)
        wait_until(
            lambda: bool(service.get("/loads")[1][0]["pending_count"]), "the request is parked"
        )
        set_threshold(service, blocks=0.1)
        assert service.request("DELETE", f"/reservations/{first}")[0] == 200
        assert service.request("DELETE", f"/busy_threshold?model={MODEL}")[0] == 200
        assert connection.getresponse().status == 200
        connection.close()


def test_replicated_load_counts_like_local_load() -> None:
    port_a, port_b = free_port(), free_port()
    flags_a = (
        "--replica-sync-port",
        str(port_a),
        "--replica-sync-peers",
        f"tcp://127.0.0.1:{port_b}",
    )
    flags_b = (
        "--replica-sync-port",
        str(port_b),
        "--replica-sync-peers",
        f"tcp://127.0.0.1:{port_a}",
    )
    with start(*flags_a) as a, start(*flags_b) as b:
        register(a, worker())
        register(b, worker())
        set_threshold(b, tokens=99)
        booked: list[str] = []

        def arrives() -> bool:  # events from before the connection are lost
            booked.append(occupy(a, 100))
            return is_shed(b)

        wait_until(arrives, "a booking reaches the other replica")
        for reservation_id in booked:
            assert a.request("DELETE", f"/reservations/{reservation_id}")[0] == 200
        wait_until(lambda: not is_shed(b), "their end reaches it too")


# -- the client of the document -------------------------------------------------------------------


def send_with_retry(
    send_request: Callable[[object], Any],
    request: object,
    wait: Callable[[float], None],
    max_retries: int = 5,
) -> Any:
    """As the document prints it, but for `send_request` and `wait`, which were global there."""
    for attempt in range(max_retries):
        response = send_request(request)
        if response.status_code != 503:
            return response

        # Exponential backoff with jitter
        wait_time = min(60, (2**attempt) + random.uniform(0, 1))
        wait(wait_time)

    raise Exception("Max retries exceeded")  # the document's own


def test_the_clients_retry_of_the_document_succeeds_once_a_worker_is_free(
    service: RunningService,
) -> None:
    class Response:
        def __init__(self, status_code: int, body: Any) -> None:
            self.status_code, self.body = status_code, body

    def send_request(request: object) -> Response:
        return Response(*service.post("/select", request))

    set_threshold(service, tokens=0)
    reservation_id = occupy(service, 1)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            service.request("DELETE", f"/reservations/{reservation_id}")

    response = send_with_retry(send_request, prompt(16, 1), wait)
    assert response.status_code == 200
    assert [int(seconds) for seconds in waits] == [1, 2]

    occupy(service, 1)
    waits.clear()
    waits += [0.0] * 2
    with pytest.raises(Exception, match="Max retries exceeded"):
        send_with_retry(send_request, prompt(16, 1), waits.append)
    assert len(waits) == 7
