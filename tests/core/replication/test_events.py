"""What a peer's event does to our slots, and what our own changes tell the peers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.load.shapes import ReservationSpec
from lean_selector.core.replication.events import EARLY_MEMORY_S, MAX_EARLY, ReplicaEvents, Verdict
from lean_selector.core.replication.shapes import ReplicaEvent
from tests.support.one_partition import (
    ADD,
    COMPLETE,
    FREE,
    HERE,
    IDLE,
    PEER,
    PROMPT,
    THIRD,
    Load,
    Replica,
)
from tests.support.reservations import changed


@pytest.mark.parametrize(
    ("event", "verdict"),
    [
        (changed(ADD, router_id=HERE), Verdict.OWN),
        (changed(ADD, model_name="other"), Verdict.UNKNOWN_PARTITION),
        (changed(FREE, tenant_id="other"), Verdict.UNKNOWN_PARTITION),
        (changed(ADD, block_size=32), Verdict.BLOCK_SIZE),
        (changed(ADD, worker_id=8), Verdict.RANK),
        (changed(ADD, dp_rank=2), Verdict.RANK),
        (COMPLETE, Verdict.UNKNOWN_REQUEST),
        (FREE, Verdict.UNKNOWN_REQUEST),
    ],
)
def test_an_event_that_does_not_fit_changes_nothing_but_is_counted(
    event: ReplicaEvent, verdict: Verdict
) -> None:
    here = Replica()
    assert here.hear(event) is verdict
    assert here.load() == IDLE
    assert here.applier.counts[event.kind][verdict] == 1
    assert sum(map(sum, here.applier.counts)) == 1


@pytest.mark.parametrize(
    "fields", [{"track_prefill_tokens": False}, {"prefill_tokens": None}, {"prefill_tokens": 0}]
)
def test_tokens_count_only_when_they_are_tracked_and_given(fields: dict[str, object]) -> None:
    here = Replica()
    assert here.hear(changed(ADD, **fields)) is Verdict.APPLIED
    assert here.load() == (0, 3, 1)


@pytest.mark.parametrize(
    "second", [ADD, changed(ADD, dp_rank=1), changed(ADD, dp_rank=1, router_id=THIRD)]
)
def test_the_first_booking_of_an_id_wins(second: ReplicaEvent) -> None:
    here = Replica()
    here.hear(ADD)
    assert here.hear(second) is Verdict.DUPLICATE
    assert (here.load(0), here.load(1)) == ((48, 3, 1), IDLE)


def test_a_peer_does_not_take_over_what_was_admitted_here() -> None:
    here = Replica()
    here.add()
    assert here.hear(changed(ADD, dp_rank=1)) is Verdict.DUPLICATE
    assert here.hear(changed(FREE, dp_rank=1)) is Verdict.WORKER_MISMATCH
    assert here.load() == (48, 3, 1)


def test_a_repeated_completion_is_a_duplicate() -> None:
    here = Replica()
    here.hear(ADD)
    assert [here.hear(COMPLETE), here.hear(COMPLETE)] == [Verdict.APPLIED, Verdict.DUPLICATE]


@pytest.mark.parametrize("event", [COMPLETE, FREE], ids=["completion", "end"])
def test_another_worker_is_believed_only_of_the_requests_origin(event: ReplicaEvent) -> None:
    here = Replica()
    here.hear(ADD)
    elsewhere = changed(event, dp_rank=1)
    assert here.hear(changed(elsewhere, router_id=THIRD)) is Verdict.WORKER_MISMATCH
    assert here.load() == (48, 3, 1)
    assert here.hear(elsewhere) is Verdict.APPLIED
    assert here.load()[0] == 0


# -- order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("router_id", [PEER, THIRD], ids=["by its owner", "by another"])
@pytest.mark.parametrize(
    ("early", "verdict", "load"),
    [
        *(([FREE], Verdict.FREED_EARLY, IDLE), ([FREE, FREE], Verdict.FREED_EARLY, IDLE)),
        *(([FREE, COMPLETE], Verdict.FREED_EARLY, IDLE), ([COMPLETE], Verdict.APPLIED, (0, 3, 1))),
    ],
)
def test_what_comes_before_an_admission_counts_for_it(
    early: list[ReplicaEvent], verdict: Verdict, load: Load, router_id: int
) -> None:
    here = Replica()
    for event in early:
        assert here.hear(changed(event, router_id=router_id), 10.0) is Verdict.UNKNOWN_REQUEST
    assert here.hear(ADD, 10.0 + EARLY_MEMORY_S) is verdict
    assert here.hear(ADD, 10.0 + EARLY_MEMORY_S) is not Verdict.APPLIED
    assert here.load() == load


def test_early_events_are_forgotten_after_a_while() -> None:
    here = Replica()
    here.hear(FREE, 10.0)
    assert here.hear(ADD, 10.1 + EARLY_MEMORY_S) is Verdict.APPLIED
    assert here.load() == (48, 3, 1)


@pytest.mark.parametrize(
    ("ends", "number", "verdict"),
    [
        *(([(PEER, 7)], 8, Verdict.APPLIED), ([(PEER, 7), (PEER, 8)], 9, Verdict.APPLIED)),
        ([(PEER, 7)], 6, Verdict.FREED_EARLY),  # the second copy of what came before
        ([(PEER, None)], 8, Verdict.FREED_EARLY),
        ([(PEER, 7)], None, Verdict.FREED_EARLY),
        ([(THIRD, 7)], 8, Verdict.FREED_EARLY),
        ([(THIRD, 9), (PEER, 7), (PEER, 8)], 9, Verdict.FREED_EARLY),
        ([(PEER, 7), (THIRD, 9)], 8, Verdict.FREED_EARLY),
    ],
)
def test_an_end_does_not_count_for_what_its_sender_admits_after_it(
    ends: list[tuple[int, int | None]], number: int | None, verdict: Verdict
) -> None:
    """So an id can be used again, though others may have ended the request here before."""
    here = Replica()
    for router_id, ended in ends:
        here.hear(changed(FREE, router_id=router_id, sequence=ended))
    assert here.hear(changed(ADD, sequence=number)) is verdict


@pytest.mark.parametrize("other", [changed(ADD, request_id="s"), changed(ADD, dp_rank=1)])
def test_an_early_end_speaks_only_of_its_request_and_worker(other: ReplicaEvent) -> None:
    here = Replica()
    here.hear(FREE)
    assert here.hear(other) is Verdict.APPLIED


def test_the_memory_of_early_events_is_bounded_and_forgets_the_oldest() -> None:
    here = Replica()
    for n in range(MAX_EARLY + 1):
        here.hear(changed(FREE, request_id=str(n)))
    assert here.hear(changed(ADD, request_id="0")) is Verdict.APPLIED
    assert here.hear(changed(ADD, request_id="1")) is Verdict.FREED_EARLY
    here.hear(FREE, 2 * EARLY_MEMORY_S)
    assert len(here.applier._early) == 1  # old ones go as new ones come


# -- publishing ------------------------------------------------------------------------------------


def test_prompt_adapter_and_expected_output_travel_with_an_admission() -> None:
    here = Replica()
    spec = ReservationSpec(
        "r", 7, 0, lora_name="adapter", track_prefill_tokens=False, expected_output_tokens=5
    )
    here.ledger.book(spec, PROMPT, 0.0)
    here.complete()
    admission, completion = here.published
    assert (admission.spec, admission.sequence_hashes) == (spec, PROMPT)
    assert completion.spec.lora_name == "adapter"


def test_a_sign_of_life_renews_a_copy_and_books_the_blocks_where_there_is_none() -> None:
    owner, holder, stranger = Replica(HERE), Replica(PEER), Replica(THIRD)
    reservation = owner.add()
    holder.hear(owner.published[0], 0.0)
    ReplicaEvents(HERE, owner.publish).kept_alive(owner.ledger, reservation)
    sign = owner.published[1]
    assert holder.hear(sign, 200.0) is Verdict.DUPLICATE
    assert holder.load() == (48, 3, 1)
    assert holder.slots.expire(400.0, 300.0, 360.0, 10) == []  # 200 s since it was heard of
    assert stranger.hear(sign, 200.0) is Verdict.APPLIED
    assert stranger.load() == (0, 3, 1)


def test_a_duplicate_from_another_origin_renews_nothing() -> None:
    here = Replica()
    here.hear(ADD, 0.0)
    here.hear(changed(ADD, router_id=THIRD), 200.0)
    assert len(here.slots.expire(400.0, 300.0, 360.0, 10)) == 1


@given(st.integers(0, 2**32), st.integers(5, 60))
def test_two_replicas_agree_when_all_is_delivered_however_late(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    replicas = [Replica(HERE), Replica(PEER)]
    delivered = [0, 0]  # how far each has read the other's publications
    live: list[str] = []

    def deliver(reader: int, upto: int) -> None:
        for event in replicas[1 - reader].published[delivered[reader] : upto]:
            replicas[reader].hear(event)
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
    assert replicas[0].loads() == replicas[1].loads()
