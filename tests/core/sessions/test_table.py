"""Sessions and their bindings: how long one lasts, who holds it, what peers are told and say."""

import pytest

from lean_selector.core.errors import BadRequest
from lean_selector.core.sessions import table as table_module
from lean_selector.core.sessions.shapes import SessionEvent, SessionVerdict
from lean_selector.core.sessions.table import (
    MAX_AHEAD,
    MAX_SEQUENCE,
    SessionTable,
)
from tests.support.reservations import session_event, session_table

TTL_S = 10.0
OURS, PEER = 7, 9


class Told(list[SessionEvent]):
    def versions(self) -> list[tuple[str, int]]:
        return [(event.session_id, event.sequence) for event in self]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def table(told: Told) -> SessionTable:
    return session_table(TTL_S, OURS, lambda: 100, told.append)


def where(table: SessionTable, session_id: str, now: float) -> tuple[int, int | None] | None:
    binding = table.bound(session_id, now)
    return None if binding is None else (binding.worker_id, binding.dp_rank)


def heard(
    session_id: str = "s",
    worker_id: int = 2,
    dp_rank: int | None = 0,
    sequence: int = 5,
    writer_id: int = PEER,
) -> SessionEvent:
    return session_event("m", "t", session_id, worker_id, dp_rank, sequence, writer_id)


# -- bookings --------------------------------------------------------------------------------------


def test_an_id_is_measured_in_bytes(table: SessionTable) -> None:
    for fits in ("", "x" * 256, "é" * 128, "\U0001f600" * 64):
        table.check_id(fits)
    for too_long in ("x" * 257, "é" * 129, "\U0001f600" * 65):
        with pytest.raises(BadRequest, match=r"^session affinity ID must not exceed 256 bytes$"):
            table.check_id(too_long)


# -- peers -----------------------------------------------------------------------------------------


def test_a_sequence_far_above_the_clock_does_not_raise_ours_to_what_nobody_takes() -> None:
    clock, told = [100], Told()
    table = session_table(TTL_S, OURS, lambda: clock[0], told.append)
    for sequence in (MAX_SEQUENCE, MAX_SEQUENCE - 1, 101 + MAX_AHEAD):
        assert table.apply(heard(sequence=sequence), 0.0) is SessionVerdict.SEQUENCE
    table.book("mine", "a", 1, 0, 0.0)
    assert told.versions() == [("mine", 100)]
    clock[0] += 10 * MAX_AHEAD  # a peer began days after this table was made
    assert table.apply(heard(sequence=clock[0] + 5), 0.0) is SessionVerdict.BOUND


def test_an_id_that_is_too_long_is_not_taken_from_a_peer(table: SessionTable) -> None:
    assert table.apply(heard("x" * 257), 0.0) is SessionVerdict.TOO_LONG
    assert table.apply(heard(""), 0.0) is SessionVerdict.BOUND


def test_peers_hear_again_of_what_is_held_before_they_would_forget_it(
    table: SessionTable, told: Told
) -> None:
    table.book("s", "a", 1, 0, 0.0)
    table.book("t", "b", 1, 0, 2.0)
    told.clear()
    table.keep_alive(0.4 * TTL_S, 10)
    assert told == []
    table.keep_alive(0.5 * TTL_S, 10)
    assert told.versions() == [("s", 100)]
    table.keep_alive(0.5 * TTL_S, 10)
    assert len(told) == 1
    table.keep_alive(1.4 * TTL_S, 1)
    table.keep_alive(1.4 * TTL_S, 1)
    assert told.versions()[1:] == [("t", 101), ("s", 100)]
    table.release("a", 15.0)
    table.release("b", 15.0)
    told.clear()
    table.keep_alive(1e6, 10)
    assert told == []


def test_a_binding_that_ends_while_the_list_is_read_is_not_in_it(table: SessionTable) -> None:
    for name in "abc":
        table.book(f"of {name}", name, 1, 0, 0.0)
    listed = table.live(0.0)
    assert next(listed).session_id == "of a"
    table.refuse("of b")
    assert [live.session_id for live in listed] == ["of c"]


# -- bounds ----------------------------------------------------------------------------------------


@pytest.fixture
def small(table: SessionTable, monkeypatch: pytest.MonkeyPatch) -> SessionTable:
    monkeypatch.setattr(table_module, "MAX_SESSIONS", 2)
    return table


class TestAFullTable:
    def test_leaves_new_sessions_unbound_and_old_ones_as_they_are(
        self, small: SessionTable
    ) -> None:
        small.book("s", "a", 1, 0, 0.0)
        small.book("t", "b", 1, 0, 0.0)
        small.book("u", "c", 2, 0, 0.0)
        assert small.apply(heard("v"), 0.0) is SessionVerdict.FULL
        assert where(small, "u", 0.0) is None
        assert small.counts.unbound == 1
        small.release("c", 0.0)
        small.book("s", "d", 1, 0, 0.0)
        assert len(small) == 2

    def test_has_room_where_something_has_expired(self, small: SessionTable) -> None:
        small.book("s", "a", 1, 0, 0.0)
        small.book("t", "b", 1, 0, 0.0)
        small.release("b", 0.0)
        small.book("u", "c", 2, 0, TTL_S)
        assert where(small, "u", TTL_S) == (2, 0)
        assert (len(small), small.counts.expired) == (2, 1)


def test_what_has_expired_is_swept_in_steps(table: SessionTable) -> None:
    for number in range(5):
        table.apply(heard(f"s{number}"), float(number))
    table.sweep(TTL_S + 3.0, 2)
    assert len(table) == 3
    table.sweep(TTL_S + 3.0, 10)
    assert (len(table), table.counts.expired) == (1, 4)
