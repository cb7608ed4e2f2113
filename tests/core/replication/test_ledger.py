"""A partition's ledger: what of its changes is told to the peers, and what is given up when."""

from collections.abc import Callable

import pytest

from lean_selector.core.errors import DuplicateRequest, NotFound, SelectorError
from lean_selector.core.load.shapes import ReservationSpec
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import ReplicaApplier, ReplicaEvents
from lean_selector.core.replication.ledger import (
    REPLICA_GRACE_S,
    REPUBLISH_AFTER_S,
    RESERVATION_EXPIRY_S,
    Ledger,
    Ledgers,
    copies_expire_s,
    republish_after_s,
)
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from tests.support.driven_selector import pack
from tests.support.reservations import replica_event

OURS, PEER = 1, 2
PROMPT = pack([101, 202, 303])
BOOKING = ReservationSpec("ours", 7, 0, prefill_tokens=48, expected_output_tokens=9)
ADD, COMPLETE, FREE = EventKind.ADD, EventKind.PREFILL_COMPLETE, EventKind.FREE


class Books:
    """Ledgers of a process, one per tenant, and what was published of them."""

    def __init__(self, *tenants: str) -> None:
        self.published: list[ReplicaEvent] = []
        self.shared = Ledgers(events=ReplicaEvents(OURS, self.published.append))
        self.ledgers = {
            tenant: Ledger("m", tenant, 16, Slots(), self.shared) for tenant in tenants or ("t",)
        }
        for ledger in self.ledgers.values():
            ledger.slots.add_rank(7, 0)
        self.applier = ReplicaApplier(PEER + 1, lambda _, tenant: self.ledgers.get(tenant))

    @property
    def ledger(self) -> Ledger:
        return self.ledgers["t"]

    def hear_of(self, request_id: str, now: float = 0.0) -> None:
        self.applier.apply(replica_event(ADD, "m", "t", 16, request_id, 7, 0, PEER), now)

    def expire(self, now: float, max_steps: int = 100) -> list[str]:
        gone = self.shared.expire(list(self.ledgers.values()), now, max_steps)
        return [reservation.request_id for _, expired in gone for reservation in expired]

    def told(self) -> list[tuple[EventKind, str]]:
        """What was published since it was asked last."""
        told = [(event.kind, event.spec.request_id) for event in self.published]
        self.published.clear()
        return told


def test_an_admission_is_told_as_it_was_booked() -> None:
    books = Books()
    books.ledger.book(BOOKING, PROMPT, 0.0)
    assert books.published == [ReplicaEvent(ADD, "m", "t", 16, OURS, BOOKING, PROMPT)]


@pytest.mark.parametrize("request_id", ["ours", "a peer's"])
def test_what_a_call_does_is_told_wherever_the_request_was_admitted(request_id: str) -> None:
    books = Books()
    books.ledger.book(BOOKING, PROMPT, 0.0)
    books.hear_of("a peer's")
    books.told()
    books.ledger.prefill_complete(request_id, 1.0)
    books.ledger.prefill_complete(request_id, 2.0)  # no news
    books.ledger.output_block(request_id, 3.0)  # stays here
    books.ledger.free(request_id, 4.0)
    assert books.told() == [(COMPLETE, request_id), (FREE, request_id)]


@pytest.mark.parametrize(
    "end",
    [lambda books: books.ledger.drop_rank(7, 0), lambda books: books.expire(10_000.0)],
    ids=["its rank goes", "it expires"],
)
def test_what_ends_without_a_call_is_told_only_of_what_was_admitted_here(
    end: Callable[[Books], object],
) -> None:
    books = Books()
    books.ledger.book(BOOKING, PROMPT, 0.0)
    books.hear_of("a peer's")
    books.told()
    end(books)
    assert not books.ledger.slots.reservations
    assert books.told() == [(FREE, "ours")]


def test_calls_for_what_is_not_live_do_and_tell_nothing() -> None:
    books = Books()
    assert books.ledger.prefill_complete("r", 0.0) is None
    assert books.ledger.output_block("r", 0.0) is None
    assert books.ledger.free("r", 0.0) is None
    assert books.ledger.drop_rank(8, 0) == []
    assert books.told() == []


@pytest.mark.parametrize(
    ("spec", "error"),
    [(ReservationSpec("new", 8, 0), NotFound), (ReservationSpec("ours", 7, 0), DuplicateRequest)],
)
def test_what_cannot_be_booked_is_not_told(
    spec: ReservationSpec, error: type[SelectorError]
) -> None:
    books = Books()
    books.ledger.book(BOOKING, PROMPT, 0.0)
    books.told()
    with pytest.raises(error):
        books.ledger.book(spec, PROMPT, 0.0)
    assert books.told() == []


touches = pytest.mark.parametrize(
    "touch",
    [
        lambda books, now: books.ledger.output_block("ours", now),
        lambda books, now: books.ledger.prefill_complete("ours", now),
    ],
    ids=["an output block", "a completion"],
)


@touches
def test_a_request_that_only_its_owner_hears_of_is_said_to_live_now_and_then(
    touch: Callable[[Books, float], object],
) -> None:
    books = Books()
    books.ledger.book(BOOKING, PROMPT, 0.0)
    books.ledger.prefill_complete("ours", 10.0)
    books.told()
    for now in (10.0 + REPUBLISH_AFTER_S - 1.0, 10.0 + REPUBLISH_AFTER_S, 135.0):
        touch(books, now)
    assert len(books.published) == 1
    sign = books.published[0]
    assert (sign.kind, sign.spec.prefill_tokens, sign.sequence_hashes) == (ADD, None, PROMPT)
    assert sign.spec.expected_output_tokens == 9


def test_a_copy_is_never_said_to_live_by_who_did_not_admit_it() -> None:
    books = Books()
    books.hear_of("a peer's")
    for now in (200.0, 400.0):
        books.ledger.output_block("a peer's", now)
    assert books.told() == []


def test_copies_outlive_the_limit_for_their_owner_expires_them_first() -> None:
    books = Books()
    books.ledger.book(BOOKING, PROMPT, 0.0)
    books.hear_of("a peer's")
    assert copies_expire_s(RESERVATION_EXPIRY_S) == RESERVATION_EXPIRY_S + REPLICA_GRACE_S
    assert books.expire(RESERVATION_EXPIRY_S) == []
    assert books.expire(RESERVATION_EXPIRY_S + 1.0) == ["ours"]
    assert books.expire(RESERVATION_EXPIRY_S + REPLICA_GRACE_S) == []
    assert books.expire(RESERVATION_EXPIRY_S + REPLICA_GRACE_S + 1.0) == ["a peer's"]


def test_expiry_goes_on_behind_the_ledger_where_it_stopped() -> None:
    books = Books("a", "b")
    for tenant, ledger in books.ledgers.items():
        for n in range(3):
            ledger.book(ReservationSpec(f"{tenant}{n}", 7, 0), b"", float(n))
    books.told()
    assert books.expire(1_000.0, max_steps=2) == ["a0", "a1"]
    assert books.expire(1_000.0, max_steps=2) == ["b0", "b1"]
    assert books.expire(1_000.0, max_steps=100) == ["a2", "b2"]
    assert len(books.told()) == 6


def test_nobody_is_told_where_there_are_no_peers() -> None:
    ledger = Ledger("m", "t", 16, Slots(), Ledgers())
    ledger.slots.add_rank(7, 0)
    ledger.book(BOOKING, PROMPT, 0.0)
    for call in (ledger.prefill_complete, ledger.output_block, ledger.free):
        reservation = call("ours", 1_000.0)
        assert reservation is not None
        assert reservation.spec is BOOKING
    assert not ledger.slots.reservations


def test_a_request_is_said_to_live_twice_before_its_copies_could_expire() -> None:
    for expiry_s in (10.0, RESERVATION_EXPIRY_S):
        assert 2 * republish_after_s(expiry_s) < expiry_s
    assert republish_after_s(3600.0) == REPUBLISH_AFTER_S == 120.0


@touches
def test_what_a_call_touches_lives_as_long_again(touch: Callable[[Books, float], object]) -> None:
    books = Books()
    books.ledger.book(BOOKING, PROMPT, 0.0)
    touch(books, 200.0)
    assert books.expire(200.0 + RESERVATION_EXPIRY_S) == []
    assert books.expire(200.0 + RESERVATION_EXPIRY_S + 1.0) == ["ours"]


def test_a_request_is_said_to_live_as_soon_as_it_is_due() -> None:
    books = Books()
    books.ledger.book(BOOKING, PROMPT, 0.0)
    books.told()
    books.ledger.output_block("ours", REPUBLISH_AFTER_S)
    assert books.told() == [(ADD, "ours")]


def test_an_output_block_weighs_what_the_call_says_and_an_end_is_heard_when_it_came() -> None:
    books = Books()
    books.ledger.book(BOOKING, PROMPT, 0.0)
    rank = books.ledger.slots.ranks[7, 0]
    books.ledger.output_block("ours", 1.0)
    assert rank.active_decode_blocks == 4
    books.ledger.output_block("ours", 2.0, 0.5, blocks=3)
    assert rank.active_decode_blocks == 4  # seven blocks, each a half, rounded up
    books.ledger.free("ours", 5.0)
    assert books.ledger.slots.heard_at == 5.0


def test_a_ledger_with_nothing_to_give_up_hides_none_behind_it() -> None:
    books = Books("a", "b", "c")
    books.ledgers["c"].book(BOOKING, b"", 0.0)
    assert books.expire(1_000.0) == ["ours"]


def test_expiry_goes_on_with_the_next_of_many_ledgers_and_comes_round() -> None:
    books = Books("a", "b", "c", "d")
    for tenant, ledger in books.ledgers.items():
        for n in range(2):
            ledger.book(ReservationSpec(f"{tenant}{n}", 7, 0), b"", float(n))
    gone = [books.expire(1_000.0, max_steps=1) for _ in range(9)]
    assert [each for some in gone for each in some] == [
        *("a0", "b0", "c0", "d0"),
        *("a1", "b1", "c1", "d1"),
    ]
