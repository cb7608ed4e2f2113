"""A SelectionService for each story, and what its users do with it."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from lean_selector import SelectionService
from tests.support.on_loop import inside, until
from tests.support.running_service import DEADLINE_S, free_port

FIRST = 2**63 + 5  # as Ray derives them: beyond what is signed
SECOND = 7
BLOCK_SIZE = 4
TOKENS = list(range(10))


def worker(worker_id: int = FIRST, **changes: Any) -> dict[str, Any]:
    """As Ray's tracker registers one."""
    return {
        "worker_id": worker_id,
        "model_name": "default",
        "tenant_id": "default",
        "endpoint": f"ray://replica-{worker_id}",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 8192,
        "data_parallel_start_rank": 0,
        "data_parallel_size": 1,
        "kv_events_endpoints": {0: f"tcp://127.0.0.1:{free_port()}"},
        "replay_endpoint": None,
        **changes,
    }


def ask(selection_id: str | None = None, **changes: Any) -> dict[str, Any]:
    return {"selection_id": selection_id, "token_ids": TOKENS, **changes}


def rows(service: SelectionService) -> dict[int, tuple[int, int, int]]:
    """Prefill tokens, decode blocks and requests of each worker."""
    return {
        row["worker_id"]: (
            row["potential_prefill_tokens"],
            row["potential_decode_blocks"],
            row["active_requests"],
        )
        for partition in service.loads()
        for row in partition["loads"]
    }


async def shows(service: SelectionService, expected: dict[int, tuple[int, int, int]]) -> None:
    await until(lambda: rows(service) == expected, lambda: f"{rows(service)}, not {expected}")


@asynccontextmanager
async def _without_workers() -> AsyncIterator[SelectionService]:
    service = SelectionService()
    try:
        yield service
    finally:
        await service.shutdown_async()


in_process = inside(_without_workers)


def printed_by(
    program: str,
    *arguments: str,
    path: Path | None = None,
    is_silent: bool = True,
    **environment: str,
) -> str:
    """What a program prints in a process of its own. If it is to be silent otherwise, it has no
    warning to show either."""
    places = os.pathsep.join(filter(None, [*map(str, [path] if path else []), *sys.path]))
    done = subprocess.run(
        [sys.executable, *(("-W", "error") if is_silent else ()), "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": places, **environment},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert not (is_silent and done.stderr), done.stderr
    return done.stdout.strip()
