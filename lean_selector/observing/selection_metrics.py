"""The metrics of the selection service: what its scrape says beyond loads and HTTP.

The three `dynamo_` names are those of the request-rejection document, so that its queries work as
printed. Reads the selector and its KV sources when a scrape asks. Labels are registered models and
workers only.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from lean_selector.core.index.kv_ingest import EventCounts
from lean_selector.core.selection.inspection import established
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.selector import Selector
from lean_selector.observing.load_metrics import Families, load_families, scope_labels
from lean_selector.observing.metrics import Family, FamilyGroup, RouteMeter, Sample, labels
from lean_selector.observing.worker_metrics import worker_families

SELECT, SELECT_AND_RESERVE = "/select", "/select_and_reserve"
# What a status of these two routes says of the selection; any other is "refused".
OUTCOMES = {
    "200": "placed",
    "409": "conflict",
    "499": "hung_up",
    "500": "failed",
    "503": "no_worker",
}


class SourceState(Protocol):
    """One source of KV events; see `SourceStatus`."""

    @property
    def worker_id(self) -> int: ...
    @property
    def dp_rank(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def gaps(self) -> int: ...
    @property
    def lag_batches(self) -> int: ...
    @property
    def restarts(self) -> int: ...
    @property
    def backlog_bytes(self) -> int: ...
    @property
    def dropped_batches(self) -> int: ...
    @property
    def last_message_age_s(self) -> float | None: ...


class KvSourceStates(Protocol):
    def each_status(self) -> Iterator[tuple[Partition, SourceState]]: ...

    def counts(self) -> EventCounts: ...


def selection_families(
    selector: Selector,
    sources: KvSourceStates,
    meters: Iterable[RouteMeter],
    overload_status: int,
    now: Callable[[], float] = time.monotonic,
) -> Families:
    """`meters` are those of all routes; `overload_status` is what shed requests are answered."""
    selections = {meter.route: meter for meter in meters if meter.method == "POST"}
    issued = [selections[SELECT], selections[SELECT_AND_RESERVE]]

    def partitions() -> list[Partition]:
        return list(established(selector.catalog, None, None))

    def of_partition(value: Callable[[Partition], float]) -> Callable[[], Iterator[Sample]]:
        return lambda: ((scope_labels(each), value(each)) for each in partitions())

    def rejected() -> Iterator[Sample]:
        for each in partitions():
            yield scope_labels(each, route=SELECT), each.shed_selects
            yield scope_labels(each, route=SELECT_AND_RESERVE), each.shed_bookings

    return [
        Family(
            "dynamo_tasks_issued_total",
            "counter",
            "Requests for a worker, rejected ones included.",
            lambda: ((labels(route=meter.route), meter.requests()) for meter in issued),
        ),
        Family(
            "dynamo_tasks_rejected_total",
            "counter",
            "Requests for a worker that were shed because all workers are busy.",
            rejected,
        ),
        Family(
            "dynamo_queued_requests",
            "gauge",
            "Requests parked until a worker has room.",
            of_partition(lambda each: len(each.parked)),
        ),
        Family(
            "lean_selector_selections_total",
            "counter",
            "Requests for a worker by outcome.",
            lambda: _outcomes(issued, overload_status),
        ),
        Family(
            "lean_selector_prompt_tokens_total",
            "counter",
            "Prompt tokens of the requests that were given a worker.",
            of_partition(lambda each: each.counts().prompt_tokens),
        ),
        Family(
            "lean_selector_overlap_tokens_total",
            "counter",
            "Of those, the tokens that the worker had cached.",
            of_partition(lambda each: each.counts().overlap_tokens),
        ),
        *load_families(partitions, now),
        *worker_families(selector, partitions, now),
        *_worker_families(selector, partitions, now),
        *_queue_families(of_partition, now),
        *_kv_families(sources, of_partition),
    ]


def _outcomes(meters: Iterable[RouteMeter], overload_status: int) -> Iterator[Sample]:
    for meter in meters:
        counts = Counter[str](placed=0, shed=meter.shed)
        for status, count in meter.by_status().items():
            counts[OUTCOMES.get(status, "refused")] += count
        counts[OUTCOMES.get(str(overload_status), "refused")] -= meter.shed
        counts["no_worker"] -= meter.unknown_models + meter.unknown_tenants
        counts["unknown_model"] = meter.unknown_models
        counts["unknown_tenant"] = meter.unknown_tenants
        for outcome, count in sorted(counts.items()):
            yield labels(route=meter.route, outcome=outcome), count


def _worker_families(
    selector: Selector, partitions: Callable[[], list[Partition]], now: Callable[[], float]
) -> Families:
    def by_lifecycle() -> Iterator[Sample]:
        counts = Counter(
            (*worker.spec.key, worker.lifecycle) for worker in selector.catalog.workers.values()
        )
        for (model, tenant_id, lifecycle), count in sorted(counts.items()):
            yield labels(model=model, tenant_id=tenant_id, lifecycle=lifecycle), count

    def active_kv_blocks() -> Iterator[Sample]:
        for each in partitions():
            start = scope_labels(each)[:-1]
            for worker_id, worker in sorted(each.workers.items()):
                blocks = sum(load.active_decode_blocks for load in worker.loads)
                yield f'{start},worker_id="{worker_id}"}}', blocks

    def total_kv_blocks() -> Iterator[Sample]:
        for each in partitions():
            start = scope_labels(each)[:-1]
            for worker_id, worker in sorted(each.workers.items()):
                if worker.total_kv_blocks:
                    blocks = worker.total_kv_blocks * len(worker.loads)
                    yield f'{start},worker_id="{worker_id}"}}', blocks

    def busy() -> Iterator[Sample]:
        for each in partitions():
            count, moment = 0, now()
            for worker in list(each.workers.values()) if each.busy else ():
                count += each.is_worker_busy(worker, moment)
                yield None
            yield scope_labels(each), count

    return [
        Family(
            "lean_selector_workers",
            "gauge",
            "Registered workers by lifecycle.",
            by_lifecycle,
        ),
        Family(
            "lean_selector_busy_workers",
            "gauge",
            "Workers that are given no new work, all their ranks being above a threshold.",
            busy,
        ),
        Family(
            "lean_selector_worker_active_kv_blocks",
            "gauge",
            "KV blocks that the active requests of a worker hold, on all its ranks.",
            active_kv_blocks,
        ),
        Family(
            "lean_selector_worker_total_kv_blocks",
            "gauge",
            "KV blocks of a worker that reported its total_kv_blocks, on all its ranks.",
            total_kv_blocks,
        ),
    ]


PerPartition = Callable[[Callable[[Partition], float]], Callable[[], Iterator[Sample]]]


def _queue_families(of_partition: PerPartition, now: Callable[[], float]) -> Families:
    return [
        Family(
            "lean_selector_queue_isl_tokens",
            "gauge",
            "Prompt tokens of the requests parked until a worker has room.",
            of_partition(lambda each: each.parked.isl_tokens),
        ),
        Family(
            "lean_selector_queue_oldest_wait_seconds",
            "gauge",
            "How long the request parked longest has waited; 0 when none is.",
            of_partition(
                lambda each: max(
                    (now() - parked.arrived_at for parked in each.parked.in_order()), default=0.0
                )
            ),
        ),
        Family(
            "lean_selector_queue_admitted_total",
            "counter",
            "Parked requests that were given a worker.",
            of_partition(lambda each: each.parked.admitted),
        ),
        Family(
            "lean_selector_queue_wait_seconds_total",
            "counter",
            "How long those had waited, together.",
            of_partition(lambda each: each.parked.waited_s),
        ),
    ]


def _kv_families(sources: KvSourceStates, of_partition: PerPartition) -> Families:
    def blocks() -> Iterator[Sample]:
        counts = sources.counts()
        yield '{type="stored"}', counts.blocks_stored
        yield '{type="removed"}', counts.blocks_removed

    def labelled_sources() -> Iterator[tuple[str, SourceState]]:
        # Not a generator expression: compiled, that looks at all of them in one step.
        for partition, status in sources.each_status():
            yield _source_labels(partition, status), status

    return [
        Family(
            "lean_selector_index_blocks",
            "gauge",
            "Block holdings in the KV index.",
            of_partition(lambda each: each.index.total_blocks),
        ),
        Family(
            "lean_selector_kv_events_total",
            "counter",
            "KV events of the workers by type and result: applied, or why not.",
            lambda: (
                (labels(type=kind, result=result), count)
                for kind, result, count in list(sources.counts().results())
            ),
        ),
        Family(
            "lean_selector_kv_event_blocks_total",
            "counter",
            "Blocks in the KV events that were applied.",
            blocks,
        ),
        FamilyGroup(
            labelled_sources,
            [
                (
                    "lean_selector_kv_source_state",
                    "gauge",
                    "1 for the state that a source of KV events is in.",
                    lambda source: (f'{source[0][:-1]},state="{source[1].state}"}}', 1),
                ),
                (
                    "lean_selector_kv_source_last_message_age_seconds",
                    "gauge",
                    "Since the last message of a source of KV events; absent before the first.",
                    _of_source(lambda status: status.last_message_age_s),
                ),
                (
                    "lean_selector_kv_source_gaps_total",
                    "counter",
                    "Gaps in the batch numbers of a source of KV events.",
                    _of_source(lambda status: status.gaps),
                ),
                (
                    "lean_selector_kv_source_lag_batches",
                    "gauge",
                    "Batches of a source of KV events that are known of and not applied.",
                    _of_source(lambda status: status.lag_batches),
                ),
                (
                    "lean_selector_kv_source_backlog_bytes",
                    "gauge",
                    "Received from a source of KV events and waiting.",
                    _of_source(lambda status: status.backlog_bytes),
                ),
                (
                    "lean_selector_kv_source_dropped_batches_total",
                    "counter",
                    "Batches of a source of KV events that were given up, for too much waited.",
                    _of_source(lambda status: status.dropped_batches),
                ),
                (
                    "lean_selector_kv_source_restarts_total",
                    "counter",
                    "Restarts noticed of the engine behind a source of KV events.",
                    _of_source(lambda status: status.restarts),
                ),
            ],
        ),
    ]


Source = tuple[str, SourceState]  # its labels, and what it says


def _source_labels(partition: Partition, status: SourceState) -> str:
    return scope_labels(partition, worker_id=status.worker_id, dp_rank=status.dp_rank)


def _of_source(value: Callable[[SourceState], float | None]) -> Callable[[Source], Sample]:
    def sample(source: Source) -> Sample:
        text, status = source
        count = value(status)
        return None if count is None else (text, count)

    return sample
