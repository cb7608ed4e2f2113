"""Metrics that both services have: tables with the name, source and meaning of each metric.

Metrics of optional parts are in the modules of `app/` that create these parts. A scrape is
answered in slices. Between two slices counters may change, so samples are made from copies of them.
Labels are registered models and workers, never ids that clients choose."""

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from lean_selector.api.gate import LATENCY_BOUNDS_S, RouteMeter
from lean_selector.api.logs import LogState
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.slots import Slots
from lean_selector.http.connections import Connections
from lean_selector.tasks import failures
from lean_selector.wire.exposition import (
    Families,
    Histogram,
    HistogramFamily,
    Sample,
    by,
    each,
    head,
    kind_of,
    labels,
    table,
    table_of,
)

WORKERS: Final = "Registered workers by lifecycle."


class LoadScope(Protocol):
    """A model and tenant, with the reservations and the load of their ranks."""

    model_name: str
    tenant_id: str
    slots: Slots


def scope_labels(scope: LoadScope, **more: object) -> str:
    return labels(model=scope.model_name, tenant_id=scope.tenant_id, **more)


# -- any service -----------------------------------------------------------------------------------


def http_families(meters: Iterable[RouteMeter]) -> Families:
    meters = list(meters)

    def answers() -> Iterator[Sample]:
        for meter in meters:
            yield from each(meter.label, "status", meter.by_status())

    return [
        *table({
            "http_requests_total": (answers,
                "Answers by method, route and status; 499: the client disconnected before its "
                "answer."),
        }),
        HistogramFamily(
            "lean_selector_http_request_duration_seconds",
            "From the complete request to its answer, including time in the queue.",
            lambda: (
                (meter.label, LATENCY_BOUNDS_S, meter.buckets(), meter.seconds) for meter in meters
            ),
        ),
    ]  # fmt: skip


def process_families(service: str, version: str, lag: Histogram, log: LogState) -> Families:
    build = labels(service=service, version=version, python=platform.python_version())
    return [
        HistogramFamily(
            "lean_selector_loop_lag_seconds",
            "Delay of the event loop's timers, sampled 20 times a second.",
            lambda: [("", lag.bounds, lag.buckets, lag.total)],
        ),
        *table({
            "build_info": (lambda: [(build, 1)], "Always 1."),
            "log_lines_suppressed_total": (lambda: log.limit.suppressed,
                "Log lines suppressed by the rate limit."),
            "log_lines_dropped_total": (lambda: log.writer.dropped,
                "Log lines dropped because stderr is not read."),
            "task_failures_total": (lambda: by("task", dict(sorted(failures.items()))),
                "Failures outside of requests, each with a log line: tasks, callbacks, threads."),
        }),
    ]  # fmt: skip


def process_text() -> str:
    """Return metrics such as process_cpu_seconds_total as text, or "" if there is no /proc."""
    process = Path("/proc/self")
    try:
        stat = (process / "stat").read_bytes().rpartition(b")")[2].split()
        limits = (process / "limits").read_bytes()
        open_files = len(os.listdir(process / "fd"))
        booted = Path("/proc/stat").read_bytes().partition(b"\nbtime ")[2].split()[0]
    except OSError:
        return ""
    ticks = os.sysconf("SC_CLK_TCK")
    most_files = limits.partition(b"\nMax open files")[2].split()[0].decode()
    figures = {
        "process_virtual_memory_bytes": (int(stat[20]), "Virtual memory size in bytes."),
        "process_resident_memory_bytes": (int(stat[21]) * os.sysconf("SC_PAGE_SIZE"),
            "Resident memory size in bytes."),
        "process_start_time_seconds": (int(booted) + int(stat[19]) / ticks,
            "Start time of the process since unix epoch in seconds."),
        "process_cpu_seconds_total": ((int(stat[11]) + int(stat[12])) / ticks,
            "Total user and system CPU time spent in seconds."),
        "process_open_fds": (open_files, "Number of open file descriptors."),
        "process_max_fds": ("+Inf" if most_files == "unlimited" else most_files,
            "Maximum number of open file descriptors."),
    }  # fmt: skip
    return "".join(
        head(name, kind_of(name), help) + f"{name} {value}\n"
        for name, (value, help) in figures.items()
    )


def connection_families(connections: Connections) -> Families:
    """Return metrics of HTTP connections: their number, failures, held bytes (D27), and TLS."""
    tls = connections.tls

    def reloads() -> list[Sample]:
        counts = {"ok": tls.reloads, "refused": tls.reload_failures}
        return by("outcome", counts) if tls.is_on else []

    return table({
        "http_connections": (lambda: len(connections.open), "Open HTTP connections."),
        "http_connections_accepted_total": (lambda: connections.accepted,
            "HTTP connections accepted."),
        "http_connections_refused_total": (lambda: connections.refused,
            "HTTP connections refused with 503, because --max-connections were open."),
        "http_accept_failures_total": (lambda: connections.accept_failures,
            "Failures to accept a connection: no descriptor or memory was left."),
        "http_held_bytes": (lambda: connections.held_bytes,
            "Bytes of requests that are incomplete, queued, or behind another one of their "
            "connection."),
        "http_held_refused_total": (lambda: connections.bodies_refused,
            "Connections closed with 503 because all connections together held too many bytes."),
        "tls_handshakes_total": (lambda: tls.completed if tls.is_on else [],
            "Successful TLS handshakes; absent while TLS is off."),
        "tls_handshake_failures_total": (lambda: by("reason", tls.failures) if tls.is_on else [],
            "TLS handshakes that failed, by reason."),
        "tls_reloads_total": (reloads,
            "Reloads of the TLS files: used, or refused."),
        "tls_certificate_not_after_seconds": (
            lambda: [] if tls.not_after is None else tls.not_after,
            "Expiry of the server's certificate, in seconds since 1970."),
    })  # fmt: skip


# -- loads and reservations ------------------------------------------------------------------------


def load_families(scopes: Callable[[], Sequence[LoadScope]]) -> Families:
    """Return metrics of active load, per model and tenant and per rank."""

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
            "worker_active_prefill_tokens": (lambda load: load.active_prefill_tokens,
                "Prompt tokens that a rank still has to prefill."),
            "worker_active_decode_blocks": (lambda load: load.active_decode_blocks,
                "KV blocks of the active requests of a rank."),
            "worker_active_requests": (lambda load: load.active_requests,
                "Active requests of a rank."),
        }),
        *table({
            "reservations": (live,
                "Live reservations: admitted here (local), or copied from a peer (replica)."),
            "reservations_booked_total": (
                lambda: [(scope_labels(scope), scope.slots.booked) for scope in scopes()],
                "Reservations admitted here."),
            "reservations_ended_total": (ended,
                "Reservations admitted here that ended, by reason."),
        }),
    ]  # fmt: skip


def _key_of(rank: tuple[tuple[int, int], RankLoad]) -> tuple[int, int]:
    return rank[0]


def prompt_families(unknown: Mapping[str, int]) -> Families:
    """Return the metric that counts OpenAI prompts with unknown block hashes, by reason."""
    return table({
        "unknown_prompts_total": (lambda: by("reason", dict(sorted(unknown.items()))),
            "Prompts of raw requests with unknown blocks, by reason."),
    })  # fmt: skip
