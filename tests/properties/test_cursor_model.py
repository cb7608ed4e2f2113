"""Random engines, losses, restarts and replays against the cursor, used as a listener uses it.

An engine holds blocks on two tiers, one of each or several copies, and keeps its last batches for
replays. The walk ends with a sound connection and whole replays: a source that says `live` then
holds what its engine holds, copy by copy, one that says `partial` a part of it, one that says
`silent` nothing. In some walks the bounds of what is kept are so low that they are reached.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.index import kv_cursor, out_of_turn
from lean_selector.core.index.kv_cursor import BatchVerdict, KvCursor, SourceState
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.shapes import Tier
from lean_selector.events.batch_work import BatchWork
from tests.support.blocks import remove_blocks

BLOCKS = 30
MOST_TURNS = 500  # until a sound source has settled
RANK = (1, 0)
Held = Counter[tuple[Tier, int]]
MEDIA = {Tier.DEVICE: "GPU", Tier.HOST_PINNED: "CPU"}


def parent_of(block: int) -> int | None:
    """Blocks are numbered from 1; each has up to three children."""
    return (block - 1) // 3 or None


class Batch(NamedTuple):
    seq: int
    payload: bytes


class Engine:
    """One after the other at the same endpoints; each counts from 0. No two publish the same.

    Each of its groups of layers has its own copies. It has a block if all groups have it."""

    def __init__(
        self, dice: random.Random, keeps: int, *, has_copies: bool, groups: int = 1
    ) -> None:
        self._dice = dice
        self.has_copies = has_copies
        self._keeps = keeps
        self._groups = range(groups)
        self._born = 0
        self.restart()

    def restart(self) -> None:
        self._born += 1
        self._seq = 0
        self._copies: list[Held] = [Counter() for _ in self._groups]
        self.kept: list[Batch] = []

    @property
    def copies(self) -> Held:
        each = iter(self._copies)
        held = next(each)
        for other in each:
            held = held & other
        return +held

    def publish(self) -> Batch:
        events: list[list[Any]] = []
        if self._seq:
            for _ in range(3):
                if self._dice.random() < 0.6:
                    self._change(events)
        payload = msgspec.msgpack.encode([self._born + self._seq / 1e6, events, 0])
        batch = Batch(self._seq, payload)
        self._seq += 1
        self.kept.append(batch)
        del self.kept[: -self._keeps]
        return batch

    def _change(self, events: list[list[Any]]) -> None:
        dice, draw, copies = self._dice, self._dice.random(), self.copies
        held = {block for tier, block in copies if tier is Tier.DEVICE}
        if draw < 0.03:
            for each in self._copies:
                each.clear()
            events.append(["AllBlocksCleared"])
        elif draw < 0.5:
            group = dice.choice(self._groups)
            # As engines do, it evicts no block on which others on the device depend.
            needed = {(Tier.DEVICE, parent_of(block)) for block in held}
            mine = self._copies[group]
            free = [place for place in sorted(+mine) if place not in needed or copies[place] > 1]
            if free:
                tier, block = dice.choice(free)
                mine[tier, block] -= 1
                events.append(["BlockRemoved", [block], MEDIA[tier], group])
        else:
            block, tier = dice.randrange(1, BLOCKS), dice.choice(list(MEDIA))
            parent = parent_of(block)
            is_orphan = tier is Tier.DEVICE and parent is not None and parent not in held
            if not is_orphan and (self.has_copies or not copies[tier, block]):
                for group, mine in enumerate(self._copies):
                    mine[tier, block] += 1
                    of = group, "full_attention"
                    fields = [block] * 2, 2, None, MEDIA[tier], None, None, *of
                    events.append(["BlockStored", [block], parent, *fields])


class Listener:
    """Applies what the cursor says to an index, and asks for replays."""

    def __init__(self) -> None:
        self.cursor = KvCursor(can_replay=True)
        self.index = KvIndex(2)
        self._ingest = KvIngest(self.index, *RANK)
        self._work = BatchWork(self._ingest, self.cursor, lambda *_: None)
        self.wants = False  # to ask
        # What is still to come of a replay; at a None it is cut off.
        self.replay: list[Batch | None] | None = None
        self._restarts = 0

    @property
    def is_busy(self) -> bool:
        return self.wants or self.replay is not None

    def holds(self, tier: Tier, block: int) -> bool:
        return self.index.knows(RANK, tier, block)

    def held(self) -> Held:
        """Each block as often as it must be removed; nothing is held then."""
        found: Held = Counter()
        for tier in MEDIA:
            for block in range(BLOCKS, 0, -1):
                while self.holds(tier, block):
                    found[tier, block] += 1
                    remove_blocks(self.index, RANK, tier, [block])
        return found

    def connected(self) -> None:
        self.cursor.connected()
        self._look()

    def live(self, batch: Batch) -> None:
        verdict = self.cursor.live(*batch)
        if verdict is BatchVerdict.RESTART:
            self._stop()
            self._ingest.clear()
        if verdict in (BatchVerdict.APPLY, BatchVerdict.RESTART):
            self._apply(batch.payload)
        self._look()

    def ask(self, engine: Engine | None) -> None:
        """None: no engine is there."""
        self.wants = False
        start = self.cursor.replay_from
        if start is not None:
            self._restarts = self.cursor.restarts
            self.cursor.replay_started()
            self.replay = [None] if engine is None else [b for b in engine.kept if b.seq >= start]

    def reply(self) -> None:
        """The next batch of the replay, or its end."""
        assert self.replay is not None
        if not self.replay:
            self.end(is_whole=True)
            return
        batch = self.replay.pop(0)
        if batch is None:
            self.end(is_whole=False)
            return
        verdict = self.cursor.replayed(*batch)
        if verdict is BatchVerdict.RESTART:
            self._start_over()
        elif verdict is BatchVerdict.APPLY:
            self._apply(batch.payload)

    def end(self, *, is_whole: bool) -> None:
        if self.cursor.restarts > self._restarts:
            self.replay, self.wants = None, True
            return
        if not is_whole:
            self.cursor.replay_failed()
        elif self.cursor.replay_finished() is BatchVerdict.RESTART:
            self._start_over()
            return
        while (payload := self.cursor.next_held()) is not None:
            self._apply(payload)
        self.replay, self.wants = None, self.cursor.replay_from is not None

    def _apply(self, payload: bytes) -> None:
        self._work.take(payload)
        assert self._work.go_on(float("inf"))
        if self.cursor.is_settled:
            self._stop()

    def _start_over(self) -> None:
        self._ingest.clear()
        self.replay, self.wants = None, True

    def _stop(self) -> None:
        self.replay, self.wants = None, False

    def _look(self) -> None:
        if self.cursor.is_settled:
            self._stop()
        elif not self.is_busy:
            self.wants = True


class Walk:
    """What happens, as a seed says."""

    def __init__(self, seed: int, *, has_copies: bool, groups: int) -> None:
        self._dice = dice = random.Random(seed)
        keeps = dice.choice([2, 5, 50])
        self.engine = Engine(dice, keeps, has_copies=has_copies, groups=groups)
        self.listener = Listener()
        self._is_up = False
        for _ in range(self._dice.randrange(5, 80)):
            self._step(self._dice.random())
        if not self._is_up:
            self.listener.connected()
        self._settle()
        for _ in range(2):
            self.listener.live(self.engine.publish())
            self._settle()

    def _step(self, draw: float) -> None:
        dice, listener = self._dice, self.listener
        if draw < 0.45:
            batch = self.engine.publish()
            if self._is_up and dice.random() > 0.12:
                listener.live(batch)
        elif draw < 0.52:
            self._is_up = False
        elif draw < 0.6 and not self._is_up:
            self._is_up = True
            listener.connected()
        elif draw < 0.64:
            self.engine.restart()
            self._is_up = False
            if listener.replay is not None and listener.replay != [None]:
                listener.replay[dice.randrange(len(listener.replay) + 1) :] = [None]
        elif listener.wants:
            listener.ask(self.engine if self._is_up or dice.random() < 0.3 else None)
        elif listener.replay == [None]:
            listener.end(is_whole=False)
        elif listener.replay is not None:
            if dice.random() < 0.15:
                listener.end(is_whole=False)
            else:
                listener.reply()

    def _settle(self) -> None:
        for _ in range(MOST_TURNS):
            if self.listener.wants:
                self.listener.ask(self.engine)
            elif self.listener.replay is not None:
                self.listener.reply()
            else:
                return
        raise AssertionError("it never settles")


@contextmanager
def bounds(is_low: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if is_low:
            patch.setattr(kv_cursor, "MAX_HELD", 2)
            patch.setattr(kv_cursor, "MAX_HOLES", 2)
            patch.setattr(out_of_turn, "MOST_OWED", 2)
            patch.setattr(out_of_turn, "MOST_LEFT", 2)
        yield


SEEDS, GROUPS = st.integers(0, 2**32), st.sampled_from([1, 1, 2])


@given(SEEDS, st.booleans(), GROUPS, st.sampled_from([False, False, True]))
@settings(max_examples=700)
def test_a_source_holds_what_its_state_says_of_what_its_engine_holds(
    seed: int, has_copies: bool, groups: int, is_low: bool
) -> None:
    with bounds(is_low):
        walk = Walk(seed, has_copies=has_copies, groups=groups)
    cursor, there, held = walk.listener.cursor, walk.engine.copies, walk.listener.held()
    if cursor.state is SourceState.LIVE:
        assert held == there
    elif cursor.state is SourceState.SILENT:
        assert not held
    elif cursor.state is SourceState.PARTIAL:
        assert held <= there
