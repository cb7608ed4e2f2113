"""An engine's own words against its registration. Asks nobody."""

from collections.abc import Iterator

from lean_selector.discovery.particulars import Particulars
from lean_selector.doctor.findings import Finding, Level
from lean_selector.doctor.selector_shapes import WorkerRecord


def judge_engine(worker: WorkerRecord, told: Particulars) -> Iterator[Finding]:
    """`told` is what the engine at the worker's endpoint says of itself."""
    subject = f"worker {worker.worker_id}"
    faults = list(_faults(worker, told, subject))
    yield from faults
    if not faults:
        model = told.model_name or "a model that it does not name"
        size = f"blocks of {told.block_size} tokens" if told.block_size else "no block size told"
        yield Finding(Level.OK, subject, f"the engine at {worker.endpoint} has {model}, {size}")


def _faults(worker: WorkerRecord, told: Particulars, subject: str) -> Iterator[Finding]:
    patch = f"PATCH /workers/{worker.worker_id}"
    if told.block_size is not None and worker.block_size not in (None, told.block_size):
        yield Finding(
            Level.ERROR,
            subject,
            f"registered with blocks of {worker.block_size} tokens, the engine has "
            f"{told.block_size}: its events are skipped",
            f'register it anew with "block_size": {told.block_size}, as all workers of its model',
        )
    if told.model_name is not None and told.model_name != worker.model_name:
        yield Finding(
            Level.WARNING,
            subject,
            f"registered for model {worker.model_name}, the engine serves {told.model_name}",
            f'callers ask for "model_name": "{worker.model_name}"; register the name that they use',
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
            "registered without total_kv_blocks: busy thresholds cannot see how full it is",
            f'{patch} {{"total_kv_blocks": {blocks}}}',
        )
