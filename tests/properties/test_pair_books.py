"""The books of pairs at two replicas, whatever happens in whatever order: they end even."""

import contextlib
import random
from collections import deque

import hypothesis.strategies as st
from hypothesis import given, settings

from lean_selector.core.errors import SelectorError
from lean_selector.core.load.shapes import Reservation
from lean_selector.core.replication.events import ReplicaApplier, ReplicaEvents, Verdict
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.core.selection.reservations import LEG
from tests.support.driven_selector import DrivenSelector

ROLES = {1: "prefill", 2: "prefill", 3: "decode", 4: "decode", 5: "both"}
IDS = [f"r{number}" for number in range(6)]
Loads = dict[tuple[int, int], tuple[int, int, int]]


class Replica:
    """A selector, and what it has to tell the other one."""

    def __init__(self, number: int, seed: int) -> None:
        self.driven = DrivenSelector(reservation_expiry_s=50.0)
        self.selector = self.driven.selector
        self.selector._rng = random.Random(seed + number)
        self.out: deque[ReplicaEvent] = deque()
        self.selector.ledgers.events = ReplicaEvents(number, self.out.append)
        self.applier = ReplicaApplier(number, self.selector.scheduling_partition)
        self.register()

    def register(self) -> None:
        for worker_id, role in ROLES.items():
            self.driven.register(worker_id, worker_role=role)

    def hear(self, event: ReplicaEvent, now: float) -> None:
        """As app/replication.py does."""
        verdict = self.applier.apply(event, now)
        if verdict in (Verdict.APPLIED, Verdict.UNKNOWN_REQUEST):
            names = event.model_name, event.tenant_id, event.spec.request_id
            ended_by = None if event.kind is EventKind.ADD else event.router_id
            self.selector.load_changed(*names, now, ended_by=ended_by)

    def live(self) -> dict[str, Reservation]:
        return self.driven.partition.slots.reservations

    def loads(self) -> Loads:
        (loads,) = self.driven.loads().values()
        return loads


class Play:
    def __init__(self, seed: int, is_late: bool) -> None:
        self.dice = random.Random(seed)
        self.replicas = [Replica(number, seed) for number in (1, 2)]
        self.is_late = is_late
        self.now = 0.0

    def deliver(self, most: int = 1000) -> None:
        for replica, other in (self.replicas, self.replicas[::-1]):
            for _ in range(min(most, len(replica.out))):
                other.hear(replica.out.popleft(), self.now)

    def settle(self) -> None:
        while any(replica.out for replica in self.replicas):
            self.deliver()

    def step(self) -> None:
        dice, replica = self.dice, self.dice.choice(self.replicas)
        name, turn = dice.choice(IDS), dice.random()
        reservations = replica.selector.reservations
        self.now += 6.0  # what ended is not remembered as early when its id is used again
        try:
            if turn < 0.45:
                hashes = [dice.randrange(3) for _ in range(dice.randrange(5))]
                replica.driven.now = self.now
                how = dice.choice(["auto", "always", "never"])
                replica.driven.book(name, hashes=hashes, isl_tokens=16, disaggregate=how)
            elif turn < 0.6:
                reservations.prefill_complete(name + dice.choice(["", LEG]), self.now)
            elif turn < 0.75:
                outcome = dice.choice(["ok", "failed", None])
                reservations.end(
                    name + dice.choice(["", LEG]), outcome, 4, self.now, prefill_outcome=outcome
                )
            elif turn < 0.85:
                reservations.free(name + dice.choice(["", LEG]), self.now)
            elif turn < 0.9:
                for each in self.replicas:
                    each.selector.reservations.expire(self.now, 1000)
            else:
                worker_id = dice.choice(list(ROLES))
                for each in self.replicas:
                    each.driven.remove(worker_id)
                for each in self.replicas:
                    each.register()
        except SelectorError:
            pass
        if self.is_late:
            self.deliver(dice.randrange(3))
        else:
            self.settle()

    def check_pairs(self) -> None:
        """A live leg is on another worker, which is not one that only decodes."""
        for replica in self.replicas:
            live = replica.live()
            for name, held in live.items():
                worker_id = held.rank_load.worker_id
                if name.endswith(LEG):
                    assert ROLES[worker_id] != "decode"
                elif held.prefills_on is not None:
                    assert held.prefills_on.worker_id != worker_id

    def end(self) -> None:
        for replica in self.replicas:
            for name in IDS:
                for each in (name, name + LEG):
                    with contextlib.suppress(SelectorError):
                        replica.selector.reservations.free(each, self.now)
                    self.settle()


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.booleans())
def test_the_books_of_pairs_end_even(seed: int, is_late: bool) -> None:
    """While events are heard at once, both replicas have the same loads after each step."""
    play = Play(seed, is_late)
    for _ in range(80):
        play.step()
        if not is_late:
            first, second = (replica.loads() for replica in play.replicas)
            assert first == second
            play.check_pairs()
    play.settle()
    play.end()
    for replica in play.replicas:
        assert replica.live() == {}
        assert set(replica.loads().values()) == {(0, 0, 0)}
        assert len(replica.selector.reservations) == 0


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_what_a_peer_ends_that_knows_no_legs_ends_them_too(seed: int) -> None:
    """And our replica that booked the leg tells all that it has ended."""
    dice = random.Random(seed)
    ours = Replica(1, seed)
    for name in IDS:
        ours.driven.book(name, hashes=[1, 2], isl_tokens=16, disaggregate="always")
    heard, gone = [event for event in ours.out if event.kind is EventKind.ADD], set[str]()
    assert len(heard) == 2 * len(IDS)
    ours.out.clear()
    for event in heard:
        if not event.spec.request_id.endswith(LEG) and dice.random() < 0.5:
            kind = dice.choice([EventKind.PREFILL_COMPLETE, EventKind.FREE])
            told = ReplicaEvent(kind, "default", "default", event.block_size, 9, event.spec)
            ours.hear(told, 1.0)
            gone.add(event.spec.request_id + LEG)
    assert {event.spec.request_id for event in ours.out} == gone
    assert {event.kind for event in ours.out} <= {EventKind.FREE}
    by_id = {event.spec.request_id: event.spec for event in heard}
    assert all(event.spec == by_id[event.spec.request_id] for event in ours.out)
    assert not gone & ours.live().keys()
    assert {name for name in ours.live() if name.endswith(LEG)} == {
        name + LEG for name in IDS
    } - gone
