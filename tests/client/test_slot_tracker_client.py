"""SlotTracker and its twin against a running slot tracker; the routes of its document."""

import asyncio
from collections.abc import Iterator

import pytest

from lean_selector import block_hashes, sequence_hashes
from lean_selector.client import (
    AlreadyExists,
    InvalidRequest,
    NotFound,
    ServiceUnreachable,
    SlotTracker,
    SyncSlotTracker,
)
from tests.support.running_service import RunningService, free_port

MODEL = "llama-3-8b"
PROMPT = sequence_hashes(block_hashes(range(48), 16))  # unsigned: some are above 2^63


@pytest.fixture
def endpoint() -> Iterator[str]:
    flags = ("--replica-sync-port", str(free_port()))
    with RunningService(*flags, module="lean_selector.slot_tracker") as service:
        yield f"http://127.0.0.1:{service.port}"


def test_the_books_of_one_model(endpoint: str) -> None:
    with SyncSlotTracker(endpoint, MODEL) as tracker:
        tracker.register(7, block_size=16, dp_size=2)
        worker = {"worker_id": 7, "model_name": MODEL, "tenant_id": "default"}
        assert tracker.workers() == [{**worker, "block_size": 16, "dp_start": 0, "dp_size": 2}]
        tracker.add("req-123", 7, PROMPT, new_isl_tokens=48, dp_rank=1)
        with pytest.raises(AlreadyExists):
            tracker.add("req-123", 7, PROMPT)
        load = {**worker, "dp_rank": 1, "active_prefill_tokens": 48, "active_decode_blocks": 3}
        assert tracker.loads()[1] == load
        projected = {row["dp_rank"]: row for row in tracker.potential_loads([*PROMPT, -1], 16)}
        assert projected[1]["potential_prefill_tokens"] == 64
        assert projected[1]["potential_decode_blocks"] == 4
        tracker.prefill_complete("req-123")
        assert tracker.loads()[1]["active_prefill_tokens"] == 0
        tracker.free("req-123")
        tracker.free("req-123")
        assert tracker.loads()[1]["active_decode_blocks"] == 0
        with pytest.raises(NotFound):
            tracker.prefill_complete("req-123")
        tracker.unregister(7)
        with pytest.raises(NotFound):
            tracker.unregister(7)


def test_the_same_for_an_event_loop(endpoint: str) -> None:
    async def main() -> None:
        async with SlotTracker(endpoint, MODEL, "tenant") as tracker:
            await tracker.register(7, block_size=16)
            assert [row["tenant_id"] for row in await tracker.workers()] == ["tenant"]
            await tracker.add("r", 7, PROMPT, new_isl_tokens=48)
            await tracker.prefill_complete("r")
            (load,) = await tracker.loads()
            assert (load["active_prefill_tokens"], load["active_decode_blocks"]) == (0, 3)
            (row,) = await tracker.potential_loads(PROMPT, 8)
            assert (row["potential_prefill_tokens"], row["potential_decode_blocks"]) == (8, 3)
            await tracker.free("r")
            await tracker.unregister(7)
            assert await tracker.workers() == []

    asyncio.run(main())


def test_peers_come_and_go(endpoint: str) -> None:
    peer = "tcp://127.0.0.1:9"
    with SyncSlotTracker(endpoint, MODEL) as tracker:
        tracker.register_peer(peer)
        assert tracker.peers() == [peer]
        tracker.deregister_peer(peer)
        with pytest.raises(NotFound):
            tracker.deregister_peer(peer)

    async def main() -> None:
        async with SlotTracker(endpoint, MODEL) as tracker:
            await tracker.register_peer(peer)
            assert await tracker.peers() == [peer]
            await tracker.deregister_peer(peer)
            assert await tracker.peers() == []

    asyncio.run(main())


def test_what_cannot_be_is_refused(endpoint: str) -> None:
    with SyncSlotTracker(endpoint, MODEL) as tracker:
        with pytest.raises(InvalidRequest, match="block_size"):
            tracker.register(7, block_size=0)
        for value in (2**64, -(2**63) - 1):
            with pytest.raises(ValueError, match="64 bits"):
                tracker.add("r", 7, [value])
    nobody = SyncSlotTracker(f"http://127.0.0.1:{free_port()}", MODEL)
    with nobody, pytest.raises(ServiceUnreachable):
        nobody.loads()
