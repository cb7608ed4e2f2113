"""Whatever an engine publishes, its source does not fail: batches that were right once, damaged or
with odd values in them, go the whole way into the index.

Nothing is raised, a batch takes no more steps than it has bytes, no more blocks are held than it
named, and when the source ends nothing is left.
"""

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lean_selector.core.index.kv_cursor import KvCursor
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.shapes import Tier
from lean_selector.events.batch_work import BatchWork, Reader
from lean_selector.wire.packed_events import packed_batch
from tests.support.damage import messages

RECORDED = json.loads(
    (Path(__file__).parents[1] / "data" / "event_payloads.json").read_text(encoding="utf-8")
)["payloads"]
LARGE = [
    ["BlockStored", [*range(start, start + 300)], start - 1 or None, [7] * 1200, 4, None, "GPU"]
    for start in (1, 301)
]
GOLDEN = [
    *(bytes.fromhex(text) for case in RECORDED for text in case["hex"]),
    msgspec.msgpack.encode([1.5, LARGE, 0]),
    msgspec.msgpack.encode([1.5, [*LARGE, ["BlockRemoved", [*range(200, 400)], "GPU"]] * 40, 3]),
]
NEVER = 0.0  # a deadline that is always over: one slice a call


class Source:
    def __init__(self, reader: Reader | None) -> None:
        self.index = KvIndex(4)
        self.ingest = KvIngest(self.index, 7, 0)
        self.lines: list[str] = []
        cursor = KvCursor(can_replay=False)
        self.work = BatchWork(self.ingest, cursor, self.report, reader)

    def report(self, kind: str, level: int, text: str) -> None:
        self.lines.append(text)

    def take(self, payload: bytes) -> None:
        self.work.take(payload)
        steps = 0
        while self.work.is_under_way:
            steps += 1
            assert steps <= len(payload) + 10, "it goes on without reading on"
            self.work.go_on(NEVER)

    @property
    def held(self) -> int:
        return sum(self.index.blocks(*key, tier) for key in self.index.ranks() for tier in Tier)


def check(payloads: list[bytes], *, is_quick: bool) -> None:
    source = Source(packed_batch if is_quick else None)
    for payload in payloads:
        before = source.held
        source.take(payload)
        # A block has a hash of a byte at least, and stands once on each tier.
        assert 0 <= source.held <= before + len(payload)
        for line in source.lines:
            assert len(line) < 2000, "a log line is no dump"
    dumped = {
        (run.dp_rank, run.tier, name)
        for runs in source.index.dump()
        for run in runs
        for name in run.block_hashes
    }
    assert len(dumped) <= source.held
    source.ingest.close()
    for worker_id in {worker_id for worker_id, _ in source.index.ranks()}:
        source.index.drop_worker(worker_id)
    while source.index.sweep(1000):
        pass
    assert source.held == 0
    assert not [run for runs in source.index.dump() for run in runs]


@pytest.mark.parametrize("is_quick", [False, True])
@settings(max_examples=80)
@given(payloads=st.lists(messages(GOLDEN), min_size=1, max_size=4))
@example(payloads=[GOLDEN[-1], GOLDEN[-2]])
def test_a_batch_may_be_anything(is_quick: bool, payloads: list[bytes]) -> None:
    check(payloads, is_quick=is_quick)
