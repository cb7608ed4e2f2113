"""Sharing the loop: who runs when, seen from the order of calls."""

import asyncio
import time
from struct import pack

import pytest

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier
from lean_selector.events.subscriptions import SWEEP_SLICE_S, IndexSweeps
from lean_selector.links.turns import Turns
from tests.support.blocks import store_blocks
from tests.support.on_loop import on_loop


@on_loop
async def test_sources_take_turns_and_the_loop_runs_in_between() -> None:
    calls: list[str] = []
    turns = Turns(slice_s=0.0)  # every slice is over at once: one source per turn
    loop = asyncio.get_running_loop()
    left = {"a": 3, "b": 2}

    def source(name: str, deadline: float) -> bool:
        calls.append(name)
        left[name] -= 1
        return left[name] > 0

    def other() -> None:
        calls.append(".")
        if any(left.values()):
            loop.call_soon(other)

    loop.call_soon(other)
    await asyncio.gather(
        turns.run(lambda deadline: source("a", deadline)),
        turns.run(lambda deadline: source("b", deadline)),
    )
    assert [call for call in calls if call != "."] == ["a", "b", "a", "b", "a"]
    assert "ab" not in "".join(calls)
    assert "ba" not in "".join(calls)


@on_loop
async def test_sources_with_little_to_do_share_a_turn() -> None:
    turns = Turns(slice_s=3600.0)
    deadlines: list[float] = []

    def drain(deadline: float) -> bool:
        deadlines.append(deadline)
        return False

    await asyncio.gather(*(turns.run(drain) for _ in range(5)))
    assert len(set(deadlines)) == 1
    assert len(deadlines) == 5
    assert deadlines[0] > time.perf_counter()


@on_loop
async def test_a_source_that_fails_hears_of_it_and_the_others_go_on() -> None:
    turns = Turns()

    def failing(deadline: float) -> bool:
        raise RuntimeError("a bug")

    other = asyncio.ensure_future(turns.run(lambda deadline: False))
    with pytest.raises(RuntimeError, match="a bug"):
        await turns.run(failing)
    await other


@on_loop
async def test_a_cancelled_source_is_not_called_again() -> None:
    turns = Turns(slice_s=0.0)
    calls = 0
    called = asyncio.Event()

    def drain(deadline: float) -> bool:
        nonlocal calls
        calls += 1
        called.set()
        return True

    task = asyncio.ensure_future(turns.run(drain))
    await called.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    calls_then = calls
    await turns.run(lambda deadline: False)
    assert calls == calls_then


@on_loop
async def test_a_source_that_is_cancelled_by_what_then_fails_holds_up_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns = Turns()

    def failing(deadline: float) -> bool:
        task.cancel()
        raise RuntimeError("a bug")

    task = asyncio.ensure_future(turns.run(failing))
    await asyncio.sleep(0)  # it waits for its turn
    other = asyncio.ensure_future(turns.run(lambda deadline: False))
    with pytest.raises(asyncio.CancelledError):
        await task
    await other
    assert len(caplog.records) == 1


@on_loop
async def test_an_index_is_taken_apart_while_the_loop_serves_though_its_owner_let_go_of_it() -> (
    None
):
    index = KvIndex(16, on_sweep=IndexSweeps().start)
    for name in range(20_000):
        store_blocks(index, (1, 0), Tier.DEVICE, None, [name], pack("<Q", name))
    trie = index._device.trie
    index.abandon()
    del index
    turns = 0
    while trie.strands:
        turns += 1
        await asyncio.sleep(0)
    # Some 20 000 steps of a few microseconds each, in slices of half a millisecond.
    assert turns > 10
    assert SWEEP_SLICE_S < 0.001
