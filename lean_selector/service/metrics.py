"""The metrics that both services have: a table for each subject, with the name, the source and the
meaning of each.

Read when a scrape asks, from counters that other modules keep. Iterators run across slices, so what
they walk is copied first. Labels are registered models and workers, never an id that a client
chose.
"""

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import (
    ReplicaApplier,
    ReplicaEvents,
    ReplicaSequences,
    Verdict,
)
from lean_selector.core.replication.shapes import EventKind
from lean_selector.http.connections import Connections
from lean_selector.service.exposition import (
    LATENCY_BOUNDS_S,
    Families,
    HistogramFamily,
    LoopLag,
    RouteMeter,
    Sample,
    by,
    each,
    labels,
    table,
    table_of,
)
from lean_selector.tasks import failures

WORKERS: Final = "Registered workers by lifecycle."


class LoadScope(Protocol):
    """The load state of one model and tenant."""

    model_name: str
    tenant_id: str
    slots: Slots


def scope_labels(scope: LoadScope, **more: object) -> str:
    return labels(model=scope.model_name, tenant_id=scope.tenant_id, **more)


# -- any service ----------------------------------------------------------------------------------


def http_families(meters: Iterable[RouteMeter]) -> Families:
    meters = list(meters)

    def answers() -> Iterator[Sample]:
        for meter in meters:
            yield from each(meter.label, "status", meter.by_status())

    return [
        *table({
            "http_requests_total": (answers,
                "Answers by method, route and status; 499: the client left before its answer."),
        }),
        HistogramFamily(
            "lean_selector_http_request_duration_seconds",
            "From the complete request to its answer, time in the queue included.",
            lambda: (
                (meter.label, LATENCY_BOUNDS_S, meter.buckets(), meter.seconds) for meter in meters
            ),
        ),
    ]  # fmt: skip


def process_families(
    service: str,
    version: str,
    lag: LoopLag,
    suppressed_log_lines: Callable[[], int],
    dropped_log_lines: Callable[[], int],
) -> Families:
    build = labels(service=service, version=version, python=platform.python_version())
    histogram = lag.histogram
    return [
        HistogramFamily(
            "lean_selector_loop_lag_seconds",
            "How late the event loop gets to what is due, sampled 20 times a second.",
            lambda: [("", histogram.bounds, histogram.buckets, histogram.total)],
        ),
        *table({
            "build_info": (lambda: [(build, 1)], "Always 1."),
            "log_lines_suppressed_total": (suppressed_log_lines,
                "Log lines that a rate limit kept back."),
            "log_lines_dropped_total": (dropped_log_lines,
                "Log lines for which there was no room, because stderr is not read."),
            "task_failures_total": (lambda: by("task", dict(sorted(failures.items()))),
                "What failed beside the requests, each with a log line: tasks, callbacks,"
                " threads."),
        }),
    ]  # fmt: skip


def connection_families(connections: Connections) -> Families:
    """How many HTTP connections there are, what they hold, and what was refused (D27)."""
    tls = connections.tls

    def reloads() -> list[Sample]:
        counts = {"ok": tls.reloads, "refused": tls.reload_failures}
        return by("outcome", counts) if tls.is_on else []

    return table({
        "http_connections": (lambda: len(connections.open), "Open HTTP connections."),
        "http_connections_accepted_total": (lambda: connections.accepted,
            "HTTP connections that were let in."),
        "http_connections_refused_total": (lambda: connections.refused,
            "HTTP connections refused with 503, because --max-connections were open."),
        "http_accept_failures_total": (lambda: connections.accept_failures,
            "Times that no connection could be accepted: no descriptor or no memory was left."),
        "http_held_bytes": (lambda: connections.held_bytes,
            "Bytes of requests that are being received, or wait behind another one."),
        "http_held_refused_total": (lambda: connections.bodies_refused,
            "Connections closed with 503 because all together held too many bytes."),
        "tls_handshakes_total": (lambda: tls.completed if tls.is_on else [],
            "TLS handshakes that ended well; nothing while TLS is off."),
        "tls_handshake_failures_total": (lambda: by("reason", tls.failures) if tls.is_on else [],
            "TLS handshakes that failed, by reason."),
        "tls_reloads_total": (reloads,
            "Times that the files of TLS were read again: used, or refused and the last ones"
            " kept."),
        "tls_certificate_not_after_seconds": (
            lambda: [] if tls.not_after is None else tls.not_after,
            "The last second of the certificate that clients are shown, since 1970."),
    })  # fmt: skip


# -- loads, reservations and replicas -------------------------------------------------------------


def load_families(scopes: Callable[[], Sequence[LoadScope]], now: Callable[[], float]) -> Families:
    """What is active, per model and per rank. `now` is monotonic seconds."""

    def ranks() -> Iterator[tuple[str, RankLoad]]:
        for scope in scopes():
            start = scope_labels(scope)[:-1]
            for (worker_id, dp_rank), load in sorted(scope.slots.ranks.items(), key=_key_of):
                yield f'{start},worker_id="{worker_id}",dp_rank="{dp_rank}"}}', load

    def live() -> Iterator[Sample]:
        for scope in scopes():
            local, copies = scope.slots.live_counts()
            yield from each(scope_labels(scope), "origin", {"local": local, "replica": copies})

    def ended() -> Iterator[Sample]:
        for scope in scopes():
            slots = scope.slots
            counts = {
                "freed": slots.freed,
                "expired": slots.expired,
                "worker_removed": slots.dropped,
            }
            yield from each(scope_labels(scope), "reason", counts)

    return [
        table_of(ranks, {
            "worker_active_prefill_tokens": (lambda load: load.prefill_tokens_at(now()),
                "Prompt tokens that a rank still has to prefill, expected progress taken off."),
            "worker_active_decode_blocks": (lambda load: load.active_decode_blocks,
                "KV blocks that the active requests of a rank hold."),
            "worker_active_requests": (lambda load: load.active_requests,
                "Active requests of a rank."),
        }),
        *table({
            "reservations": (live,
                "Live reservations: admitted here (local), or heard of from a peer (replica)."),
            "reservations_booked_total": (
                lambda: [(scope_labels(scope), scope.slots.booked) for scope in scopes()],
                "Reservations admitted here."),
            "reservations_ended_total": (ended,
                "Reservations admitted here that ended, by reason."),
        }),
    ]  # fmt: skip


def _key_of(rank: tuple[tuple[int, int], RankLoad]) -> tuple[int, int]:
    return rank[0]


class PeerState(Protocol):
    @property
    def state(self) -> str: ...


class ReplicaCounts(Protocol):
    """The counters of the replica sockets."""

    @property
    def waiting(self) -> int: ...

    overflows: int
    undecodable: int
    too_big: int
    heard: ReplicaSequences

    def peer_states(self) -> Sequence[PeerState]: ...


class Replicas(Protocol):
    """The counters of replica synchronization."""

    @property
    def sync(self) -> ReplicaCounts: ...
    @property
    def applier(self) -> ReplicaApplier: ...
    @property
    def events(self) -> ReplicaEvents: ...


def replica_families(plane: Replicas | None) -> Families:
    """Events sent to and received from replicas; nothing while replica sync is off."""
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

    def peers() -> list[Sample]:
        states = Counter(peer.state for peer in sync.peer_states())
        known = ("resolving", "connecting", "connected", "disconnected")
        return by("state", {state: states[state] for state in known})

    return table({
        "replica_events_total": (exchanged,
            "Replica events by direction, kind and what became of them."),
        "replica_send_overflows_total": (lambda: sync.overflows,
            "Times that a peer's send queue was found full."),
        "replica_outbox_events": (lambda: sync.waiting,
            "Events that wait to be published to peers."),
        "replica_missed_events_total": (lambda: sync.heard.missed,
            "Events that peers of ours published and that never arrived here."),
        "replica_peers": (peers, "Peers by connection state."),
    })  # fmt: skip


# -- what is not always there ---------------------------------------------------------------------


class Discovery(Protocol):
    """One discovery."""

    @property
    def name(self) -> str: ...

    error: str | None
    count: int | None
    failures: int


class Finding(Protocol):
    """All discoveries."""

    @property
    def sightings(self) -> Sequence[tuple[str, Discovery]]: ...

    def worker_states(self) -> Mapping[str, int]: ...

    def changes(self) -> Mapping[str, int]: ...


def discovery_families(finding: Finding | None) -> Families:
    """Nothing without discovery. As many series as there are flags."""
    if finding is None:
        return []

    def sightings() -> list[tuple[str, Discovery]]:
        return [(labels(discovery=one.name, finds=finds), one) for finds, one in finding.sightings]

    return [
        table_of(sightings, {
            "discovery_failing": (lambda one: int(one.error is not None),
                "1 while a discovery cannot look: what it found before holds."),
            "discovery_found": (lambda one: one.count or 0,
                "Endpoints that a discovery found last."),
            "discovery_failures_total": (lambda one: one.failures,
                "Times that a discovery failed."),
        }),
        *table({
            "discovered_workers": (lambda: by("state", finding.worker_states()),
                "Workers by discovery, by state."),
            "discovery_changes_total": (lambda: by("change", finding.changes()),
                "Registrations (new or changed) and removals by discovery."),
        }),
    ]  # fmt: skip


class Kept(Protocol):
    """What keeps a state directory."""

    @property
    def fault(self) -> str | None: ...
    @property
    def writes(self) -> dict[str, int]: ...
    @property
    def failures(self) -> dict[str, int]: ...

    restored: int
    dropped: int

    def size(self, name: str) -> int: ...

    def age_s(self) -> float: ...

    def spent_s(self) -> float: ...


def state_families(kept: Kept | None) -> Families:
    """How far the state directory is behind; nothing without one."""
    if kept is None:
        return []
    return table({
        "state_failing": (lambda: int(kept.fault is not None),
            "1 while the state directory cannot be written."),
        "state_age_seconds": (kept.age_s,
            "How old the live reservations on disk are: 0 while nothing has changed since."),
        "state_writes_total": (lambda: by("file", kept.writes),
            "Files that were written, by file."),
        "state_write_failures_total": (lambda: by("file", kept.failures),
            "Files that could not be written, by file."),
        "state_file_bytes": (lambda: by("file", {name: kept.size(name) for name in kept.writes}),
            "The file that was written last, by file."),
        "state_cpu_seconds_total": (kept.spent_s,
            "Processor time that keeping state took, of the loop and of its threads."),
        "state_restored_reservations": (
            lambda: by("result", {"live": kept.restored, "dropped": kept.dropped}),
            "Reservations on disk at the start, by what became of them."),
    })  # fmt: skip


def prompt_families(unknown: Mapping[str, int]) -> Families:
    """`unknown` counts prompts of raw requests by a word of a few."""
    return table({
        "unknown_prompts_total": (lambda: by("reason", dict(sorted(unknown.items()))),
            "Prompts of raw requests of which not all blocks are known, by reason."),
    })  # fmt: skip
