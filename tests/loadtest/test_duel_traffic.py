"""The engines of the comparison, which hold prompts of a trace."""

from pathlib import Path

import pytest

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.shapes import Tier
from lean_selector.wire.packed_events import packed_batch
from loadtest.duel.engines import LAYOUTS, Engines, Layout
from loadtest.duel.prompts import Prompts
from tests.loadtest.conftest import WriteTrace


@pytest.fixture
def trace(write_trace: WriteTrace) -> Path:
    """Six prompts of two or three 512-token blocks over one first block."""
    return write_trace([(at, [0, at, 100], 1_024 + at) for at in range(1, 7)])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.title)
@pytest.mark.parametrize(("event_blocks", "least"), [(None, 1), (8, 8), (1, 32)])
def test_each_layout_tells_the_same_blocks(
    trace: Path, layout: Layout, event_blocks: int | None, least: int
) -> None:
    told = Engines(Prompts(trace, 16), 2, 10_000, event_blocks, layout=layout, batch_events=32)
    with told as engines:
        index = KvIndex(16)
        sources = [KvIngest(index, engine, 0) for engine in range(2)]
        most = 0

        def held() -> int:
            return sum(index.blocks(engine, 0, Tier.DEVICE) for engine in range(2))

        for message in engines.fill(200):
            batch = packed_batch(message.payload)
            assert batch is not None
            most = max(most, len(batch.events))
            sources[message.engine].apply(batch)
        assert (most, held()) == (least, engines.holdings)
        for message in engines.empty([0, 1]):
            batch = packed_batch(message.payload)
            assert batch is not None
            sources[message.engine].apply(batch)
        assert held() == 0
