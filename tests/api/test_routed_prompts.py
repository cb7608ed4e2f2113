"""What is believed cached of what was booked, beside KV events.

The recordings `approximate_index`, `approximate_ttl` and `predicted_ttl` have the rest.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lean_selector.publisher import KvEventPublisher
from tests.support.running_service import RunningService, free_port, wait_until

TOKENS = list(range(12))


def blocks(service: RunningService) -> dict[int, int]:
    """Device blocks of each worker that has some."""
    rows = service.post("/overlap_scores", {"token_ids": TOKENS})[1]["workers"]
    return {row["worker_id"]: row["device_blocks"] for row in rows if row["device_blocks"]}


def test_what_was_predicted_of_an_engine_goes_with_what_it_says_that_it_had() -> None:
    with (
        KvEventPublisher(kv_block_size=4, endpoint="tcp://127.0.0.1:*") as engine,
        RunningService("--router-predicted-ttl-secs", "3600") as service,
    ):
        elsewhere = f"tcp://127.0.0.1:{free_port()}"
        for worker_id, endpoint in ((1, engine.endpoint), (2, elsewhere)):
            service.add_worker(worker_id, block_size=4, kv_events_endpoint=endpoint)

        def is_heard() -> bool:
            engine.publish_stored(token_ids=TOKENS[:4], block_hashes=[901])
            return blocks(service) == {1: 1}

        wait_until(is_heard, "the engine's event is heard")
        for worker_id, count in ((1, 8), (2, 12)):
            body = {"token_ids": TOKENS[:count], "allowed_worker_ids": [worker_id]}
            assert service.post("/select_and_reserve", body)[0] == 200
        assert blocks(service) == {1: 2, 2: 3}
        engine.publish_all_cleared()
        wait_until(lambda: blocks(service) == {2: 3}, "nothing is left of the first")


@contextmanager
def predicting() -> Iterator[tuple[KvEventPublisher, RunningService, Callable[[], None]]]:
    """An engine, a service that predicts for long, and what waits until all events are applied."""
    marks = iter(range(10_000, 20_000))
    with (
        KvEventPublisher(kv_block_size=4, endpoint="tcp://127.0.0.1:*") as engine,
        RunningService("--router-predicted-ttl-secs", "3600") as service,
    ):
        service.add_worker(1, block_size=4, kv_events_endpoint=engine.endpoint)

        def is_heard(mark: int) -> bool:
            engine.publish_stored(token_ids=[mark] * 4, block_hashes=[mark])
            rows = service.post("/overlap_scores", {"token_ids": [mark] * 4})[1]["workers"]
            return [row["device_blocks"] for row in rows] == [1]

        def settle() -> None:
            mark = next(marks)
            wait_until(lambda: is_heard(mark), "the events so far are applied")

        settle()
        yield engine, service, settle


def book(service: RunningService, reservation_id: str = "r") -> None:
    body = {"token_ids": TOKENS, "reservation_id": reservation_id}
    assert service.post("/select_and_reserve", body)[0] == 200


@pytest.mark.parametrize("pieces", [[3], [2, 1], [1, 1, 1]])
@pytest.mark.parametrize("is_booked_before", [True, False])
def test_once_its_events_have_arrived_they_alone_tell(
    pieces: list[int], is_booked_before: bool
) -> None:
    with predicting() as (engine, service, settle):
        if is_booked_before:
            book(service)
        parent, at = None, 0
        for count in pieces:
            names = list(range(901 + at, 901 + at + count))
            tokens = TOKENS[4 * at : 4 * (at + count)]
            engine.publish_stored(token_ids=tokens, block_hashes=names, parent_hash=parent)
            parent, at = names[-1], at + count
        settle()
        if not is_booked_before:
            book(service)
        assert blocks(service) == {1: 3}
        engine.publish_removed(block_hashes=[903])
        settle()
        assert blocks(service) == {1: 2}
        engine.publish_removed(block_hashes=[901, 902])
        settle()
        assert blocks(service) == {}


def test_a_new_event_endpoint_is_of_an_engine_that_has_nothing() -> None:
    with predicting() as (_, service, _settle):
        book(service)
        assert blocks(service) == {1: 3}
        elsewhere = {"kv_events_endpoint": f"tcp://127.0.0.1:{free_port()}"}
        assert service.request("PATCH", "/workers/1", elsewhere)[0] == 200
        assert blocks(service) == {}


@pytest.mark.parametrize("use_events", ["true", "false"])
def test_what_a_rank_did_not_compute_is_not_believed(use_events: str) -> None:
    ttl = "--router-predicted-ttl-secs" if use_events == "true" else "--router-ttl-secs"
    flags = (ttl, "3600", "--use-kv-events", use_events, "--worker-ejection-failures", "0")
    with RunningService(*flags) as service:
        service.add_worker(1, block_size=4, kv_events_endpoint=f"tcp://127.0.0.1:{free_port()}")
        for outcome in ("refused", "failed"):
            book(service)
            assert blocks(service) == {1: 3}
            assert service.request("DELETE", "/reservations/r", {"outcome": outcome})[0] == 200
            assert blocks(service) == {}
        for name in ("computed", "refused"):
            book(service, name)
        service.post("/reservations/computed/prefill_complete")
        for name in ("refused", "computed"):
            ended = service.request("DELETE", f"/reservations/{name}", {"outcome": "failed"})
            assert ended[0] == 200
        assert blocks(service) == {1: 3}, "one had its first token"
        book(service)
        assert service.request("DELETE", "/reservations/r")[0] == 200
        assert blocks(service) == {1: 3}, "nobody said that it failed"
