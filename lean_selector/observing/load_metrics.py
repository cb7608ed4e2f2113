"""Metrics that the selector and the slot tracker share: loads, reservations, replica events.

Reads the counters that `core` keeps, when a scrape asks. Iterators run across slices, so what they
walk is copied first.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import (
    ReplicaApplier,
    ReplicaEvents,
    ReplicaSequences,
    Verdict,
)
from lean_selector.core.replication.shapes import EventKind
from lean_selector.core.trackers import Trackers
from lean_selector.observing.metrics import AnyFamily, Family, Sample, escaped, labels

Families = list[AnyFamily]


class LoadScope(Protocol):
    """One model and tenant, as far as loads go."""

    @property
    def model_name(self) -> str: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def slots(self) -> Slots: ...


class PeerState(Protocol):
    @property
    def state(self) -> str: ...


class ReplicaCounts(Protocol):
    """The replica sockets, as far as counts go."""

    @property
    def waiting(self) -> int: ...
    @property
    def overflows(self) -> int: ...
    @property
    def undecodable(self) -> int: ...
    @property
    def too_big(self) -> int: ...
    @property
    def heard(self) -> ReplicaSequences: ...

    def peer_states(self) -> Sequence[PeerState]: ...


def scope_labels(scope: LoadScope, **more: object) -> str:
    return labels(model=scope.model_name, tenant_id=scope.tenant_id, **more)


def load_families(scopes: Callable[[], Sequence[LoadScope]], now: Callable[[], float]) -> Families:
    """What is active, per model and per rank. `now` is monotonic seconds."""

    def per_rank(value: Callable[[RankLoad], int]) -> Callable[[], Iterator[Sample]]:
        def samples() -> Iterator[Sample]:
            for scope in scopes():
                start = scope_labels(scope)[:-1]
                for (worker_id, dp_rank), load in sorted_ranks(scope.slots):
                    yield f'{start},worker_id="{worker_id}",dp_rank="{dp_rank}"}}', value(load)

        return samples

    def live() -> Iterator[Sample]:
        for scope in scopes():
            local, copies = scope.slots.live_counts()
            yield scope_labels(scope, origin="local"), local
            yield scope_labels(scope, origin="replica"), copies

    def ended() -> Iterator[Sample]:
        for scope in scopes():
            slots = scope.slots
            yield scope_labels(scope, reason="freed"), slots.freed
            yield scope_labels(scope, reason="expired"), slots.expired
            yield scope_labels(scope, reason="worker_removed"), slots.dropped

    return [
        Family(
            "lean_selector_worker_active_prefill_tokens",
            "gauge",
            "Prompt tokens that a rank still has to prefill, expected progress taken off.",
            per_rank(lambda load: load.prefill_tokens_at(now())),
        ),
        Family(
            "lean_selector_worker_active_decode_blocks",
            "gauge",
            "KV blocks that the active requests of a rank hold.",
            per_rank(lambda load: load.active_decode_blocks),
        ),
        Family(
            "lean_selector_worker_active_requests",
            "gauge",
            "Active requests of a rank.",
            per_rank(lambda load: load.active_requests),
        ),
        Family(
            "lean_selector_reservations",
            "gauge",
            "Live reservations: admitted here (local), or heard of from a peer (replica).",
            live,
        ),
        Family(
            "lean_selector_reservations_booked_total",
            "counter",
            "Reservations admitted here.",
            lambda: ((scope_labels(scope), scope.slots.booked) for scope in scopes()),
        ),
        Family(
            "lean_selector_reservations_ended_total",
            "counter",
            "Reservations admitted here that ended, by reason.",
            ended,
        ),
    ]


def tracker_families(trackers: Trackers, now: Callable[[], float] = time.monotonic) -> Families:
    """All that the slot tracker knows."""
    return [
        Family(
            "lean_selector_workers",
            "gauge",
            "Registered workers by lifecycle.",
            lambda: (
                (scope_labels(each, lifecycle="registered"), len(each.workers))
                for each in trackers.in_order()
            ),
        ),
        *load_families(trackers.in_order, now),
    ]


def sorted_ranks(slots: Slots) -> list[tuple[tuple[int, int], RankLoad]]:
    return sorted(slots.ranks.items(), key=lambda item: item[0])


class Replicas(Protocol):
    """The replica plane, as far as counts go."""

    @property
    def sync(self) -> ReplicaCounts: ...
    @property
    def applier(self) -> ReplicaApplier: ...
    @property
    def events(self) -> ReplicaEvents: ...


def replica_families(plane: Replicas | None) -> Families:
    """What replicas told each other; nothing while replica sync is off."""
    if plane is None:
        return []
    sync, applier, events = plane.sync, plane.applier, plane.events

    def exchanged() -> Iterator[Sample]:
        for kind in EventKind:
            name = kind.name.lower()
            yield labels(direction="out", kind=name, result="published"), events.counts[kind]
            for verdict in Verdict:
                result = verdict.name.lower()
                count = applier.counts[kind][verdict]
                yield labels(direction="in", kind=name, result=result), count
        for result, count in (("undecodable", sync.undecodable), ("too_big", sync.too_big)):
            yield labels(direction="in", kind="unknown", result=result), count

    def peers() -> Iterator[Sample]:
        by_state = Counter(peer.state for peer in sync.peer_states())
        for state in ("resolving", "connecting", "connected", "disconnected"):
            yield f'{{state="{escaped(state)}"}}', by_state[state]

    return [
        Family(
            "lean_selector_replica_events_total",
            "counter",
            "Replica events by direction, kind and what became of them.",
            exchanged,
        ),
        Family(
            "lean_selector_replica_send_overflows_total",
            "counter",
            "Times that a peer's send queue was found full.",
            lambda: [("", sync.overflows)],
        ),
        Family(
            "lean_selector_replica_outbox_events",
            "gauge",
            "Events that wait to be published to peers.",
            lambda: [("", sync.waiting)],
        ),
        Family(
            "lean_selector_replica_missed_events_total",
            "counter",
            "Events that peers of ours published and that never arrived here.",
            lambda: [("", sync.heard.missed)],
        ),
        Family("lean_selector_replica_peers", "gauge", "Peers by connection state.", peers),
    ]
