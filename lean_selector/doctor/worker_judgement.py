"""Which workers can be chosen, and why the others cannot. Asks nobody."""

from collections.abc import Iterator
from typing import Final

from lean_selector.doctor.findings import Finding, Level
from lean_selector.doctor.selector_shapes import RankHealth, WorkerRecord

_SCHEDULABLE: Final = "schedulable"
_EJECTED: Final = "ejected"
_PROBATION: Final = "probation"


def can_be_chosen(workers: list[WorkerRecord]) -> int:
    """How many. Where all of a model are ejected they are tried all the same, and count."""
    return sum(
        sum(not _is_out(worker) for worker in alike) or len(alike)
        for alike in _schedulable(workers).values()
    )


def judge_workers(workers: list[WorkerRecord]) -> Iterator[Finding]:
    """Those that cannot be chosen, and what is held against the others."""
    for (model_name, tenant_id), alike in _schedulable(workers).items():
        if all(map(_is_out, alike)):
            yield Finding(
                Level.ERROR,
                f"model {model_name}",
                f"all its workers (tenant {tenant_id}) are ejected, and tried all the same",
                "mend the engines of the workers below",
            )
    for worker in workers:
        if worker.lifecycle != _SCHEDULABLE:
            yield _not_schedulable(worker)
        else:
            yield from _judge_health(worker)
    yield from _judge_block_sizes(workers)


def _schedulable(workers: list[WorkerRecord]) -> dict[tuple[str, str], list[WorkerRecord]]:
    """By model and tenant, among whose workers one is chosen."""
    found: dict[tuple[str, str], list[WorkerRecord]] = {}
    for worker in workers:
        if worker.lifecycle == _SCHEDULABLE:
            found.setdefault((worker.model_name, worker.tenant_id), []).append(worker)
    return found


def _ranks_that_are(worker: WorkerRecord, state: str) -> list[RankHealth]:
    return [rank for rank in worker.health.ranks if rank.state == state]


def _is_out(worker: WorkerRecord) -> bool:
    """With all its ranks."""
    return len(_ranks_that_are(worker, _EJECTED)) >= (worker.data_parallel_size or 1)


def _not_schedulable(worker: WorkerRecord) -> Finding:
    reasons = "; ".join(worker.not_schedulable_reasons) or worker.lifecycle
    return Finding(
        Level.ERROR,
        f"worker {worker.worker_id}",
        f"cannot be chosen: {reasons}",
        f"PATCH /workers/{worker.worker_id} with what is missing",
    )


def _judge_health(worker: WorkerRecord) -> Iterator[Finding]:
    """Of a worker with many ranks, those that are alike together, with the reason of the first."""
    subject = f"worker {worker.worker_id}"
    if ejected := _ranks_that_are(worker, _EJECTED):
        who = "" if _is_out(worker) else f"{_named(ejected)} "
        yield Finding(
            Level.WARNING,
            subject,
            f"{who}ejected, {_until(ejected[0])}: {_why(ejected[0])}",
            "mend its engine; it is given work again by itself",
        )
    if on_probation := _ranks_that_are(worker, _PROBATION):
        yield Finding(
            Level.NOTE,
            subject,
            f"{_named(on_probation)} on probation, where one failure ejects it again: "
            f"{_why(on_probation[0])}",
        )


def _named(ranks: list[RankHealth]) -> str:
    numbers = ", ".join(str(rank.dp_rank) for rank in ranks)
    return f"rank {numbers} is" if len(ranks) == 1 else f"ranks {numbers} are"


def _until(rank: RankHealth) -> str:
    if rank.returns_in_s is None:
        return "until a poll of it succeeds"
    return f"for {rank.returns_in_s:.0f} s more"


def _why(rank: RankHealth) -> str:
    return rank.reason or "no reason is told"


def _judge_block_sizes(workers: list[WorkerRecord]) -> Iterator[Finding]:
    sizes: dict[tuple[str, str], set[int]] = {}
    for worker in workers:
        if worker.block_size is not None:
            key = worker.model_name, worker.tenant_id
            sizes.setdefault(key, set()).add(worker.block_size)
    for (model_name, tenant_id), found in sizes.items():
        if len(found) > 1:
            yield Finding(
                Level.ERROR,
                f"model {model_name}",
                f"its workers (tenant {tenant_id}) have blocks of {sorted(found)} tokens",
                "start all engines of a model with one block size",
            )
