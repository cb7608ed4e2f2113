"""`"explain": true`: the figures behind a choice, over HTTP."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from lean_selector.publisher import KvEventPublisher
from tests.support.running_service import RunningService, free_port, wait_until

HASHES = [11, 12, 13, 14]


def prompt(**fields: object) -> dict[str, object]:
    return {
        "block_hashes": HASHES,
        "sequence_hashes": HASHES,
        "isl_tokens": 64,
        "explain": True,
        **fields,
    }


def register(service: RunningService, worker_id: int, **fields: object) -> None:
    body = {"worker_id": worker_id, "endpoint": f"http://w{worker_id}", "block_size": 16, **fields}
    assert service.post("/workers", body)[1]["lifecycle"] == "schedulable"


def explanation(service: RunningService, **fields: object) -> dict[str, Any]:
    status, answer = service.post("/select", prompt(**fields))
    assert status == 200, answer
    why = answer["explain"]
    assert isinstance(why, dict)
    chosen = [
        row
        for row in why["ranks"]
        if (row["worker_id"], row["dp_rank"]) == (answer["worker_id"], answer["dp_rank"])
    ]
    assert chosen[0]["filtered"] is None
    assert chosen[0]["probability"] > 0
    return why


def rows(why: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {row["worker_id"]: row for row in why["ranks"]}


@pytest.fixture
def service() -> Iterator[RunningService]:
    with RunningService("--use-kv-events", "false") as running:
        yield running


def test_without_it_the_answer_is_as_documented(service: RunningService) -> None:
    register(service, 1)
    for explain in (False, None):
        assert "explain" not in service.post("/select", prompt(explain=explain))[1]
    assert service.post("/select", prompt(explain="yes"))[0] == 422


def test_every_figure_of_an_idle_rank_and_a_loaded_one(service: RunningService) -> None:
    register(service, 1)
    register(service, 2)
    booked = {"reservation_id": "r", "worker_id": 2, "isl_tokens": 64, "sequence_hashes": [11, 99]}
    assert service.post("/reservations", {**booked, "effective_prefill_tokens": 32})[0] == 201
    why = explanation(service)
    assert {name: why[name] for name in why if name != "ranks"} == {
        "drawn": "lowest_cost",
        "tied_ranks": 1,
        "temperature": 0.0,
        "isl_tokens": 64,
        "new_blocks": 4,
    }
    idle = {
        "worker_id": 1,
        "dp_rank": 0,
        "filtered": None,
        "device_blocks": 0,
        "host_pinned_blocks": 0,
        "disk_blocks": 0,
        "active_prefill_tokens": 0,
        "potential_prefill_tokens": 64,
        "active_decode_blocks": 0,
        "potential_decode_blocks": 4,
        "active_requests": 0,
        "credit_blocks": 0.0,
        "credit_decay": 1.0,
        "taint_factor": 1.0,
        "cost": 8.0,
        "probability": 1.0,
    }
    assert why["ranks"][0] == idle
    assert list(why["ranks"][0]) == list(idle)
    assert why["ranks"][1] == {
        **idle,
        "worker_id": 2,
        "active_prefill_tokens": 32,
        "potential_prefill_tokens": 96,
        "active_decode_blocks": 2,
        "potential_decode_blocks": 5,  # one is shared
        "active_requests": 1,
        "cost": 11.0,
        "probability": 0.0,
    }


def test_a_booking_is_explained_by_the_loads_before_it(service: RunningService) -> None:
    register(service, 1)
    status, answer = service.post("/select_and_reserve", prompt())
    assert status == 200
    assert answer["explain"]["drawn"] == "only_candidate"
    assert answer["explain"]["ranks"][0]["active_decode_blocks"] == 0
    assert service.get("/loads")[1][0]["loads"][0]["potential_decode_blocks"] == 4


@pytest.mark.parametrize(
    ("narrowed", "filtered"),
    [
        pytest.param({"allowed_worker_ids": [1]}, "not_allowed", id="not allowed"),
        pytest.param(
            {"pinned_worker": {"worker_id": 1, "dp_rank": 0}}, "not_pinned", id="not pinned"
        ),
        pytest.param({"routing_constraints": {"required_taints": ["t"]}}, "taint", id="taint"),
        pytest.param({}, "busy", id="busy"),
    ],
)
def test_who_was_no_candidate_is_told_why(
    service: RunningService, narrowed: dict[str, object], filtered: str
) -> None:
    register(service, 1, taints=["t"])
    register(service, 2, data_parallel_size=2)
    if filtered == "busy":
        for dp_rank in (0, 1):
            load: dict[str, object] = {
                "worker_id": 2,
                "dp_rank": dp_rank,
                "isl_tokens": 5,
                "sequence_hashes": [],
            }
            body = {**load, "reservation_id": str(dp_rank), "effective_prefill_tokens": 5}
            assert service.post("/reservations", body)[0] == 201
        body = {"model": "default", "active_prefill_tokens_threshold": 4}
        assert service.post("/busy_threshold", body)[0] == 200
    why = explanation(service, **narrowed)
    assert [row["filtered"] for row in why["ranks"]] == [None, filtered, filtered]
    assert [row["cost"] is None for row in why["ranks"]] == [False, True, True]
    assert why["drawn"] == "only_candidate"


def test_a_tie_is_drawn_uniformly_and_says_so(service: RunningService) -> None:
    for worker_id in (1, 2, 3, 4):
        register(service, worker_id)
    why = explanation(service)
    assert (why["drawn"], why["tied_ranks"]) == ("uniform_tie", 4)
    assert [row["probability"] for row in why["ranks"]] == [0.25] * 4


def test_with_a_temperature_the_chances_are_those_of_the_draw(service: RunningService) -> None:
    register(service, 1)
    register(service, 2)
    load = {"worker_id": 2, "isl_tokens": 64, "sequence_hashes": [1], "reservation_id": "r"}
    assert service.post("/reservations", load)[0] == 201
    override = {"router_config_override": {"router_temperature": 1.0}}
    why = explanation(service, **override)
    assert why["drawn"] == "softmax"
    expected = 1 / (1 + math.exp(-1))
    assert rows(why)[1]["probability"] == pytest.approx(expected)
    plain = prompt(**override)
    chosen = Counter(service.post("/select", plain)[1]["worker_id"] for _ in range(200))
    assert 100 < chosen[1] < 190  # 146 expected, 5 standard deviations are 31


def test_preferred_taints_show_as_a_factor_of_the_cost(service: RunningService) -> None:
    register(service, 1, taints=["t"])
    register(service, 2)
    why = explanation(service, routing_constraints={"preferred_taints": {"t": 0.5}})
    factor = math.exp(-math.tanh(0.5))
    assert rows(why)[1]["taint_factor"] == pytest.approx(factor)
    assert rows(why)[1]["cost"] == pytest.approx(8 * factor)
    assert rows(why)[2]["taint_factor"] == 1.0


def test_a_parked_request_is_explained_when_it_goes() -> None:
    with RunningService("--use-kv-events", "false", "--queue-threshold", "100") as service:
        register(service, 1, max_num_batched_tokens=1000)
        assert explanation(service)["drawn"] == "only_candidate"


def test_cached_blocks_show_by_tier_with_their_credit_and_its_decay() -> None:
    port = free_port()
    with (
        KvEventPublisher(kv_block_size=16, endpoint=f"tcp://127.0.0.1:{port}") as engine,
        RunningService("--router-kv-overlap-score-credit-decay", "1.0") as service,
    ):
        register(service, 1, kv_events_endpoint=f"tcp://127.0.0.1:{port}")
        register(service, 2, kv_events_endpoint=f"tcp://127.0.0.1:{free_port()}")
        tokens = list(range(64))

        def selects() -> dict[int, dict[str, Any]]:
            answer = service.post("/select", {"token_ids": tokens, "explain": True})[1]
            return rows(answer["explain"])

        def is_indexed() -> bool:
            publish(engine, tokens)
            return bool(selects()[1]["disk_blocks"])

        wait_until(is_indexed, "the engine's blocks are indexed")
        load = {"worker_id": 1, "isl_tokens": 64, "sequence_hashes": [], "reservation_id": "r"}
        assert service.post("/reservations", {**load, "effective_prefill_tokens": 64})[0] == 201
        row = selects()[1]
        tiers = row["device_blocks"], row["host_pinned_blocks"], row["disk_blocks"]
        assert tiers == (1, 1, 1)
        assert row["credit_decay"] == 0.5  # four blocks wait, four come
        assert row["credit_blocks"] == 0.5 * 1 + 0.75 + 0.25
        assert row["potential_prefill_tokens"] == 64 + 64 - 32
        assert row["cost"] == (64 + 64) / 16 - 1.5 + 4
        assert selects()[2]["cost"] == 8.0


def publish(engine: KvEventPublisher, tokens: list[int]) -> None:
    """One block on the device, two in host memory, three on disk, the last of the four nowhere."""
    for count, medium in ((1, "GPU"), (2, "CPU"), (3, "DISK")):
        engine.publish_stored(
            token_ids=tokens[: 16 * count],
            block_hashes=list(range(1, count + 1)),
            medium=medium,
        )
