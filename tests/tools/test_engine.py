"""The simulated engine: its timing, and that its events tell exactly what its cache holds."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from lean_selector.core.hashing import block_hashes
from lean_selector.tools.simulated_engines import (
    EngineModel,
    EngineRequest,
    EngineSpeed,
    SimulatedEngine,
    hit_rate,
    make_request,
)

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


def published(engine: SimulatedEngine) -> list[list[Any]]:
    """Events of each message so far, as the replay socket gives them."""
    context = zmq.Context()
    messages = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(str(engine.registration()["replay_endpoint"]))
        dealer.send_multipart([b"", bytes(8)])
        while True:
            assert dealer.poll(20_000), "no answer"
            payload = dealer.recv_multipart()[-1]
            if not payload:
                break
            messages.append(msgspec.msgpack.decode(payload)[1])
    context.term()
    return messages


def serve(engine: SimulatedEngine, request: EngineRequest) -> None:
    async def run() -> None:
        running = await engine.prefill(request)
        for index in range(request.output_blocks):
            await engine.decode(running, index)
        engine.finish(running)

    asyncio.run(run())


def test_prefill_is_queued_and_takes_time_for_what_is_not_cached() -> None:
    model = EngineModel(100, BLOCK, SPEED)
    first, _ = model.admit(request([1] * 50), now=10.0)
    second, _ = model.admit(request([1] * 48 + [2] * 12), now=10.1)
    assert first.prefill_done_at == pytest.approx(10.5)
    assert second.hit_blocks == 12
    assert second.prefill_done_at == pytest.approx(10.5 + 0.12)
    assert model.decode_block_s == 0.5
    assert (model.prompt_blocks, model.hit_blocks) == (27, 12)
    assert hit_rate([model, EngineModel(1, BLOCK, SPEED)]) == 12 / 27


def test_output_blocks_are_cached_and_hit_by_the_next_turn() -> None:
    model = EngineModel(100, BLOCK, SPEED)
    turn = request([1] * 6, output_tokens=8)  # blocks end at 4 | 8, 12
    assert turn.output_blocks == 2
    running, _ = model.admit(turn, now=0.0)
    assert [model.decode_block(running, i) is not None for i in range(3)] == [True, True, False]
    model.finish(running)
    following, _ = model.admit(request(list(turn.tokens) + [5] * 10), now=0.0)
    assert following.hit_blocks == 3


def test_events_carry_tokens_and_parents_from_which_the_hashes_follow(
    engine: SimulatedEngine,
) -> None:
    turn = request(list(range(100, 110)), output_tokens=6)
    serve(engine, turn)
    (prompt,), *outputs = published(engine)
    assert (prompt["type"], prompt["parent_block_hash"]) == ("BlockStored", None)
    tokens, last = list(prompt["token_ids"]), prompt["block_hashes"][-1]
    for (event,) in outputs:
        assert event["parent_block_hash"] == last
        tokens += event["token_ids"]
        last = event["block_hashes"][-1]
    assert tokens == list(turn.tokens)[:16]
    assert [h % 2**64 for h in turn.block_hashes] == block_hashes(tokens, BLOCK)
    assert not set(prompt["block_hashes"]) & set(turn.sequence_hashes)


def test_eviction_publishes_the_removals_before_the_blocks_that_needed_room(
    engine: SimulatedEngine,
) -> None:
    serve(engine, request([1] * 16))
    serve(engine, request([2] * 16))
    (stored,), (removed, following) = published(engine)
    assert (removed["type"], following["type"]) == ("BlockRemoved", "BlockStored")
    assert removed["block_hashes"] == stored["block_hashes"][:1:-1]  # the last two, end first


def test_applying_all_events_gives_what_the_cache_holds(engine: SimulatedEngine) -> None:
    turns = [
        request([kind] * length, output_tokens=5)
        for kind, length in [(1, 9), (2, 14), (1, 20), (3, 30), (2, 8), (1, 12)]
    ]
    for turn in turns:
        serve(engine, turn)
    told: set[int] = set()
    for event in (event for message in published(engine) for event in message):
        if event["type"] == "BlockStored":
            assert event["parent_block_hash"] is None or event["parent_block_hash"] in told
            told |= set(event["block_hashes"])
        else:
            assert set(event["block_hashes"]) <= told
            told -= set(event["block_hashes"])
    assert len(told) == len(engine.cache) == engine.cache.capacity


def test_waits_are_those_of_the_model() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    engine = SimulatedEngine(1, 100, BLOCK, SPEED, sleep)
    serve(engine, request([1] * 50, output_tokens=6))
    engine.close()
    assert waits == pytest.approx([0.5, 0.5, 0.5])
