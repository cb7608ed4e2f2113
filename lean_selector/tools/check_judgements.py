"""Compares what an engine reports about itself with the registration of its worker. Sends no
requests."""

from collections.abc import Iterator, Sequence

from lean_selector.api.judgements import Level, subject_of
from lean_selector.discovery.particulars import Particulars
from lean_selector.wire.findings import CheckedWorker, Finding
from lean_selector.wire.selection_bodies import KvSource


def judge_engine(worker: CheckedWorker, told: Particulars) -> Iterator[Finding]:
    """Compares a worker's registration with what its engine reports about itself (`told`)."""
    subject = f"worker {worker.worker_id}"
    faults = list(_faults(worker, told, subject))
    yield from faults
    if not faults:
        model = told.model_name or "an unnamed model"
        size = (
            f"blocks of {told.block_size} tokens" if told.block_size else "block size not reported"
        )
        yield Finding(Level.OK, subject, f"the engine at {worker.endpoint} has {model}, {size}")


def _faults(worker: CheckedWorker, told: Particulars, subject: str) -> Iterator[Finding]:
    patch = f"PATCH /workers/{worker.worker_id}"
    if told.block_size is not None and worker.block_size not in (None, told.block_size):
        yield Finding(
            Level.ERROR,
            subject,
            f"registered with blocks of {worker.block_size} tokens, the engine has "
            f"{told.block_size}: its events are skipped",
            f'DELETE it and all workers of its model, then POST them with "block_size": '
            f"{told.block_size}",
        )
    if told.model_name is not None and told.model_name != worker.model_name:
        yield Finding(
            Level.WARNING,
            subject,
            f"registered for model {worker.model_name}, the engine serves {told.model_name}",
            f'clients request "model_name": "{worker.model_name}"; register the name that they use',
        )
    blocks = told.total_kv_blocks
    if blocks is not None and worker.total_kv_blocks not in (None, blocks):
        yield Finding(
            Level.WARNING,
            subject,
            f"registered with total_kv_blocks {worker.total_kv_blocks}, the engine has {blocks}",
            f'{patch} {{"total_kv_blocks": {blocks}}}',
        )
    if blocks is not None and worker.total_kv_blocks is None:
        yield Finding(
            Level.NOTE,
            subject,
            "registered without total_kv_blocks: busy thresholds on blocks do not apply to it",
            f'{patch} {{"total_kv_blocks": {blocks}}}',
        )


def judge_ports(
    worker: CheckedWorker, told: Particulars, sources: Sequence[KvSource]
) -> Iterator[Finding]:
    """Compares a worker's registered event and replay endpoints with those in its engine's report.

    A different port may be correct, for example if a container's port is mapped. An endpoint that
    is registered for another worker is an error."""
    for source in sources:
        if source.worker_id == worker.worker_id:
            rank = str(source.dp_rank)
            events, replays = told.kv_events_endpoints or {}, told.replay_endpoints or {}
            for field, own, registered in (
                ("kv_events_endpoint", events.get(rank), source.endpoint),
                ("replay_endpoint", replays.get(rank), source.replay_endpoint),
            ):
                if own is not None and registered is not None and own != registered:
                    yield from _judge_port(source, sources, field, own, registered)


def _judge_port(
    source: KvSource, sources: Sequence[KvSource], field: str, own: str, registered: str
) -> Iterator[Finding]:
    others = [
        each.worker_id
        for each in sources
        if own in (each.endpoint, each.replay_endpoint) and each.worker_id != source.worker_id
    ]
    what = f"{field} {registered} is registered, but the engine reports {own}"
    if others:
        what += f", which is registered for worker {others[0]}"
        mend = f"register {own} for worker {source.worker_id}, or correct its endpoint"
        yield Finding(Level.ERROR, subject_of(source), what, mend)
    elif own.rpartition(":")[2] != registered.rpartition(":")[2]:
        yield Finding(Level.NOTE, subject_of(source), f"{what}: correct only if a port is mapped")
