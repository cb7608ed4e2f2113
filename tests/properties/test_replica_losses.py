"""Two replicas through a wire that duplicates, reorders and drops a tenth of everything.

Best effort is allowed to diverge, never to count below zero or to keep anything for ever. The clock
is virtual.
"""

import random
import struct

import pytest

from lean_selector.core.load.shapes import WorkerRow
from lean_selector.core.replication.events import ReplicaApplier, ReplicaEvents, Verdict
from lean_selector.core.replication.ledger import REPLICA_GRACE_S, RESERVATION_EXPIRY_S
from lean_selector.core.replication.shapes import ReplicaEvent
from lean_selector.core.trackers import Tracker, Trackers

LIFECYCLES = 2_000
LIVE = 50
FAULTS = 0.1
SCOPE = ("m", "t")


class Replica:
    """Trackers, their applier, and the bad wire that leads to them."""

    def __init__(self, router_id: int, rng: random.Random) -> None:
        self._rng = rng
        self.published: list[ReplicaEvent] = []
        self.trackers = Trackers(ReplicaEvents(router_id, self.published.append))
        self.trackers.register(WorkerRow(7, *SCOPE, 16, 0, 2))
        self.applier = ReplicaApplier(router_id, self.trackers.lookup)
        self.wire: list[tuple[float, ReplicaEvent]] = []  # arrival, event
        self.dropped = 0

    def send(self, events: list[ReplicaEvent], now: float) -> None:
        for event in events:
            if self._rng.random() < FAULTS:
                self.dropped += 1
                continue
            copies = 2 if self._rng.random() < FAULTS else 1
            for _ in range(copies):
                late_s = self._rng.random() * 0.5 if self._rng.random() < FAULTS else 0.0
                self.wire.append((now + late_s, event))

    def receive(self, now: float) -> None:
        arrived = [event for at, event in self.wire if at <= now]
        self.wire = [(at, event) for at, event in self.wire if at > now]
        for event in arrived:
            self.applier.apply(event, now)

    def tracker(self) -> Tracker:
        tracker = self.trackers.lookup(*SCOPE)
        assert tracker is not None
        return tracker

    def check(self, now: float) -> None:
        """The sums are those of what is held; nothing is below zero."""
        slots = self.tracker().slots
        for rank in slots.ranks.values():
            held = [slots.reservations[request_id] for request_id in rank.reservations]
            assert rank.active_prefill_tokens == sum(r.prefill_tokens for r in held) >= 0
            assert rank.active_decode_blocks >= 0
            assert (rank.active_decode_blocks == 0) == (not held)
            assert rank.prefill_tokens_at(now) >= 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_bad_wire_leaves_no_negative_counter_and_no_leak_after_expiry(seed: int) -> None:
    rng = random.Random(seed)
    replicas = [Replica(1, rng), Replica(2, rng)]
    live: list[tuple[int, str, bool]] = []
    begun, now = [0, 0], 0.0
    while min(begun) < LIFECYCLES or live:
        now += 0.001
        at = rng.randrange(2)
        if begun[at] < LIFECYCLES and len(live) < LIVE and rng.random() < 0.5:
            request_id = f"{at}-{begun[at]}"
            start = rng.randrange(20)
            hashes = struct.pack("<4q", *(start * 10 + n for n in range(4)))
            replicas[at].trackers.add(*SCOPE, request_id, 7, rng.randrange(2), hashes, 64, now)
            begun[at] += 1
            live.append((at, request_id, False))
        elif live:
            index = rng.randrange(len(live))
            at, request_id, completed = live.pop(index)
            if completed:
                replicas[at].trackers.free(*SCOPE, request_id, now)
            else:
                replicas[at].trackers.prefill_complete(*SCOPE, request_id, now)
                live.append((at, request_id, True))
        for sender, receiver in (replicas, replicas[::-1]):
            receiver.send(sender.published, now)
            sender.published.clear()
            receiver.receive(now)
        if sum(begun) % 50 == 0:
            for replica in replicas:
                replica.check(now)
    for replica in replicas:
        replica.receive(now + 1.0)
        replica.check(now)
        slots = replica.tracker().slots
        assert all(held.is_replica for held in slots.reservations.values())
        assert slots.reservations, "a tenth of the ends was lost: copies must be left"
        told = zip(*replica.applier.counts, strict=True)
        counts = {verdict: sum(kinds) for verdict, kinds in zip(Verdict, told, strict=True)}
        assert counts[Verdict.DUPLICATE] > 0
        assert counts[Verdict.UNKNOWN_REQUEST] > 0
        assert counts[Verdict.FREED_EARLY] > 0
        after = now + RESERVATION_EXPIRY_S + REPLICA_GRACE_S + 2.0
        replica.trackers.expire(after, 2 * LIFECYCLES)
        assert not slots.reservations
        assert [row.active_prefill_tokens for row in replica.trackers.loads(None, None, after)] == [
            0,
            0,
        ]
        assert all(rank.active_decode_blocks == 0 for rank in slots.ranks.values())
