"""Sessions under any order of calls against a model that keeps a list, and replicas against each
other: who has heard all that was told agrees with everybody else.
"""

from collections.abc import Callable

import hypothesis.strategies as st
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lean_selector.core.sessions.shapes import SessionEvent, SessionVerdict
from lean_selector.core.sessions.table import MAX_SEQUENCE, SessionTable
from tests.support.reservations import session_event, session_table

TTL_S = 10.0
OURS = 5
SESSIONS = ["", "s", "é"]
sessions = st.sampled_from(SESSIONS)
workers, ranks = st.integers(1, 3), st.integers(0, 1)


def new_table(writer_id: int, tell: Callable[[SessionEvent], None], first: int = 3) -> SessionTable:
    return session_table(TTL_S, writer_id, lambda: first, tell)


class Entry:
    """A binding of the model."""

    def __init__(self, target: tuple[int, int | None], version: tuple[int, int]) -> None:
        self.target = target
        self.version = version
        self.expires_at = 0.0
        self.reservations: dict[str, tuple[int, int]] = {}

    def is_live(self, now: float) -> bool:
        return bool(self.reservations) or self.expires_at > now

    def names(self, worker_id: int, dp_rank: int) -> bool:
        return self.target in ((worker_id, dp_rank), (worker_id, None))


class Sessions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.told: list[SessionEvent] = []
        self.expected: list[SessionEvent] = []
        self.table = new_table(OURS, self.told.append)
        self.entries: dict[str, Entry] = {}
        self.next = 3
        self.reservations: dict[str, str] = {}  # id -> session
        self.serial = 0
        self.counts = {"bound": 0, "followed": 0, "moved": 0}

    def entry(self, session_id: str) -> Entry | None:
        entry = self.entries.get(session_id)
        if entry is not None and not entry.is_live(self.now):
            del self.entries[session_id]
            return None
        return entry

    def tell(self, session_id: str, entry: Entry) -> None:
        self.expected.append(session_event("m", "t", session_id, *entry.target, *entry.version))

    def new_version(self) -> tuple[int, int]:
        self.next += 1
        return self.next - 1, OURS

    @rule(session_id=sessions, worker_id=workers, dp_rank=ranks)
    def book(self, session_id: str, worker_id: int, dp_rank: int) -> None:
        self.serial += 1
        reservation_id = f"r{self.serial}"
        self.table.book(session_id, reservation_id, worker_id, dp_rank, self.now)
        entry = self.entry(session_id)
        if entry is None:
            entry = self.entries[session_id] = Entry((worker_id, dp_rank), self.new_version())
            self.counts["bound"] += 1
        elif entry.names(worker_id, dp_rank):
            self.counts["followed"] += 1
        else:
            entry.target, entry.version = (worker_id, dp_rank), self.new_version()
            self.counts["moved"] += 1
        entry.reservations[reservation_id] = entry.version
        self.reservations[reservation_id] = session_id
        self.tell(session_id, entry)

    @rule(data=st.data(), tells=st.booleans())
    def release(self, data: st.DataObject, tells: bool) -> None:
        reservation_id = data.draw(st.sampled_from(["of none", *self.reservations]))
        session_id = self.reservations.pop(reservation_id, "of none")
        self.table.release(reservation_id, self.now, tells=tells)
        entry = self.entry(session_id)
        if entry is None or reservation_id not in entry.reservations:
            return  # its binding was dropped
        if entry.reservations.pop(reservation_id) == entry.version:
            entry.expires_at = self.now + TTL_S
            if tells:
                self.tell(session_id, entry)

    @rule(session_id=sessions)
    def refuse(self, session_id: str) -> None:
        self.table.refuse(session_id)
        self.entries.pop(session_id, None)

    @rule(
        session_id=sessions,
        worker_id=workers,
        dp_rank=st.none() | ranks,
        sequence=st.integers(0, 20) | st.sampled_from([MAX_SEQUENCE + 1, 2**64 - 1]),
        writer_id=st.sampled_from([OURS - 1, OURS + 1]),
        idle_s=st.sampled_from([0.0, 0.0, 4.0, TTL_S]),
    )
    def apply(
        self,
        session_id: str,
        worker_id: int,
        dp_rank: int | None,
        sequence: int,
        writer_id: int,
        idle_s: float,
    ) -> None:
        event = session_event("m", "t", session_id, worker_id, dp_rank, sequence, writer_id)
        verdict = self.table.apply(event, self.now, idle_s)
        if sequence > MAX_SEQUENCE or idle_s >= TTL_S:
            assert verdict in (SessionVerdict.SEQUENCE, SessionVerdict.EXPIRED)
            return
        self.next = max(self.next, sequence + 1)
        target, version = (worker_id, dp_rank), (sequence, writer_id)
        entry = self.entry(session_id)
        expires_at = self.now - idle_s + TTL_S
        if entry is None:
            entry = self.entries[session_id] = Entry(target, version)
            entry.expires_at = expires_at
            assert verdict is SessionVerdict.BOUND
        elif version > entry.version or (version == entry.version and target == entry.target):
            same = target == entry.target
            assert verdict is (SessionVerdict.RENEWED if same else SessionVerdict.REPLACED)
            entry.target, entry.version = target, version
            entry.expires_at = max(entry.expires_at, expires_at)
        else:
            assert verdict is SessionVerdict.OUTDATED

    @rule(seconds=st.sampled_from([0.5, 3.0, 9.0, 30.0]), steps=st.integers(0, 3))
    def time_passes(self, seconds: float, steps: int) -> None:
        self.now += seconds
        self.table.sweep(self.now, steps)

    @invariant()
    def every_session_goes_where_the_model_says(self) -> None:
        for session_id in SESSIONS:
            entry, binding = self.entry(session_id), self.table.bound(session_id, self.now)
            if entry is None:
                assert binding is None
                continue
            assert binding is not None
            assert (binding.worker_id, binding.dp_rank) == entry.target
            assert (binding.sequence, binding.writer_id) == entry.version
            assert binding.reservations == len(entry.reservations)

    @invariant()
    def peers_were_told_exactly_that(self) -> None:
        assert self.told == self.expected
        counts = self.table.counts
        assert {name: getattr(counts, name) for name in self.counts} == self.counts

    @invariant()
    def a_list_for_peers_has_all_that_is_bound(self) -> None:
        listed = {live.session_id: live.idle_s for live in self.table.live(self.now)}
        live = {each: entry for each in SESSIONS if (entry := self.entry(each)) is not None}
        assert listed == {
            each: 0.0 if entry.reservations else self.now - entry.expires_at + TTL_S
            for each, entry in live.items()
        }
        assert self.table.held == sum(bool(entry.reservations) for entry in self.entries.values())
        assert len(self.table) >= len(listed)


TestSessions = Sessions.TestCase


@given(st.data())
def test_replicas_that_have_heard_everything_agree(data: st.DataObject) -> None:
    """Whatever was booked where, and in whatever order it arrived, as long as nothing expires."""
    outboxes: list[list[SessionEvent]] = [[], [], []]
    tables = [new_table(10 + n, outboxes[n].append, 1) for n in range(3)]
    links = {(a, b): 0 for a in range(3) for b in range(3) if a != b}  # how far each has heard

    def deliver(link: tuple[int, int]) -> None:
        speaker, hearer = link
        if links[link] < len(outboxes[speaker]):
            tables[hearer].apply(outboxes[speaker][links[link]], 0.0)
            links[link] += 1

    for number in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(0, 2))
        where = data.draw(workers), data.draw(ranks)
        tables[at].book(data.draw(sessions), f"r{number}", *where, 0.0)
        for link in data.draw(st.lists(st.sampled_from(sorted(links)), max_size=6)):
            deliver(link)
    while any(links[link] < len(outboxes[link[0]]) for link in links):
        for link in links:
            deliver(link)

    def state(table: SessionTable) -> list[object]:
        bound = [table.bound(session_id, 0.0) for session_id in SESSIONS]
        return [
            each and (each.worker_id, each.dp_rank, each.sequence, each.writer_id) for each in bound
        ]

    assert state(tables[0]) == state(tables[1]) == state(tables[2])
