"""GET /dump: at once or in slices, for one client or several, and with events in between."""

import itertools
import json
from typing import Any

import pytest

from lean_selector.api.replies import SLICE_S
from lean_selector.api.selection import DumpAnswers
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier, Watermark
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.http.response import PendingReply
from tests.support.blocks import store_blocks
from tests.support.driven_selector import Sources
from tests.support.gates import Turns

LARGE = 5000  # blocks: not answered at once


class Broken(dict[RankKey, Watermark]):
    """Watermarks that cannot be encoded."""

    def items(self) -> Any:
        raise RuntimeError("a bug")


class Dumps:
    """DumpAnswers over a catalog without workers."""

    def __init__(self) -> None:
        self.catalog = Catalog(
            RouterSettings(),
            Sources(),
            new_partition=lambda key, size, eagle: Partition(*key, size, eagle, KvIndex(size)),
            on_dropped=lambda partition, dropped: None,
        )
        self.loop = Turns()
        self.marks: dict[RankKey, Watermark] = {}
        self.is_broken = False
        # Three parts take a slice of the loop's turn, on whatever machine.
        clock = itertools.count(step=SLICE_S / 3).__next__
        self.answers = DumpAnswers(self.catalog, self, self.loop.call_soon, clock)

    def watermarks(self, partition: Partition) -> dict[RankKey, Watermark]:
        return Broken({(1, 0): Watermark(0, 0)}) if self.is_broken else dict(self.marks)

    def watermark(self, partition: Partition, rank: RankKey) -> Watermark | None:
        return self.marks.get(rank)

    def store(self, *hashes: int, model_name: str = "m", worker_id: int = 1) -> None:
        partition = self.catalog.recovered_partition((model_name, "t"), 4)
        assert partition is not None
        local = b"".join(name.to_bytes(8, "little") for name in hashes)
        store_blocks(partition.index, (worker_id, 0), Tier.DISK, None, hashes, local)

    def fill(self) -> None:
        for worker_id in (1, 2):
            self.store(*range(LARGE), worker_id=worker_id)

    def ask(self) -> PendingReply:
        answer = self.answers.answer()
        assert isinstance(answer, PendingReply)
        return answer


@pytest.fixture
def dumps() -> Dumps:
    return Dumps()


def body_of(answer: bytes | PendingReply | None) -> dict[str, Any]:
    response = answer.response if isinstance(answer, PendingReply) else answer
    assert response is not None
    head, _, body = bytes(response).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    headers = dict(line.split(b":", 1) for line in head.split(b"\r\n")[1:])
    assert int(headers[b"content-length"]) == len(body)
    found: dict[str, Any] = json.loads(body)
    return found


def blocks(body: dict[str, Any], worker_id: int) -> int:
    events = body["m:t"]["events"]
    return sum(event["worker_id"] == worker_id for event in events)


def test_a_small_dump_is_answered_at_once_and_sorted(dumps: Dumps) -> None:
    dumps.store(1, model_name="b")
    dumps.store(2, model_name="a")
    answer = dumps.answers.answer()
    assert isinstance(answer, bytes)
    assert list(body_of(answer)) == ["a:t", "b:t"]


def test_a_partition_without_blocks_shows_only_if_it_has_had_a_worker(dumps: Dumps) -> None:
    waiting = dumps.catalog.recovered_partition(("m", "t"), 4)
    assert waiting is not None
    assert body_of(dumps.answers.answer()) == {}
    waiting.established = True
    assert body_of(dumps.answers.answer()) == {"m:t": {"block_size": 4, "events": []}}


def test_watermarks_are_part_of_it(dumps: Dumps) -> None:
    dumps.store(1)
    dumps.marks[1, 0] = Watermark(7, 7)
    assert body_of(dumps.answers.answer())["m:t"]["watermarks"] == {"1:0": 7}


def test_a_large_dump_takes_several_turns_of_the_loop(dumps: Dumps) -> None:
    dumps.fill()
    answer = dumps.ask()
    assert dumps.loop.run() > 3
    assert (blocks(body_of(answer), 1), blocks(body_of(answer), 2)) == (LARGE, LARGE)


def test_events_may_come_in_between(dumps: Dumps) -> None:
    dumps.fill()
    answer = dumps.ask()
    dumps.loop.turn()
    dumps.catalog.partitions["m", "t"].index.drop_worker(2)
    dumps.loop.run()
    assert blocks(body_of(answer), 1) == LARGE
    assert blocks(body_of(answer), 2) < LARGE


def test_a_watermark_is_no_newer_than_the_blocks(dumps: Dumps) -> None:
    dumps.fill()
    dumps.marks[1, 0] = Watermark(7, 7)
    answer = dumps.ask()
    dumps.loop.turn()
    dumps.marks[1, 0] = Watermark(8, 8)
    dumps.loop.run()
    assert body_of(answer)["m:t"]["watermarks"] == {"1:0": 7}


def test_who_asks_while_a_dump_is_made_shares_the_next(dumps: Dumps) -> None:
    dumps.fill()
    first = dumps.ask()
    dumps.loop.turn()
    dumps.store(1, worker_id=0)
    second, third = dumps.ask(), dumps.ask()
    dumps.loop.run()
    assert blocks(body_of(first), 0) == 0
    assert blocks(body_of(second), 0) == 1
    assert second.response is third.response


def test_a_dump_that_nobody_waits_for_is_dropped(dumps: Dumps) -> None:
    dumps.fill()
    gone, stays = dumps.ask(), dumps.ask()
    dumps.loop.turn()
    gone.hang_up()
    dumps.loop.run()
    assert gone.response is None
    assert body_of(stays)

    alone = dumps.ask()
    dumps.loop.turn()
    alone.hang_up()
    assert dumps.loop.run() == 1
    assert alone.response is None


def test_one_who_hangs_up_before_it_begins_leaves_room_for_the_next(dumps: Dumps) -> None:
    dumps.fill()
    dumps.ask().hang_up()
    again = dumps.ask()
    dumps.loop.run()
    assert body_of(again)


def test_a_bug_in_it_is_a_500_and_the_next_dump_works(caplog: pytest.LogCaptureFixture) -> None:
    dumps = Dumps()
    dumps.is_broken = True
    dumps.fill()
    answer = dumps.ask()
    dumps.loop.run()
    assert answer.response is not None
    assert answer.response.startswith(b"HTTP/1.1 500 ")
    assert "a dump failed" in caplog.text
    dumps.is_broken = False
    again = dumps.ask()
    dumps.loop.run()
    assert blocks(body_of(again), 1) == LARGE
