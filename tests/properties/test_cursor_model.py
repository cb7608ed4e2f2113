"""Random engines, losses, restarts and replays against the cursor, used as a listener uses it.

An engine holds blocks, one of each or several copies, and keeps its last batches for replays. The
walk ends with a sound connection and whole replays: a source that says `live` then holds what its
engine holds, or where that has copies no more than it, one that says `partial` a part of it, one
that says `silent` nothing.
"""

import random
from collections import Counter
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.index.kv_cursor import BatchVerdict, KvCursor, SourceState

BLOCKS = 40
MOST_TURNS = 500  # until a sound source has settled


class Batch(NamedTuple):
    engine: int  # no two engines publish the same
    seq: int
    kind: str  # add, del, clear, or nothing
    block: int

    @property
    def payload(self) -> bytes:
        return repr(tuple(self)).encode()


class Engine:
    """One after the other at the same endpoints; each counts from 0."""

    def __init__(self, dice: random.Random, keeps: int, *, has_copies: bool) -> None:
        self._dice = dice
        self.has_copies = has_copies
        self._keeps = keeps
        self._born = 0
        self.restart()

    def restart(self) -> None:
        self._born += 1
        self._seq = 0
        self.copies: Counter[int] = Counter()
        self.kept: list[Batch] = []

    def publish(self) -> Batch:
        dice, draw = self._dice, self._dice.random()
        kind, block = "nothing", 0
        if self._seq:
            if draw < 0.06:
                kind = "clear"
                self.copies.clear()
            elif draw < 0.4 and self.copies:
                kind, block = "del", dice.choice(sorted(self.copies))
                self.copies -= Counter([block])
            else:
                kind, block = "add", dice.randrange(BLOCKS)
                if block in self.copies and not self.has_copies:
                    kind = "nothing"
                else:
                    self.copies[block] += 1
        batch = Batch(self._born, self._seq, kind, block)
        self._seq += 1
        self.kept.append(batch)
        del self.kept[: -self._keeps]
        return batch


class Listener:
    """Applies what the cursor says to counted blocks, and asks for replays."""

    def __init__(self) -> None:
        self.cursor = KvCursor(can_replay=True)
        self.copies: Counter[int] = Counter()
        self.wants = False  # to ask
        # What is still to come of a replay; at a None it is cut off.
        self.replay: list[Batch | None] | None = None
        self._restarts = 0
        self._batches: dict[bytes, Batch] = {}

    @property
    def is_busy(self) -> bool:
        return self.wants or self.replay is not None

    def connected(self) -> None:
        self.cursor.connected()
        self._look()

    def live(self, batch: Batch) -> None:
        verdict = self.cursor.live(batch.seq, self._payload(batch))
        if verdict is BatchVerdict.RESTART:
            self._stop()
            self.copies.clear()
        if verdict in (BatchVerdict.APPLY, BatchVerdict.RESTART):
            self._apply(batch)
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
        verdict = self.cursor.replayed(batch.seq, self._payload(batch))
        if verdict is BatchVerdict.RESTART:
            self._start_over()
        elif verdict is BatchVerdict.APPLY:
            self._apply(batch)

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
            self._apply(self._batches[payload])
        self.replay, self.wants = None, self.cursor.replay_from is not None

    def _payload(self, batch: Batch) -> bytes:
        self._batches[batch.payload] = batch
        return batch.payload

    def _apply(self, batch: Batch) -> None:
        if batch.kind == "add":
            if not (self.cursor.is_again and batch.block in self.copies):
                self.copies[batch.block] += 1
        elif batch.kind == "del":
            self.copies -= Counter([batch.block])
        elif batch.kind == "clear":
            self.copies.clear()
            self.cursor.cleared()
            if self.cursor.is_settled:
                self._stop()

    def _start_over(self) -> None:
        self.copies.clear()
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

    def __init__(self, seed: int, *, has_copies: bool) -> None:
        self._dice = random.Random(seed)
        self.engine = Engine(self._dice, self._dice.choice([2, 5, 50]), has_copies=has_copies)
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


@given(seed=st.integers(0, 2**32), has_copies=st.booleans())
@settings(max_examples=700)
def test_a_source_holds_what_its_state_says_of_what_its_engine_holds(
    seed: int, has_copies: bool
) -> None:
    walk = Walk(seed, has_copies=has_copies)
    cursor, held, copies = walk.listener.cursor, walk.engine.copies, walk.listener.copies
    if cursor.state is SourceState.LIVE:
        assert copies <= held if has_copies else copies == held
    elif cursor.state is SourceState.SILENT:
        assert not copies
    elif cursor.state is SourceState.PARTIAL:
        assert copies <= held
