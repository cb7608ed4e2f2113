"""The simulated engine: its timing, and that its events tell exactly what its cache holds."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from lean_selector.tools.simulated_engines import (
    EngineRequest,
    EngineSpeed,
    SimulatedEngine,
    make_request,
)
from tests.test_publisher import replay, start_at

BLOCK = 4
SPEED = EngineSpeed(prefill_tokens_per_s=100.0, decode_tokens_per_s=8.0)


def request(tokens: list[int], output_tokens: int = 0) -> EngineRequest:
    isl = len(tokens)
    whole = tokens + [77] * output_tokens
    return make_request("r", whole, isl, len(whole) // BLOCK - isl // BLOCK, BLOCK)


@pytest.fixture
def engine() -> Iterator[SimulatedEngine]:
    engine = SimulatedEngine(3, 6, BLOCK, SPEED, None)
    yield engine
    engine.close()


def published(engine: SimulatedEngine) -> list[Any]:
    """Events so far, as the replay socket gives them."""
    payloads = [frames[-1] for frames in replay(engine._publisher, *start_at(0))]
    return [event for payload in payloads for event in msgspec.msgpack.decode(payload)[1]]


def serve(engine: SimulatedEngine, request: EngineRequest) -> None:
    async def run() -> None:
        running = await engine.prefill(request)
        for index in range(request.output_blocks):
            await engine.decode(running, index)
        engine.finish(running)

    asyncio.run(run())


def test_applying_all_events_gives_what_the_cache_holds(engine: SimulatedEngine) -> None:
    turns = [
        request([kind] * length, output_tokens=5)
        for kind, length in [(1, 9), (2, 14), (1, 20), (3, 30), (2, 8), (1, 12)]
    ]
    for turn in turns:
        serve(engine, turn)
    told: set[int] = set()
    for event in published(engine):
        if event["type"] == "BlockStored":
            assert event["parent_block_hash"] is None or event["parent_block_hash"] in told
            told |= set(event["block_hashes"])
        else:
            assert set(event["block_hashes"]) <= told
            told -= set(event["block_hashes"])
    assert len(told) == len(engine.cache) == engine.cache.capacity
