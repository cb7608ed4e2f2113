"""What a peer's event does to our slots, and what our own changes tell the peers."""

import itertools
import random
import struct
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.load.shapes import Reservation
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import (
    EARLY_MEMORY_S,
    MAX_EARLY,
    ReplicaApplier,
    ReplicaEvents,
    ReplicaTarget,
    Verdict,
)
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from tests.support.bookings import book, changed, replica_event

OURS, PEER, OTHER_PEER = 1, 2, 3
PROMPT = struct.pack("<3Q", 101, 202, 303)


class Replica:
    """One partition of one replica, its applier, and what it published."""

    model_name, tenant_id, block_size = "llama", "t1", 16

    def __init__(self, router_id: int = OURS) -> None:
        self.slots = Slots()
        for dp_rank in (0, 1):
            self.slots.add_rank(7, dp_rank)
        self.published: list[ReplicaEvent] = []
        self.events = ReplicaEvents(router_id, self.published.append)
        self.applier = ReplicaApplier(router_id, self.lookup)

    def lookup(self, model_name: str, tenant_id: str) -> ReplicaTarget | None:
        return self if (model_name, tenant_id) == ("llama", "t1") else None

    def apply(self, event: ReplicaEvent, now: float = 0.0) -> Verdict:
        return self.applier.apply(event, now)

    def loads(self, dp_rank: int = 0) -> tuple[int, int, int]:
        rank = self.slots.ranks[7, dp_rank]
        return rank.active_prefill_tokens, rank.active_decode_blocks, rank.active_requests

    def add(self, request_id: str = "r", dp_rank: int = 0, now: float = 0.0) -> Reservation:
        """Admit a request here and tell, as a service does."""
        reservation = book(self.slots, request_id, 7, dp_rank, PROMPT, 48, now)
        self.events.booked(self, reservation, PROMPT)
        return reservation

    def complete(self, request_id: str = "r", now: float = 0.0) -> None:
        completed = self.slots.prefill_complete(request_id, now)
        if completed is not None and completed[1]:
            self.events.prefill_completed(self, completed[0])

    def free(self, request_id: str = "r") -> None:
        freed = self.slots.free(request_id)
        if freed is not None:
            self.events.freed(self, freed)


ADD = replica_event(
    EventKind.ADD, "llama", "t1", 16, "r", 7, 0, PEER, None, PROMPT, True, 48, None, 9
)
MARK = replica_event(EventKind.PREFILL_COMPLETE, "llama", "t1", 16, "r", 7, 0, PEER)
FREE = replica_event(EventKind.FREE, "llama", "t1", 16, "r", 7, 0, PEER)
IDLE = (0, 0, 0)


def test_an_admission_its_prefill_completion_and_its_end_move_the_load_here() -> None:
    here = Replica()
    assert here.apply(ADD) is Verdict.APPLIED
    assert here.loads() == (48, 3, 1)
    copy = here.slots.reservations["r"]
    assert (copy.router_id, copy.booking.expected_output_tokens) == (PEER, 9)
    assert here.apply(MARK) is Verdict.APPLIED
    assert here.loads() == (0, 3, 1)
    assert here.apply(FREE) is Verdict.APPLIED
    assert here.loads() == IDLE


def test_a_copy_with_an_expected_prefill_duration_decays_from_the_time_it_was_heard() -> None:
    here = Replica()
    here.apply(changed(ADD, prefill_tokens=1000, prefill_duration_s=4.0), now=10.0)
    assert here.slots.ranks[7, 0].prefill_tokens_at(12.0) == 500


def test_what_a_peer_tells_is_told_to_nobody_else() -> None:
    here = Replica()
    for event in (FREE, MARK, ADD, changed(ADD, request_id="s"), changed(FREE, request_id="s")):
        here.apply(event)
    assert here.published == []


@pytest.mark.parametrize(
    ("event", "verdict"),
    [
        (changed(ADD, router_id=OURS), Verdict.OWN),
        (changed(ADD, model_name="other"), Verdict.UNKNOWN_PARTITION),
        (changed(FREE, tenant_id="other"), Verdict.UNKNOWN_PARTITION),
        (changed(ADD, block_size=32), Verdict.BLOCK_SIZE),
        (changed(ADD, worker_id=8), Verdict.RANK),
        (changed(ADD, dp_rank=2), Verdict.RANK),
        (MARK, Verdict.UNKNOWN_REQUEST),
        (FREE, Verdict.UNKNOWN_REQUEST),
    ],
)
def test_an_event_that_does_not_fit_changes_nothing_but_is_counted(
    event: ReplicaEvent, verdict: Verdict
) -> None:
    here = Replica()
    assert here.apply(event) is verdict
    assert here.loads() == IDLE
    assert here.applier.counts[event.kind][verdict] == 1
    assert sum(map(sum, here.applier.counts)) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"track_prefill_tokens": False},
        {"prefill_tokens": None},
        {"prefill_tokens": 0},
    ],
)
def test_tokens_count_only_when_they_are_tracked_and_given(fields: dict[str, object]) -> None:
    here = Replica()
    assert here.apply(changed(ADD, **fields)) is Verdict.APPLIED
    assert here.loads() == (0, 3, 1)


@pytest.mark.parametrize(
    "second", [ADD, changed(ADD, dp_rank=1), changed(ADD, dp_rank=1, router_id=OTHER_PEER)]
)
def test_the_first_booking_of_an_id_wins(second: ReplicaEvent) -> None:
    here = Replica()
    here.apply(ADD)
    assert here.apply(second) is Verdict.DUPLICATE
    assert (here.loads(0), here.loads(1)) == ((48, 3, 1), IDLE)


def test_a_peer_does_not_take_over_what_was_admitted_here() -> None:
    here = Replica()
    here.add()
    assert here.apply(changed(ADD, dp_rank=1)) is Verdict.DUPLICATE
    assert here.apply(changed(FREE, dp_rank=1)) is Verdict.WORKER_MISMATCH
    assert here.loads() == (48, 3, 1)


def test_any_peer_may_end_a_request_where_it_sits() -> None:
    here = Replica()
    here.add()
    assert here.apply(MARK) is Verdict.APPLIED
    assert here.apply(FREE) is Verdict.APPLIED
    assert here.loads() == IDLE


def test_a_repeated_completion_is_a_duplicate() -> None:
    here = Replica()
    here.apply(ADD)
    assert [here.apply(MARK), here.apply(MARK)] == [Verdict.APPLIED, Verdict.DUPLICATE]


@pytest.mark.parametrize("event", [MARK, FREE], ids=["completion", "end"])
def test_another_worker_is_believed_only_of_the_requests_origin(event: ReplicaEvent) -> None:
    here = Replica()
    here.apply(ADD)
    elsewhere = changed(event, dp_rank=1)
    assert here.apply(changed(elsewhere, router_id=OTHER_PEER)) is Verdict.WORKER_MISMATCH
    assert here.loads() == (48, 3, 1)
    assert here.apply(elsewhere) is Verdict.APPLIED
    assert here.loads()[0] == 0


# Order -------------------------------------------------------------------------------------------


def test_an_end_that_comes_first_drops_the_late_admission() -> None:
    here = Replica()
    assert here.apply(FREE, now=10.0) is Verdict.UNKNOWN_REQUEST
    assert here.apply(MARK, now=10.0) is Verdict.UNKNOWN_REQUEST  # does not outweigh the end
    assert here.apply(ADD, now=10.0 + EARLY_MEMORY_S) is Verdict.FREED_EARLY
    assert here.loads() == IDLE


def test_a_completion_that_comes_first_leaves_the_late_admission_no_tokens() -> None:
    here = Replica()
    here.apply(MARK)
    assert here.apply(ADD) is Verdict.APPLIED
    assert here.loads() == (0, 3, 1)


def test_early_events_are_forgotten_after_a_while() -> None:
    here = Replica()
    here.apply(FREE, now=10.0)
    assert here.apply(ADD, now=10.1 + EARLY_MEMORY_S) is Verdict.APPLIED
    assert here.loads() == (48, 3, 1)


@pytest.mark.parametrize(
    "other",
    [
        changed(ADD, request_id="s"),
        changed(ADD, dp_rank=1),
    ],
)
def test_an_early_end_speaks_only_of_its_request_and_worker(other: ReplicaEvent) -> None:
    here = Replica()
    here.apply(FREE)
    assert here.apply(other) is Verdict.APPLIED


def test_an_end_called_for_elsewhere_may_overtake_the_owners_admission() -> None:
    owner, caller, third = Replica(OURS), Replica(PEER), Replica(OTHER_PEER)
    owner.add()
    caller.apply(owner.published[0])
    caller.free()
    assert third.apply(caller.published[0]) is Verdict.UNKNOWN_REQUEST
    assert third.apply(owner.published[0]) is Verdict.FREED_EARLY
    assert third.loads() == IDLE


def test_a_completion_called_for_elsewhere_may_overtake_the_owners_admission() -> None:
    here = Replica()
    here.apply(changed(MARK, router_id=OTHER_PEER))
    assert here.apply(ADD) is Verdict.APPLIED
    assert here.loads() == (0, 3, 1)


def test_early_events_delivered_twice_drop_the_admission_twice() -> None:
    here = Replica()
    for event in (FREE, FREE, ADD, ADD):
        here.apply(event)
    assert here.loads() == IDLE


def test_the_memory_of_early_events_is_bounded_and_forgets_the_oldest() -> None:
    here = Replica()
    for n in range(MAX_EARLY + 1):
        here.apply(changed(FREE, request_id=str(n)))
    assert here.apply(changed(ADD, request_id="0")) is Verdict.APPLIED
    assert here.apply(changed(ADD, request_id="1")) is Verdict.FREED_EARLY
    here.apply(FREE, now=2 * EARLY_MEMORY_S)
    assert len(here.applier._early) == 1  # old ones go as new ones come


def test_the_oldest_early_event_is_at_hand_however_many_went_before_it() -> None:
    """Of a plain dict it is not: its first entry is sought behind the holes of all that went."""
    assert isinstance(Replica().applier._early, OrderedDict)


@pytest.mark.parametrize("order", list(itertools.permutations([ADD, MARK, FREE])))
def test_an_ended_request_leaves_no_load_in_whatever_order_it_is_heard_of(
    order: tuple[ReplicaEvent, ...],
) -> None:
    here = Replica()
    for event in order:
        here.apply(event)
    assert here.loads() == IDLE


# Publishing --------------------------------------------------------------------------------------


def test_each_change_is_told_once_with_the_rank_the_request_sits_on() -> None:
    here, there = Replica(OURS), Replica(PEER)
    here.add(dp_rank=1)
    here.complete()
    here.complete()
    here.free()
    here.free()
    assert [
        (event.kind, event.booking.worker_id, event.booking.dp_rank) for event in here.published
    ] == [
        (EventKind.ADD, 7, 1),
        (EventKind.PREFILL_COMPLETE, 7, 1),
        (EventKind.FREE, 7, 1),
    ]
    assert [there.apply(event) for event in here.published] == [Verdict.APPLIED] * 3
    assert {event.router_id for event in here.published} == {OURS}


def test_an_end_called_for_here_is_told_also_of_what_a_peer_admitted() -> None:
    owner, caller = Replica(OURS), Replica(PEER)
    owner.add()
    caller.apply(owner.published[0])
    caller.free()
    assert [(event.kind, event.router_id) for event in caller.published] == [(EventKind.FREE, PEER)]
    assert owner.apply(caller.published[0]) is Verdict.APPLIED
    assert owner.loads() == IDLE


def test_prompt_adapter_and_expected_output_travel_with_an_admission() -> None:
    here = Replica()
    reservation = book(
        here.slots,
        "r",
        7,
        0,
        PROMPT,
        0,
        0.0,
        lora_name="adapter",
        expected_output_tokens=5,
        track_prefill_tokens=False,
    )
    here.events.booked(here, reservation, PROMPT)
    here.events.prefill_completed(here, reservation)
    admission, completion = here.published
    assert admission == replica_event(
        EventKind.ADD, "llama", "t1", 16, "r", 7, 0, OURS, "adapter", PROMPT, False, None, None, 5
    )
    assert completion.booking.lora_name == "adapter"


def test_a_booking_can_track_prefill_without_tokens() -> None:
    here = Replica()
    here.events.booked(here, book(here.slots, "r", 7, 0, PROMPT, 0, 0.0), PROMPT)
    assert here.published[0].booking.track_prefill_tokens
    assert here.published[0].booking.prefill_tokens is None


def test_a_sign_of_life_renews_a_copy_and_books_the_blocks_where_there_is_none() -> None:
    owner, holder, stranger = Replica(OURS), Replica(PEER), Replica(OTHER_PEER)
    reservation = owner.add()
    holder.apply(owner.published[0], now=0.0)
    owner.events.kept_alive(owner, reservation)
    sign = owner.published[1]
    assert holder.apply(sign, now=200.0) is Verdict.DUPLICATE
    assert holder.loads() == (48, 3, 1)
    assert holder.slots.expire(400.0, 300.0, 360.0, 10) == []  # 200 s since it was heard of
    assert stranger.apply(sign, now=200.0) is Verdict.APPLIED
    assert stranger.loads() == (0, 3, 1)


def test_a_duplicate_from_another_origin_renews_nothing() -> None:
    here = Replica()
    here.apply(ADD, now=0.0)
    here.apply(changed(ADD, router_id=OTHER_PEER), now=200.0)
    assert len(here.slots.expire(400.0, 300.0, 360.0, 10)) == 1


@given(st.integers(0, 2**32), st.integers(5, 60))
def test_two_replicas_agree_when_all_is_delivered_however_late(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    replicas = [Replica(OURS), Replica(PEER)]
    delivered = [0, 0]  # how far each has read the other's publications
    live: list[str] = []

    def deliver(reader: int, upto: int) -> None:
        for event in replicas[1 - reader].published[delivered[reader] : upto]:
            replicas[reader].apply(event)
        delivered[reader] = max(delivered[reader], upto)

    for step in range(steps):
        side = rng.randrange(2)
        replica, choice = replicas[side], rng.random()
        if choice < 0.4:
            live.append(f"{side}-{step}")
            replica.add(live[-1], rng.randrange(2))
        elif choice < 0.6 and live:
            replica.complete(rng.choice(live))
        elif choice < 0.8 and live:
            replica.free(rng.choice(live))
        else:
            deliver(side, rng.randint(0, len(replicas[1 - side].published)))
    for side in (0, 1):
        deliver(side, len(replicas[1 - side].published))
    assert [replicas[0].loads(r) for r in (0, 1)] == [replicas[1].loads(r) for r in (0, 1)]
