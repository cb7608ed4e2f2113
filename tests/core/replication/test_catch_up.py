"""A replica that starts takes over what is live elsewhere, each id once, whatever comes between."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.replication import catch_up as module
from lean_selector.core.replication.catch_up import (
    HOLD_S,
    CatchUp,
    Fate,
    ended_meanwhile,
)
from lean_selector.core.replication.events import Verdict
from lean_selector.core.replication.shapes import EventKind, LiveBooking, ReplicaEvent
from tests.support.bookings import book, changed
from tests.support.one_partition import (
    COPIES_EXPIRE_S,
    HERE,
    IDLE,
    PEER,
    PROMPT,
    THIRD,
    Replica,
    event,
)


def starting(ranks: int = 2) -> tuple[Replica, CatchUp]:
    replica = Replica(HERE, ranks, catches_up=True)
    assert replica.catch_up is not None
    return replica, replica.catch_up


def booking(request_id: str = "r", **changes: object) -> LiveBooking:
    owner = Replica(PEER)
    owner.add(request_id)
    (taken,) = owner.snapshot()
    return changed(taken, **changes)


def test_a_booking_is_taken_over_with_all_that_it_is() -> None:
    owner = Replica(PEER)
    book(owner.slots, "r", 7, 1, PROMPT, 48, 5.0, lora_name="a", expected_output_tokens=9)
    here, catch_up = starting()
    here.now = 20.0
    assert catch_up.take(owner.snapshot()[0], here.now) is Fate.BOOKED
    copy = here.slots.reservations["r"]
    assert copy.router_id == PEER
    assert (copy.rank.key, copy.prefill_tokens, copy.prefill_done) == ((7, 1), 48, False)
    expected = copy.booking.lora_name, copy.booking.expected_output_tokens
    assert (*expected, copy.touched_at) == ("a", 9, 5.0)
    assert here.slots.sequence_hashes_of(copy) == PROMPT
    assert here.published == []


@pytest.mark.parametrize(
    ("changes", "fate"),
    [
        ({"block_size": 32}, Fate.BLOCK_SIZE),
        ({"router_id": HERE}, Fate.HELD),
        ({"touched_at": -COPIES_EXPIRE_S - 1.0}, Fate.EXPIRED),
        ({"dp_rank": 2}, Fate.WAITING),
        ({"model_name": "other"}, Fate.WAITING),
    ],
)
def test_what_does_not_fit_is_not_booked(changes: dict[str, Any], fate: Fate) -> None:
    here, catch_up = starting()
    assert catch_up.take(booking(**changes), 0.0) is fate
    assert dict(catch_up.fates()) == {fate: 1}
    assert not here.slots.reservations


def test_bookings_wait_for_their_rank_and_hear_what_becomes_of_them() -> None:
    here, catch_up = starting(ranks=0)
    for request_id in ("kept", "ended", "completed"):
        assert catch_up.take(booking(request_id), 0.0) is Fate.WAITING
    assert catch_up.take(booking("kept"), 0.0) is Fate.HELD
    catch_up.snapshot_is_in()
    here.hear(event(EventKind.FREE, "ended"))
    here.hear(event(EventKind.PREFILL_COMPLETE, "completed"))
    here.hear(event(EventKind.FREE, "kept", dp_rank=1))  # of another rank
    assert here.hear(event(EventKind.ADD, "new", sequence_hashes=PROMPT, prefill_tokens=10)) is (
        Verdict.UNKNOWN_PARTITION
    )
    assert dict(catch_up.fates())[Fate.WAITING] == 3
    assert not catch_up.admit_waiting(1.0, 100)
    here.register(1)
    assert not catch_up.admit_waiting(2.0, 100)
    assert set(here.slots.reservations) == {"kept", "completed", "new"}
    assert here.load() == (58, 3, 3)
    assert Fate.WAITING not in dict(catch_up.fates())


def test_what_waited_too_long_is_dropped_and_counted() -> None:
    here, catch_up = starting(ranks=0)
    catch_up.take(booking("r"), 0.0)
    assert not catch_up.admit_waiting(HOLD_S - 1.0, 100)
    assert dict(catch_up.fates()) == {Fate.WAITING: 1}
    assert catch_up.admit_waiting(HOLD_S, 0)
    assert not catch_up.admit_waiting(HOLD_S, 1)
    assert dict(catch_up.fates()) == {Fate.NOT_REGISTERED: 1}
    here.register(1)
    catch_up.admit_waiting(HOLD_S, 100)
    assert not here.slots.reservations


def test_a_catch_up_that_begins_again_prolongs_no_wait() -> None:
    here, catch_up = starting(ranks=0)
    catch_up.take(booking("old"), 0.0)
    catch_up.begin_again(HOLD_S / 2)
    catch_up.take(booking("young"), HOLD_S / 2)
    assert not catch_up.admit_waiting(HOLD_S, 100)
    assert dict(catch_up.fates()) == {Fate.WAITING: 1, Fate.NOT_REGISTERED: 1}
    here.register(1)
    catch_up.admit_waiting(HOLD_S, 100)
    assert set(here.slots.reservations) == {"young"}


def test_nothing_waits_once_ends_are_not_noted_any_longer() -> None:
    here, catch_up = starting(ranks=0)
    catch_up.take(booking("r"), 0.0)
    catch_up.give_up_waiting()
    here.register(1)
    catch_up.admit_waiting(1.0, 100)
    assert not here.slots.reservations
    assert dict(catch_up.fates()) == {Fate.NOT_REGISTERED: 1}


def test_what_waits_and_what_was_heard_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    monkeypatch.setattr(module, "MAX_NOTED", 2)
    here, catch_up = starting()
    fates = [catch_up.take(booking(f"r{n}", dp_rank=9), 0.0) for n in range(3)]
    assert fates == [Fate.WAITING, Fate.WAITING, Fate.NOT_REGISTERED]
    for n in range(3):
        here.hear(event(EventKind.FREE, f"ended{n}"))
    assert catch_up.take(booking("ended0"), 0.0) is Fate.BOOKED  # the oldest was forgotten
    assert catch_up.take(booking("ended2"), 0.0) is Fate.ENDED


def test_what_an_owner_no_longer_lists_has_ended_and_nothing_else() -> None:
    owner, here = Replica(PEER), Replica(HERE)
    for request_id in ("lives", "past its prefill", "ended"):
        owner.add(request_id)
    for told in owner.published:
        here.hear(told)
    here.hear(event(EventKind.ADD, "of a third", router_id=THIRD))
    here.add("ours")
    here.now = 5.0
    here.hear(event(EventKind.ADD, "heard since"))
    owner.complete("past its prefill")
    owner.free("ended")
    told_now = list(ended_meanwhile([here.ledger], PEER, owner.snapshot(), asked_at=5.0))
    events = [said for said in told_now if said is not None]
    assert len(told_now) == len(here.slots.reservations) == 6
    assert [(said.kind, said.booking.request_id) for said in events] == [
        (EventKind.PREFILL_COMPLETE, "past its prefill"),
        (EventKind.FREE, "ended"),
    ]
    assert [here.hear(said) for said in events] == [Verdict.APPLIED] * 2


@given(st.integers(0, 2**32), st.integers(5, 80))
def test_a_late_replica_agrees_with_its_peers_in_the_end(seed: int, steps: int) -> None:
    """Two peers go on while a third starts: events, snapshot and registration come in any order."""
    rng = random.Random(seed)
    first, second = Replica(PEER), Replica(THIRD)
    peers = (first, second)
    delivered = [0, 0]
    live: list[str] = []

    def act() -> None:
        at = rng.randrange(2)
        replica, choice = peers[at], rng.random()
        if choice < 0.4:
            live.append(f"{at}-{len(live)}")
            replica.add(live[-1], rng.randrange(2))
        elif choice < 0.6 and live:
            request_id = rng.choice(live)  # calls stay with the replica that admitted
            peers[at := int(request_id[0])].complete(request_id)
        elif choice < 0.8 and live:
            request_id = rng.choice(live)
            peers[at := int(request_id[0])].free(request_id)
        told = peers[at].published
        for said in told[delivered[at] :]:  # the peers hear each other at once
            peers[1 - at].hear(said)
        delivered[at] = len(told)

    for _ in range(rng.randrange(steps)):
        act()
    late, catch_up = starting(ranks=rng.choice((0, 1, 2)))
    heard = [len(peer.published) for peer in peers]  # subscribed from here on

    def hear_some() -> None:
        for at, peer in enumerate(peers):
            upto = rng.randint(heard[at], len(peer.published))
            for told in peer.published[heard[at] : upto]:
                late.hear(told)
            heard[at] = upto

    for _ in range(rng.randrange(steps)):
        act()
        hear_some()
    for taken in rng.choice(peers).snapshot():
        if rng.random() < 0.5:
            act()
            hear_some()
        catch_up.take(taken, 0.0)
    catch_up.snapshot_is_in()
    for _ in range(rng.randrange(steps)):
        act()
        hear_some()
        if rng.random() < 0.2:
            late.register(rng.randint(1, 2))
        catch_up.admit_waiting(0.0, 3)
    late.register(2)
    while catch_up.admit_waiting(0.0, 3):
        pass
    for at, peer in enumerate(peers):
        for told in peer.published[heard[at] :]:
            late.hear(told)
    catch_up.admit_waiting(0.0, 100)
    assert set(late.slots.reservations) == set(first.slots.reservations)
    assert late.loads() == first.loads() == second.loads()


@given(st.integers(0, 2**32), st.integers(5, 60))
def test_a_replica_that_missed_events_agrees_after_it_asked(seed: int, steps: int) -> None:
    """Events are lost and late; it asks now and then, the last time after it heard of all gaps."""
    rng = random.Random(seed)
    owner = Replica(PEER)
    here, catch_up = starting()
    on_the_way: list[ReplicaEvent] = []
    live: list[str] = []
    told = 0

    def act(loss: float) -> None:
        nonlocal told
        here.now = owner.now = owner.now + 1.0
        choice = rng.random()
        if choice < 0.5 or not live:
            live.append(f"r{told}")
            owner.add(live[-1], rng.randrange(2))
        elif choice < 0.7:
            owner.complete(rng.choice(live))
        else:
            owner.free(live.pop(rng.randrange(len(live))))
        on_the_way.extend(said for said in owner.published[told:] if rng.random() >= loss)
        told = len(owner.published)

    def go_on(loss: float) -> None:
        for _ in range(rng.randrange(4)):
            act(loss)
            for _ in range(rng.randint(0, len(on_the_way))):
                here.hear(on_the_way.pop(0))

    def ask(loss: float) -> None:
        catch_up.begin_again(here.now)
        go_on(loss)
        here.now = owner.now = owner.now + 1.0
        asked_at, snapshot = here.now, owner.snapshot()
        go_on(loss)
        for said in ended_meanwhile([here.ledger], PEER, snapshot, asked_at):
            if said is not None:
                here.hear(said)
            if rng.random() < 0.2:
                go_on(loss)
        for taken in snapshot:
            catch_up.take(taken, here.now)
            if rng.random() < 0.2:
                go_on(loss)
        catch_up.snapshot_is_in()

    for _ in range(steps):
        go_on(0.3)
        if rng.random() < 0.1:
            ask(0.3)
    while on_the_way:
        here.hear(on_the_way.pop(0))
    go_on(0.0)
    ask(0.0)
    go_on(0.0)
    while on_the_way:
        here.hear(on_the_way.pop(0))
    assert set(here.slots.reservations) == set(owner.slots.reservations)
    assert here.loads() == owner.loads()


def test_a_booking_that_was_ended_and_booked_elsewhere_unheard_moves() -> None:
    owner = Replica(PEER)
    here, catch_up = starting()
    owner.add("r", 0)
    here.hear(owner.published[0])
    owner.free("r")
    owner.add("r", 1)
    here.now = 5.0
    catch_up.begin_again(here.now)
    for said in ended_meanwhile([here.ledger], PEER, owner.snapshot(), asked_at=5.0):
        assert said is not None
        here.hear(said)
    for taken in owner.snapshot():
        catch_up.take(taken, here.now)
    assert here.loads() == owner.loads() == {0: IDLE, 1: (48, 3, 1)}
