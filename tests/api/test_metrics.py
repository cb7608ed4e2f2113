"""GET /metrics over HTTP: every family, its figures, and that nobody can make labels grow."""

import http.client
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lean_selector.api.application import PIECES_PER_PART, metrics_route
from lean_selector.api.replies import SLICE_S
from lean_selector.http.response import PendingReply
from lean_selector.publisher import KvEventPublisher
from lean_selector.wire.exposition import Family
from tests.support import gates
from tests.support.asked import prompt
from tests.support.prometheus_tools import Samples, parsed, promtool, scrape, value
from tests.support.running_service import DEADLINE_S, RunningService, free_port, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "lean_selector.rules.yml"
SLOT_TRACKER = "lean_selector.slot_tracker"


def read(service: RunningService) -> Samples:
    return parsed(scrape(service.port))


def test_selections_by_outcome_and_the_names_of_the_document() -> None:
    with RunningService("--use-kv-events", "false", "--overload-status", "429") as service:
        assert service.post("/select", prompt())[0] == 503  # no worker
        service.add_worker()
        assert service.post("/select", prompt())[0] == 200
        assert service.post("/select", prompt(isl_tokens=0))[0] == 400
        body = prompt(reservation_id="r")
        assert service.post("/select_and_reserve", body)[0] == 200
        assert service.post("/select_and_reserve", body)[0] == 409
        service.post("/busy_threshold", {"model": "default", "active_prefill_tokens_threshold": 0})
        assert service.post("/select", prompt())[0] == 429
        assert service.post("/select_and_reserve", prompt())[0] == 429
        assert service.post("/select", prompt(tenant_id="acme"))[0] == 503
        assert service.post("/select", prompt(model_name="typo"))[0] == 503
        samples = read(service)
    name = "lean_selector_selections_total"
    outcomes = ("placed", "no_worker", "unknown_tenant", "unknown_model", "refused", "shed")
    for outcome in outcomes:
        assert value(samples, name, route="/select", outcome=outcome) == 1
    for outcome in ("placed", "conflict", "shed"):
        assert value(samples, name, route="/select_and_reserve", outcome=outcome) == 1
    assert value(samples, "dynamo_tasks_issued_total") == 9
    assert value(samples, "dynamo_tasks_rejected_total", model="default") == 2
    assert value(samples, "dynamo_queued_requests", tenant_id="default") == 0
    assert value(samples, "lean_selector_busy_workers", model="default") == 1


def test_loads_reservations_and_why_they_ended() -> None:
    with RunningService("--use-kv-events", "false", "--reservation-expiry-secs", "1") as service:
        for worker_id in (1, 2):
            service.add_worker(worker_id, total_kv_blocks=100, data_parallel_size=2)
        for name in ("freed", "expires"):
            service.reserve(name, 1, 30, dp_rank=1, sequence_hashes=[1, 2])
        service.reserve("goes with its worker", 2, 30, dp_rank=1)
        samples = read(service)
        rank = {"worker_id": "1", "dp_rank": "1"}
        start = "lean_selector_worker_active"
        assert value(samples, f"{start}_prefill_tokens", **rank) == 60
        assert value(samples, f"{start}_decode_blocks", **rank) == 2
        assert value(samples, f"{start}_requests", **rank) == 2
        assert value(samples, f"{start}_requests", worker_id="1", dp_rank="0") == 0
        assert value(samples, "lean_selector_reservations", origin="local") == 3
        assert value(samples, "lean_selector_reservations", origin="replica") == 0
        assert value(samples, "lean_selector_workers", lifecycle="schedulable") == 2
        assert value(samples, "lean_selector_worker_active_kv_blocks", worker_id="1") == 2
        assert value(samples, "lean_selector_worker_total_kv_blocks", worker_id="1") == 200
        assert service.request("DELETE", "/workers/2")[0] == 200
        assert service.end("freed") == 200

        def live() -> float:
            return value(read(service), "lean_selector_reservations", origin="local")

        wait_until(lambda: live() == 0, "the other one expires")
        samples = read(service)
        assert value(samples, "lean_selector_reservations_booked_total") == 3
        for reason in ("freed", "expired", "worker_removed"):
            assert value(samples, "lean_selector_reservations_ended_total", reason=reason) == 1
        assert "expires" not in scrape(service.port)


def test_tokens_and_kv_events_of_a_working_engine() -> None:
    port = free_port()
    with (
        KvEventPublisher(kv_block_size=16, endpoint=f"tcp://127.0.0.1:{port}") as engine,
        RunningService() as service,
    ):
        service.add_worker(kv_events_endpoint=f"tcp://127.0.0.1:{port}")
        tokens = list(range(40))
        published = 0

        def is_indexed() -> bool:
            nonlocal published
            engine.publish_stored(token_ids=tokens[:32], block_hashes=[1, 2])
            published += 1
            scores = service.post("/overlap_scores", {"token_ids": tokens})[1]
            return bool(scores["workers"][0]["device_blocks"])

        wait_until(is_indexed, "the engine is heard")
        engine.publish_removed(block_hashes=[2] * published)  # each copy
        engine.publish_all_cleared()
        engine.publish_stored(token_ids=tokens[:16], block_hashes=[1])

        def removed() -> float:
            return value(read(service), "lean_selector_kv_event_blocks_total", type="removed")

        wait_until(lambda: removed() == 1, "the removal is applied")
        wait_until(
            lambda: value(read(service), "lean_selector_index_blocks") == 1, "the store after it"
        )
        service.post("/select", {"token_ids": tokens})
        samples = read(service)
        assert value(samples, "lean_selector_prompt_tokens_total") == 40
        assert value(samples, "lean_selector_overlap_tokens_total") == 16
        events = "lean_selector_kv_events_total"
        assert 2 <= value(samples, events, type="stored", result="applied") <= published + 1
        assert value(samples, events, type="removed", result="applied") == 1
        assert value(samples, events, type="cleared", result="applied") == 1
        source = {"worker_id": "1", "dp_rank": "0"}
        assert value(samples, "lean_selector_kv_source_state", **source, state="live") == 1
        age = value(samples, "lean_selector_kv_source_last_message_age_seconds", **source)
        assert 0 <= age < DEADLINE_S
        gaps = value(samples, "lean_selector_kv_source_gaps_total", **source)
        assert gaps in (0, 1)  # 1 when the first batch came before the subscription
        for name in ("restarts_total", "lag_batches"):
            assert value(samples, f"lean_selector_kv_source_{name}", **source) == 0


def test_the_queue_and_a_client_that_leaves_it() -> None:
    with RunningService("--use-kv-events", "false", "--queue-threshold", "0") as service:
        service.add_worker(max_num_batched_tokens=100)
        service.book("first")

        def park() -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=DEADLINE_S)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/select", json.dumps(prompt(isl_tokens=33)), headers)
            return connection

        def figure(name: str, **found: str) -> Callable[[], float]:
            return lambda: value(read(service), name, **found)

        queued = figure("dynamo_queued_requests")
        leaves, stays = park(), park()
        wait_until(lambda: queued() == 2, "both are parked")
        assert figure("lean_selector_queue_isl_tokens")() == 66
        assert figure("lean_selector_queue_oldest_wait_seconds")() > 0
        leaves.close()
        hung_up = figure("lean_selector_http_requests_total", route="/select", status="499")
        wait_until(lambda: queued() == 1, "one has left")
        assert hung_up() == 1
        assert service.end("first") == 200
        assert stays.getresponse().status == 200
        stays.close()
        samples = read(service)
        admitted, waited = "lean_selector_queue_admitted_total", "queue_wait_seconds_total"
        for priority, count in (("low", 0), ("normal", 1), ("high", 0)):
            assert value(samples, admitted, priority=priority) == count
            seconds = value(samples, f"lean_selector_{waited}", priority=priority)
            assert (seconds > 0) == bool(count)
        assert value(samples, "lean_selector_selections_total", outcome="hung_up") == 1
        requests = "lean_selector_http_requests_total"
        assert value(samples, requests, route="/select", status="200") == 1


def busy_selector(service: RunningService) -> None:
    for worker_id in (1, 2):
        events = "tcp://127.0.0.1:1"
        service.add_worker(worker_id, total_kv_blocks=10, kv_events_endpoint=events)
    for number in range(3):
        service.book(str(number))


def busy_tracker(service: RunningService) -> None:
    scope = {"model_name": "m", "tenant_id": "default", "worker_id": 1}
    row = {**scope, "block_size": 16, "dp_start": 0, "dp_size": 2}
    assert service.post("/register", row)[0] == 201
    add = {**scope, "request_id": "r", "dp_rank": 1, "sequence_hashes": [1], "new_isl_tokens": 5}
    assert service.post("/add", add)[0] == 201


@pytest.mark.parametrize(
    ("module", "occupy"),
    [("lean_selector", busy_selector), (SLOT_TRACKER, busy_tracker)],
    ids=["selector", "slot tracker"],
)
def test_promtool_has_nothing_to_say(module: str, occupy: Callable[[RunningService], None]) -> None:
    with RunningService("--replica-sync-port", str(free_port()), module=module) as service:
        occupy(service)
        text = scrape(service.port)
        assert promtool("check", "metrics", text=text) == ""
        heads = [line for line in text.splitlines() if line.startswith("#")]
        assert len(heads) == len(set(heads))
        samples = parsed(text)
        own = "selector" if module == "lean_selector" else "slot_tracker"
        assert value(samples, "lean_selector_build_info", service=own) == 1
        assert value(samples, "process_resident_memory_bytes") > 0
        wait_until(
            lambda: value(read(service), "lean_selector_loop_lag_seconds_count") > 0,
            "the loop's lag is sampled",
        )


def test_a_large_scrape_gives_the_loop_back_after_every_slice() -> None:
    """What else slices bring is proved of dumps, in `test_dump_answers.py`."""
    turns = gates.Turns()
    many = [Family("many", "gauge", "x", lambda: ((f'{{a="{i}"}}', i) for i in range(1000)))]
    clock = itertools.count(step=SLICE_S).__next__  # every look at it is a slice's time
    reply = metrics_route(lambda: many, turns.call_soon, clock).run(
        gates.request("GET", "/metrics"), None
    )
    assert isinstance(reply, PendingReply)
    assert turns.run() >= 1000 // PIECES_PER_PART
    assert reply.response is not None
    text = reply.response.partition(b"\r\n\r\n")[2].decode()
    assert len(parsed(text)["many"]) == 1000


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(RULES))
    promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))
    promtool("test", "rules", str(DEPLOY / "prometheus" / "lean_selector.rules.test.yml"))
