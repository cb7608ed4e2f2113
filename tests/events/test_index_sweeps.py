"""Indexes that give memory back between other work of the loop."""

import asyncio
from struct import pack

import uvloop

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier
from lean_selector.events.ingest_turns import SWEEP_SLICE_S, IndexSweeps
from tests.support.running_service import DEADLINE_S


def test_an_index_is_taken_apart_while_the_loop_serves_though_its_owner_let_go_of_it() -> None:
    async def story() -> int:
        sweeps = IndexSweeps()
        index = KvIndex(16, on_sweep=sweeps.start)
        for name in range(50_000):
            index.store(1, 0, Tier.DEVICE, None, [name], pack("<Q", name))
        trie = index._device.trie
        index.abandon()
        del index
        turns = 0
        async with asyncio.timeout(DEADLINE_S):
            while trie.strands:
                turns += 1
                await asyncio.sleep(0)
        return turns

    # Some 50 000 steps of a few microseconds each, in slices of half a millisecond.
    assert uvloop.run(story()) > 10
    assert SWEEP_SLICE_S < 0.001
