"""However reservations of sessions end, their sessions hear of it: none is held by what is gone."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lean_selector.core.errors import SelectorError
from lean_selector.core.selection.partition import Partition
from lean_selector.core.sessions.table import SessionTable
from lean_selector.core.settings import SessionSettings
from tests.support.driven_selector import DrivenSelector

TTL_S = 20.0
SESSIONS = ["s", "t"]
sessions, workers = st.sampled_from(SESSIONS), st.integers(1, 3)


class SessionReservations(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        kind = SessionSettings(ttl_s=TTL_S)
        self.driven = DrivenSelector(sessions=kind, queue_threshold=30.0)
        self.driven.register(4)  # or the partition would go with its last worker
        for worker_id in (1, 2, 3):
            self.driven.register(worker_id)
        self.serial = 0
        self.session_of: dict[str, str] = {}

    @property
    def partition(self) -> Partition:
        return self.driven.partition

    @property
    def table(self) -> SessionTable:
        sessions = self.partition.sessions
        assert sessions is not None
        return sessions

    @rule(
        session_id=sessions,
        allowed=st.none() | st.frozensets(workers, min_size=1),
        isl_tokens=st.sampled_from([1, 16, 40]),
    )
    def book(self, session_id: str, allowed: frozenset[int] | None, isl_tokens: int) -> None:
        self.serial += 1
        name = f"r{self.serial}"
        self.session_of[name] = session_id
        more: dict[str, Any] = {} if allowed is None else {"allowed": allowed}
        try:
            self.driven.book(name, isl_tokens=isl_tokens, session_id=session_id, **more)
        except SelectorError:
            return  # nobody is there, or its rank is not allowed

    @rule(data=st.data(), by_peer=st.booleans())
    def end(self, data: st.DataObject, by_peer: bool) -> None:
        live = sorted(self.partition.slots.reservations)
        if not live:
            return
        name = data.draw(st.sampled_from(live))
        if by_peer:
            self.partition.slots.free(name, self.driven.now)
            self.driven.selector.load_changed("default", "default", name, self.driven.now)
        else:
            self.driven.selector.reservations.free(name, self.driven.now)

    @rule(worker_id=workers)
    def a_worker_comes_or_goes(self, worker_id: int) -> None:
        if worker_id in self.partition.workers:
            self.driven.remove(worker_id)
        else:
            self.driven.register(worker_id)

    @rule(seconds=st.sampled_from([1.0, 15.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.driven.now += seconds
        self.driven.selector.reservations.expire(self.driven.now, 100)
        self.driven.selector.admit_waiting(self.driven.now)

    @invariant()
    def a_session_is_held_by_its_live_reservations_and_nothing_else(self) -> None:
        live = Counter(self.session_of[name] for name in self.partition.slots.reservations)
        for session_id in SESSIONS:
            binding = self.table.bound(session_id, self.driven.now)
            # A booking that is refused drops the binding: what holds an older one holds nothing.
            assert binding is None or binding.reservations <= live[session_id]
            if not self.table.counts.refused and live[session_id]:
                assert binding is not None
                assert binding.reservations == live[session_id]
        assert self.table.held <= len(live)

    def teardown(self) -> None:
        for name in sorted(self.partition.slots.reservations):
            self.driven.selector.reservations.free(name, self.driven.now)
        self.driven.selector.refuse_waiting(SelectorError("over"))
        for name in sorted(self.partition.slots.reservations):
            self.driven.selector.reservations.free(name, self.driven.now)
        assert self.table.held == 0
        self.driven.now += TTL_S
        self.table.sweep(self.driven.now, 10)
        assert len(self.table) == 0


TestSessionReservations = SessionReservations.TestCase
