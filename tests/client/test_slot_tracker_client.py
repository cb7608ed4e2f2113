"""Both clients of the slot tracker against a running one: the routes of its document."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

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
from tests.client.both_kinds import Awaited
from tests.support.running_service import RunningService, free_port

MODEL = "llama-3-8b"
PROMPT = sequence_hashes(block_hashes(range(48), 16))  # unsigned: some are above 2^63
PEER = "tcp://127.0.0.1:9"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    flags = ("--replica-sync-port", str(free_port()))
    with RunningService(*flags, module="lean_selector.slot_tracker") as service:
        yield f"http://127.0.0.1:{service.port}"


def without_a_loop(*args: Any) -> Any:
    return Awaited(SyncSlotTracker(*args))


@pytest.mark.parametrize("kind", [SlotTracker, without_a_loop])
def test_the_life_of_a_worker_a_request_and_a_peer(kind: Callable[..., Any], endpoint: str) -> None:
    async def main() -> None:
        async with kind(endpoint, MODEL, "tenant") as tracker:
            await tracker.register(7, block_size=16, dp_size=2)
            worker = {"worker_id": 7, "model_name": MODEL, "tenant_id": "tenant"}
            ranks = {"block_size": 16, "dp_start": 0, "dp_size": 2}
            assert await tracker.workers() == [{**worker, **ranks}]
            await tracker.add("req-123", 7, PROMPT, new_isl_tokens=48, dp_rank=1)
            with pytest.raises(AlreadyExists):
                await tracker.add("req-123", 7, PROMPT)
            load = {"dp_rank": 1, "active_prefill_tokens": 48, "active_decode_blocks": 3}
            assert (await tracker.loads())[1] == {**worker, **load}
            row = (await tracker.potential_loads([*PROMPT, -1], 16))[1]
            assert (row["potential_prefill_tokens"], row["potential_decode_blocks"]) == (64, 4)
            await tracker.prefill_complete("req-123")
            assert (await tracker.loads())[1]["active_prefill_tokens"] == 0
            await tracker.free("req-123")
            await tracker.free("req-123")
            assert (await tracker.loads())[1]["active_decode_blocks"] == 0
            with pytest.raises(NotFound):
                await tracker.prefill_complete("req-123")
            await tracker.unregister(7)
            with pytest.raises(NotFound):
                await tracker.unregister(7)
            await tracker.register_peer(PEER)
            assert await tracker.peers() == [PEER]
            await tracker.deregister_peer(PEER)
            with pytest.raises(NotFound):
                await tracker.deregister_peer(PEER)

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
