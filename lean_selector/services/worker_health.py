"""What is shown of the health of workers: the detail of GET /workers, and who is ejected."""

from collections.abc import Sequence
from typing import Final

import msgspec

from lean_selector.core.health.ejections import EJECTED, IN_SERVICE, PROBATION
from lean_selector.core.selection.catalog import Catalog, Worker
from lean_selector.core.selection.workers import WorkerRecord
from lean_selector.services.bodies import DETAIL, SCOPE_FIELDS
from lean_selector.wire.worker_details import SourceCondition
from lean_selector.wire.worker_health import (
    EjectedWorker,
    RankHealthRow,
    WorkerDetail,
    WorkerHealthDetail,
)

WORKERS_FIELDS: Final = SCOPE_FIELDS | DETAIL


def detail_of(
    worker: Worker, catalog: Catalog, now: float, sources: Sequence[SourceCondition]
) -> WorkerDetail:
    """A worker's record, and how it and the sources of its events are at this moment."""
    fields = worker.shown(WorkerRecord.__struct_fields__)
    return WorkerDetail(**fields, health=health_of(worker, catalog, now), kv_sources=[*sources])


def health_of(worker: Worker, catalog: Catalog, now: float) -> WorkerHealthDetail:
    """What is held against a worker's ranks at this moment."""
    partition = catalog.partitions.get(worker.spec.key)
    rows: list[RankHealthRow] = []
    if partition is None:
        return WorkerHealthDetail(IN_SERVICE, rows)
    for dp_rank in worker.spec.ranks:
        health = partition.health.ranks.get((worker.spec.worker_id, dp_rank))
        if health is None:
            continue
        state = health.state
        waits = health.is_out and not health.is_down
        rows.append(
            RankHealthRow(
                dp_rank,
                state,
                health.reason or None,
                None if state == IN_SERVICE else round(max(0.0, now - health.since), 3),
                round(max(0.0, health.returns_at - now), 3) if waits else None,
                health.failures,
                health.failed_polls,
                health.ejections,
            )
        )
    states = {row.state for row in rows}
    worst = next((state for state in (EJECTED, PROBATION) if state in states), IN_SERVICE)
    return WorkerHealthDetail(worst, rows)


def ejected_workers(catalog: Catalog) -> list[EjectedWorker] | msgspec.UnsetType:
    """The workers with a rank that is ejected, sorted; nothing at all when there is none."""
    found: dict[int, EjectedWorker] = {}
    for partition in catalog.partitions.values():
        for worker_id, dp_rank in sorted(partition.health.out):
            row = found.get(worker_id)
            if row is None:
                reason = partition.health.ranks[worker_id, dp_rank].reason
                row = found[worker_id] = EjectedWorker(worker_id, [], reason)
            row.dp_ranks.append(dp_rank)
    return [found[worker_id] for worker_id in sorted(found)] or msgspec.UNSET
