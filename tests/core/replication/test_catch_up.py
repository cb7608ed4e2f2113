"""A replica that starts takes over what is live elsewhere, each id once, whatever comes between."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.replication import catch_up as module
from lean_selector.core.replication.catch_up import CatchUp, Fate, ended_meanwhile
from lean_selector.core.replication.events import Verdict
from lean_selector.core.replication.shapes import EventKind, LiveReservation, ReplicaEvent
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
from tests.support.reservations import book, changed


def starting(ranks: int = 2) -> tuple[Replica, CatchUp]:
    replica = Replica(HERE, ranks, catches_up=True)
    assert replica.catch_up is not None
    replica.catch_up.begin()
    return replica, replica.catch_up


def spec(request_id: str = "r", **changes: object) -> LiveReservation:
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
    assert (copy.rank_load.key, copy.prefill_tokens, copy.prefill_done) == ((7, 1), 48, False)
    expected = copy.spec.lora_name, copy.spec.expected_output_tokens
    assert (*expected, copy.touched_at) == ("a", 9, 5.0)
    assert here.slots.sequence_hashes_of(copy) == PROMPT
    assert here.published == []


@pytest.mark.parametrize(
    ("changes", "fate"),
    [
        ({"block_size": 32}, Fate.UNFIT),
        ({"dp_rank": 2}, Fate.UNFIT),
        ({"model_name": "other"}, Fate.UNFIT),
        ({"router_id": HERE}, Fate.KNOWN),
        ({"touched_at": -COPIES_EXPIRE_S - 1.0}, Fate.KNOWN),
    ],
)
def test_what_does_not_fit_is_not_booked(changes: dict[str, Any], fate: Fate) -> None:
    here, catch_up = starting()
    assert catch_up.take(spec(**changes), 0.0) is fate
    assert catch_up.counts[fate] == sum(catch_up.counts) == 1
    assert not here.slots.reservations


def test_what_was_heard_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NOTED", 2)
    here, catch_up = starting()
    for n in range(3):
        here.hear(event(EventKind.FREE, f"ended{n}"))
    assert catch_up.take(spec("ended0"), 0.0) is Fate.BOOKED  # the oldest was forgotten
    assert catch_up.take(spec("ended2"), 0.0) is Fate.KNOWN


def test_what_is_live_already_or_unlisted_is_known() -> None:
    here, catch_up = starting()
    assert catch_up.take(spec("r"), 0.0) is Fate.BOOKED
    assert catch_up.take(spec("r"), 0.0) is Fate.KNOWN
    catch_up.end()
    here.hear(event(EventKind.FREE, "r"))
    assert catch_up.take(spec("r"), 0.0) is Fate.BOOKED  # its end was not noted


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
    assert [(said.kind, said.spec.request_id) for said in events] == [
        (EventKind.PREFILL_COMPLETE, "past its prefill"),
        (EventKind.FREE, "ended"),
    ]
    assert [here.hear(said) for said in events] == [Verdict.APPLIED] * 2


@given(st.integers(0, 2**32), st.integers(20, 100))
def test_replicas_whose_workers_flap_agree_once_each_has_asked(seed: int, steps: int) -> None:
    """Each replica has its own view of the worker, which goes and comes back at any time, also
    while it asks or before its first time. No event is lost, but each is heard late."""
    rng = random.Random(seed)
    replicas = [Replica(router_id, 0, catches_up=True) for router_id in (HERE, PEER, THIRD)]
    due = [True, True, True]
    heard = {(at, of): 0 for at in range(3) for of in range(3) if at != of}
    booked, flaps = 0, True

    def hear(at: int, of: int, upto: int) -> None:
        for told in replicas[of].published[heard[at, of] : upto]:
            replicas[at].hear(told)
        heard[at, of] = upto

    def step() -> None:
        nonlocal booked
        for replica in replicas:
            replica.now += 1.0
        at, choice = rng.randrange(3), rng.random()
        replica = replicas[at]
        ours = [held.request_id for held in replica.slots.by_touch() if not held.is_replica]
        if choice < 0.3:
            ranks = [dp_rank for _, dp_rank in replica.slots.ranks]
            if ranks:
                booked += 1
                replica.add(f"r{booked}", rng.choice(ranks))
        elif choice < 0.5 and ours:  # calls stay with the replica that admitted
            replica.complete(rng.choice(ours))
        elif choice < 0.65 and ours:
            replica.free(rng.choice(ours))
        elif choice < 0.7 and flaps:
            replica.unregister()
        elif choice < 0.8 and flaps:
            replica.register(rng.randint(1, 2))
            due[at] = True
        for at, of in rng.sample(list(heard), 3):
            hear(at, of, rng.randint(heard[at, of], len(replicas[of].published)))

    def go_on() -> None:
        for _ in range(rng.randrange(4)):
            step()

    def ask(at: int) -> None:
        here, catch_up = replicas[at], replicas[at].catch_up
        assert catch_up is not None
        catch_up.begin()
        due[at] = False
        go_on()
        for of in (each for each in range(3) if each != at):
            asked_at, snapshot = here.now, replicas[of].snapshot()
            router_id = replicas[of].router_id
            go_on()
            go_on()
            for said in ended_meanwhile([here.ledger], router_id, snapshot, asked_at):
                if said is not None:
                    here.hear(said)
            for taken in snapshot:
                if taken.router_id == router_id:
                    catch_up.take(taken, here.now)
                if rng.random() < 0.2:
                    step()
        catch_up.end()

    def ask_if_due() -> None:
        for at in rng.sample(range(3), 3):
            if due[at]:
                ask(at)

    for _ in range(steps):
        step()
        if rng.random() < 0.2:
            ask_if_due()
    flaps = False
    for at, replica in enumerate(replicas):
        if len(replica.slots.ranks) < 2:
            replica.register(2)
            due[at] = True
    ask_if_due()  # the last time; others have asked before and heard all since
    for at, of in heard:
        hear(at, of, len(replicas[of].published))
    first = replicas[0]
    for other in replicas[1:]:
        assert set(other.slots.reservations) == set(first.slots.reservations)
        assert other.loads() == first.loads()


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
        catch_up.begin()
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
        catch_up.end()

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
    catch_up.begin()
    for said in ended_meanwhile([here.ledger], PEER, owner.snapshot(), asked_at=5.0):
        assert said is not None
        here.hear(said)
    for taken in owner.snapshot():
        catch_up.take(taken, here.now)
    assert here.loads() == owner.loads() == {0: IDLE, 1: (48, 3, 1)}
