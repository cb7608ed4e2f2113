"""The metrics that only the selector has. Module `metrics` has those of both services."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from lean_selector.api.gate import RouteMeter
from lean_selector.api.metrics import WORKERS, load_families, scope_labels
from lean_selector.core.index.kv_ingest import EventCounts
from lean_selector.core.load.rank_load import RankCounts
from lean_selector.core.selection.inspection import established, saturation
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.peer_sessions import PeerSessions
from lean_selector.core.selection.schedulable_worker import SchedulableWorker
from lean_selector.core.selection.selection_cache import SelectionCache
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import (
    BOTH,
    DECODE,
    GATEWAY,
    PICKER,
    PREFILL,
    ROUTE,
    SELECT,
    SELECT_AND_RESERVE,
)
from lean_selector.core.sessions.shapes import SessionVerdict
from lean_selector.core.sessions.table import SessionTable
from lean_selector.wire.exposition import (
    Families,
    Number,
    Sample,
    by,
    each,
    labels,
    table,
    table_of,
)
from lean_selector.wire.selection_bodies import SourceStatus

_ASKED_AT: Final = (SELECT, SELECT_AND_RESERVE, ROUTE, GATEWAY, PICKER)
SHED: Final = "429"

OTHER: Final = "other"  # all models and tenants that never had a worker

# The outcome of a selection by its status; "refused" for other statuses.
OUTCOMES = {
    "200": "placed",
    "409": "conflict",
    "499": "hung_up",
    "500": "failed",
    "503": "no_worker",
    "504": "too_late",
}


# -- the selector ----------------------------------------------------------------------------------


class KvSourceStates(Protocol):
    def each_status(self) -> Iterator[tuple[Partition, SourceStatus]]: ...

    def counts(self) -> EventCounts: ...


def selection_families(
    selector: Selector,
    sources: KvSourceStates,
    meters: Iterable[RouteMeter],
    overload_status: int,
    now: Callable[[], float] = time.monotonic,
) -> Families:
    """Return the metrics of the selector. Each of `meters` counts the answers of one route, or
    the gateway's choices of workers. `overload_status` is the status of shed requests."""
    issued = [meter for meter in meters if meter.method == "POST" and meter.route in _ASKED_AT]

    def partitions() -> list[Partition]:
        return list(established(selector.catalog, None, None))

    def scoped() -> list[tuple[str, Partition]]:
        return [(scope_labels(partition), partition) for partition in partitions()]

    def oldest_wait_s(partition: Partition) -> float:
        arrivals = [waiting.arrived_at for waiting in partition.queue.in_order()]
        return now() - min(arrivals) if arrivals else 0.0

    def saturations() -> Iterator[Sample]:
        target_s = selector.settings.target_ttft_s or math.inf
        for partition in partitions():
            for role in (PREFILL, DECODE) if partition.has_roles else (BOTH,):
                yield scope_labels(partition, role=role), saturation(partition, target_s, role)

    def rejected() -> Iterator[Sample]:
        for partition in partitions():
            yield from each(scope_labels(partition), "route", partition.shed)

    return [
        *table({
            "dynamo_tasks_issued_total": (
                lambda: by("route", {meter.route: meter.requests() for meter in issued}),
                "Requests for a worker, rejected ones included."),
            "dynamo_tasks_rejected_total": (rejected,
                "Requests for a worker that were shed because all workers were busy."),
            "saturation": (saturations,
                "How full the eligible ranks are: 0 idle, 1 full; above 1 there are too few."),
            "selections_total": (lambda: _outcomes(issued, overload_status),
                "Requests for a worker by outcome."),
            "pairs_total": (lambda: by("reason", selector.pairs),
                "Requests that asked for a pair of workers, by why they got one or not."),
        }),
        table_of(scoped, {
            "dynamo_queued_requests": (lambda partition: len(partition.queue),
                "Requests in the queue."),
            "queue_isl_tokens": (lambda partition: partition.queue.isl_tokens,
                "Prompt tokens of the requests in the queue."),
            "queue_oldest_wait_seconds": (oldest_wait_s,
                "Longest wait of a request in the queue; 0 if it is empty."),
            "queue_admitted_total": (lambda partition: _by_priority(partition.queue.admitted),
                "Queued requests that got a worker."),
            "queue_wait_seconds_total": (lambda partition: _by_priority(partition.queue.waited_s),
                "Total time that these had waited."),
            "prompt_tokens_total": (lambda partition: partition.counts().prompt_tokens,
                "Prompt tokens of requests that got a worker."),
            "overlap_tokens_total": (lambda partition: partition.counts().overlap_tokens,
                "Of these, tokens predicted as cached on the worker."),
            "index_blocks": (lambda partition: partition.index.total_blocks,
                "Blocks in the KV index, counted once per rank that holds them."),
        }),
        *load_families(partitions),
        *worker_families(selector, partitions, now),
        *_catalog_families(selector, partitions),
        *_kv_families(sources),
        *_selection_cache_families(selector.selections),
    ]  # fmt: skip


def _by_priority(counts: Mapping[str, Number]) -> list[tuple[str, Number]]:
    return [(f'priority="{name}"', count) for name, count in counts.items()]


def _outcomes(meters: Iterable[RouteMeter], overload_status: int) -> Iterator[Sample]:
    for meter in meters:
        counts = Counter[str](placed=0, shed=meter.shed)
        for status, count in meter.by_status().items():
            counts[OUTCOMES.get(status, "refused")] += count
        # What serves other gateways has its own status for shed requests.
        status = SHED if meter.route in (ROUTE, PICKER) else str(overload_status)
        counts[OUTCOMES.get(status, "refused")] -= meter.shed
        counts["no_worker"] -= meter.unknown_models + meter.unknown_tenants
        counts["unknown_model"] = meter.unknown_models
        counts["unknown_tenant"] = meter.unknown_tenants
        yield from each(labels(route=meter.route), "outcome", dict(sorted(counts.items())))


def _catalog_families(selector: Selector, partitions: Callable[[], list[Partition]]) -> Families:
    def by_lifecycle() -> Iterator[Sample]:
        counts = Counter(
            (*worker.spec.key, worker.lifecycle) for worker in selector.catalog.workers.values()
        )
        for (model, tenant_id, lifecycle), count in sorted(counts.items()):
            yield labels(model=model, tenant_id=tenant_id, lifecycle=lifecycle), count

    def workers() -> Iterator[tuple[str, SchedulableWorker]]:
        for partition in partitions():
            start = scope_labels(partition)[:-1]
            for worker_id, worker in sorted(partition.workers.items()):
                yield f'{start},worker_id="{worker_id}"}}', worker

    def busy() -> Iterator[Sample]:
        for partition in partitions():
            count = 0
            for worker in list(partition.workers.values()) if partition.busy else ():
                count += not worker.mask & ~partition.busy  # each of its ranks is
                yield None
            yield scope_labels(partition), count

    return [
        *table({
            "workers": (by_lifecycle, WORKERS),
            "busy_workers": (busy,
                "Busy workers: all of their ranks are above a threshold."),
        }),
        table_of(workers, {
            "worker_active_kv_blocks": (
                lambda worker: sum(load.active_decode_blocks for load in worker.loads),
                "KV blocks of the active requests of a worker, over all its ranks."),
            "worker_total_kv_blocks": (
                lambda worker: (worker.total_kv_blocks or 0) * len(worker.loads) or None,
                "Total KV blocks of a worker that reported total_kv_blocks, over all its ranks."),
        }),
    ]  # fmt: skip


def _kv_families(sources: KvSourceStates) -> Families:
    def results() -> list[Sample]:
        return [
            (labels(type=kind, result=result), count)
            for kind, result, count in sources.counts().results()
        ]

    def blocks() -> list[Sample]:
        counts = sources.counts()
        return by("type", {"stored": counts.blocks_stored, "removed": counts.blocks_removed})

    def labelled() -> Iterator[tuple[str, SourceStatus]]:
        # Not a generator expression: mypyc would visit all sources in one step.
        for partition, status in sources.each_status():
            yield (
                scope_labels(partition, worker_id=status.worker_id, dp_rank=status.dp_rank),
                status,
            )

    return [
        *table({
            "kv_events_total": (results,
                "KV events by type and result: applied, or the reason for skipping."),
            "kv_event_blocks_total": (blocks, "Blocks in the applied KV events."),
        }),
        table_of(labelled, {
            "kv_source_state": (lambda status: [(f'state="{status.state}"', 1)],
                "1 for the current state of a source of KV events."),
            "kv_source_last_message_age_seconds": (lambda status: status.last_message_age_s,
                "Time since the last message of a source of KV events; absent before the first."),
            "kv_source_gaps_total": (lambda status: status.gaps,
                "Gaps in the batch numbers of a source of KV events."),
            "kv_source_lag_batches": (lambda status: status.lag_batches,
                "Batches of a source of KV events that are known to exist and not applied."),
            "kv_source_backlog_bytes": (lambda status: status.backlog_bytes,
                "Bytes received from a source of KV events and not yet applied."),
            "kv_source_dropped_batches_total": (lambda status: status.dropped_batches,
                "Batches of a source of KV events that were dropped because too many waited."),
            "kv_source_restarts_total": (lambda status: status.restarts,
                "Detected restarts of the engine of a source of KV events."),
        }),
    ]  # fmt: skip


# -- single workers and models ---------------------------------------------------------------------


class WorkerFigures:
    """The values of one worker's metrics, summed over its ranks."""

    def __init__(self, partition: Partition, worker_id: int, now: float) -> None:
        self.counts = RankCounts()
        self.ejected_ranks = 0
        self.ejected_s = 0.0  # of its longest-ejected rank
        for load in partition.workers[worker_id].loads:
            self.counts.add(load.counts)
            if load.key in partition.health.out:
                self.ejected_ranks += 1
                since = partition.health.ranks[load.key].since
                self.ejected_s = max(self.ejected_s, now - since)


def worker_families(
    selector: Selector,
    partitions: Callable[[], list[Partition]],
    now: Callable[[], float] = time.monotonic,
) -> Families:
    def workers() -> Iterator[tuple[str, WorkerFigures]]:
        for partition in partitions():
            start = scope_labels(partition)[:-1]
            for worker_id in sorted(partition.workers):
                if worker_id in partition.workers:  # not removed in an earlier slice
                    figures = WorkerFigures(partition, worker_id, now())
                    yield f'{start},worker_id="{worker_id}"}}', figures

    def reports(worker: WorkerFigures) -> list[tuple[str, float]]:
        counts = worker.counts
        outcomes = (("ok", counts.ok), ("failed", counts.failed), ("refused", counts.refused))
        return [(f'outcome="{outcome}"', count) for outcome, count in outcomes]

    def ejections() -> Iterator[Sample]:
        for partition in partitions():
            yield from each(scope_labels(partition), "reason", partition.health.ejected)

    return [
        *table({
            "model_selections_total": (lambda: model_outcomes(selector, partitions()),
                "Requests for a worker by model and outcome; unknown_model: it never had a "
                "worker; unknown_tenant: only other tenants of the model had one."),
            "rank_ejections_total": (ejections,
                "Ejections of ranks, by the last failure."),
            "rank_ejections_spared_total": (
                lambda: [(scope_labels(one), one.health.spared) for one in partitions()],
                "Failing ranks that were not ejected because too many were already."),
        }),
        table_of(workers, {
            "worker_reports_total": (reports,
                "Requests to a worker by reported outcome."),
            "worker_selections_total": (lambda worker: worker.counts.selections,
                "Requests placed on a worker."),
            "worker_prompt_tokens_total": (lambda worker: worker.counts.prompt_tokens,
                "Prompt tokens of these requests."),
            "worker_overlap_tokens_total": (lambda worker: worker.counts.overlap_tokens,
                "Of these, tokens that the index predicted as cached."),
            "worker_cached_tokens_total": (lambda worker: worker.counts.cached_tokens,
                "Prompt tokens that the engine counted as cached, if reported."),
            "worker_compared_cached_tokens_total": (lambda worker: worker.counts.compared_tokens,
                "Of these, tokens of requests with a known predicted overlap."),
            "worker_compared_overlap_tokens_total": (
                lambda worker: worker.counts.compared_overlap_tokens,
                "The predicted overlap of the same requests."),
            "worker_index_accuracy": (lambda worker: worker.counts.index_accuracy,
                "Accuracy of the index over recent prompts; 1: its predictions equal the engine's "
                "counts."),
            "worker_ttft_seconds_total": (lambda worker: worker.counts.ttft_s,
                "Sum of reported times to first token."),
            "worker_ttft_reports_total": (lambda worker: worker.counts.ttft_count,
                "Number of these reports."),
            "worker_ttft_predictions_total": (lambda worker: worker.counts.predictions,
                "First tokens whose time was predicted from the speed of their rank."),
            "worker_ttft_predicted_seconds_total": (lambda worker: worker.counts.predicted_s,
                "Sum of the predicted times to first token."),
            "worker_ttft_observed_seconds_total": (lambda worker: worker.counts.observed_s,
                "Sum of the observed times to these first tokens."),
            "worker_ejected_ranks": (lambda worker: worker.ejected_ranks,
                "Ejected ranks of a worker."),
            "worker_ejected_seconds": (lambda worker: worker.ejected_s,
                "Longest time that one of them has been ejected; 0 if there is none."),
        }),
    ]  # fmt: skip


def model_outcomes(selector: Selector, partitions: list[Partition]) -> Iterator[Sample]:
    """Yields the number of selections by model, tenant and outcome. Outcome unknown_tenant:
    only other tenants have workers for the model. All unknown models share one series."""
    refusals = selector.catalog.refusals
    counts = {key: (0, 0, refused) for key, refused in refusals.known.items()}
    for partition in partitions:
        key = partition.model_name, partition.tenant_id
        shed = sum(partition.shed.values())
        placed = partition.counts().selections - partition.pairs
        counts[key] = placed, shed, refusals.known.get(key, 0)
    for key in sorted(counts):
        yield from _three(labels(model=key[0], tenant_id=key[1]), *counts[key])
    other = labels(model=OTHER, tenant_id=OTHER)
    if refusals.unnamed:
        yield from _three(other, 0, 0, refusals.unnamed)
    yield from each(other, "outcome", {"unknown_model": refusals.unknown})
    for model, count in list(refusals.misplaced.items()):
        yield from each(labels(model=model, tenant_id=OTHER), "outcome", {"unknown_tenant": count})


def _three(label: str, placed: int, shed: int, refused: int) -> Iterator[Sample]:
    return each(label, "outcome", {"placed": placed, "shed": shed, "no_worker": refused})


# -- sessions and cached selections ----------------------------------------------------------------


def session_families(partitions: Callable[[], list[Partition]], peers: PeerSessions) -> Families:
    """Return metrics of sessions (requests kept on one worker)."""

    def tables() -> Iterator[tuple[str, SessionTable]]:
        for partition in partitions():
            if partition.sessions is not None:
                yield scope_labels(partition), partition.sessions

    def bound() -> Iterator[Sample]:
        for text, sessions in tables():
            held = sessions.held
            yield from each(text, "state", {"held": held, "idle": len(sessions) - held})

    def reservations() -> Iterator[Sample]:
        for text, sessions in tables():
            counts = sessions.counts
            for result in ("followed", "bound", "moved", "refused", "unbound"):
                yield f'{text[:-1]},result="{result}"}}', getattr(counts, result)

    def heard() -> list[Sample]:
        counts = {verdict.name.lower(): peers.counts[verdict] for verdict in SessionVerdict}
        return by("result", counts)

    return table({
        "sessions": (bound,
            "Sessions bound to a rank: with a live reservation here (held), or without (idle)."),
        "session_bookings_total": (reservations, "Reservations of sessions by result."),
        "sessions_expired_total": (
            lambda: [(text, sessions.counts.expired) for text, sessions in tables()],
            "Bindings of sessions that have expired."),
        "replica_sessions_total": (heard, "Bindings received from peers, by result."),
    })  # fmt: skip


def _selection_cache_families(cache: SelectionCache) -> Families:
    def ended() -> list[Sample]:
        counts = {"booked": cache.used, "expired": cache.expired, "evicted": cache.evicted}
        return by("reason", counts)

    return table({
        "cached_selections": (lambda: len(cache), "Selections that can be booked by their id."),
        "cached_selection_bytes": (lambda: cache.size_bytes, "Bytes of their hashes and names."),
        "cached_selections_ended_total": (ended,
            "Cached selections that were used, expired or evicted."),
    })  # fmt: skip
