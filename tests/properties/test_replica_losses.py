"""Two replicas through a wire that duplicates, delays and drops a tenth of everything.

Best effort is allowed to diverge, never to count below zero or to keep anything for ever. The clock
is virtual.
"""

import random

import pytest

from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import Verdict
from lean_selector.core.replication.shapes import ReplicaEvent
from tests.support.one_partition import COPIES_EXPIRE_S, IDLE, Replica

LIFECYCLES = 2_000
LIVE = 50
FAULTS = 0.1


class Wire:
    """The bad wire to one replica."""

    def __init__(self, reader: Replica, rng: random.Random) -> None:
        self.reader, self.rng = reader, rng
        self.under_way: list[tuple[float, ReplicaEvent]] = []  # arrival, event

    def send(self, events: list[ReplicaEvent], now: float) -> None:
        for event in events:
            if self.rng.random() < FAULTS:
                continue
            for _ in range(2 if self.rng.random() < FAULTS else 1):
                late_s = self.rng.random() * 0.5 if self.rng.random() < FAULTS else 0.0
                self.under_way.append((now + late_s, event))

    def deliver(self, now: float) -> None:
        arrived = [event for at, event in self.under_way if at <= now]
        self.under_way = [(at, event) for at, event in self.under_way if at > now]
        for event in arrived:
            self.reader.hear(event, now)


def check(slots: Slots) -> None:
    """The sums are those of what is held; nothing is below zero."""
    for rank in slots.ranks.values():
        held = [slots.reservations[request_id] for request_id in rank.reservations]
        assert rank.active_prefill_tokens == sum(r.prefill_tokens for r in held) >= 0
        assert rank.active_decode_blocks >= 0
        assert (rank.active_decode_blocks == 0) == (not held)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_bad_wire_leaves_no_negative_counter_and_no_leak_after_expiry(seed: int) -> None:
    rng = random.Random(seed)
    replicas = [Replica(1), Replica(2)]
    wires = [Wire(replica, rng) for replica in replicas]
    live: list[tuple[int, str, bool]] = []
    begun, now = [0, 0], 0.0
    while min(begun) < LIFECYCLES or live:
        now += 0.001
        at = rng.randrange(2)
        if begun[at] < LIFECYCLES and len(live) < LIVE and rng.random() < 0.5:
            request_id = f"{at}-{begun[at]}"
            replicas[at].add(request_id, rng.randrange(2), 64)
            begun[at] += 1
            live.append((at, request_id, False))
        elif live:
            at, request_id, completed = live.pop(rng.randrange(len(live)))
            if completed:
                replicas[at].free(request_id)
            else:
                replicas[at].complete(request_id)
                live.append((at, request_id, True))
        for sender, wire in zip(replicas, reversed(wires), strict=True):
            wire.send(sender.published, now)
            sender.published.clear()
            wire.deliver(now)
        if sum(begun) % 50 == 0:
            for replica in replicas:
                check(replica.slots)
    for replica, wire in zip(replicas, wires, strict=True):
        wire.deliver(now + 1.0)
        check(replica.slots)
        assert all(held.is_replica for held in replica.slots.reservations.values())
        assert replica.slots.reservations, "a tenth of the ends was lost: copies must be left"
        told = zip(*replica.applier.counts, strict=True)
        counts = {verdict: sum(kinds) for verdict, kinds in zip(Verdict, told, strict=True)}
        assert counts[Verdict.DUPLICATE] > 0
        assert counts[Verdict.UNKNOWN_REQUEST] > 0
        assert counts[Verdict.FREED_EARLY] > 0
        replica.expire(now + COPIES_EXPIRE_S + 2.0)
        assert not replica.slots.reservations
        assert replica.loads() == {0: IDLE, 1: IDLE}
