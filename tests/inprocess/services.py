"""A SelectionService for each story, and what its users do with it."""

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from lean_selector import SelectionService
from tests.support.on_loop import until
from tests.support.running_service import DEADLINE_S, free_port

FIRST = 2**63 + 5  # as Ray derives them: beyond what is signed
SECOND = 7
BLOCK_SIZE = 4
TOKENS = list(range(10))


def worker(worker_id: int = FIRST, port: int | None = None, **changes: Any) -> dict[str, Any]:
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
        "kv_events_endpoints": {0: f"tcp://127.0.0.1:{port or free_port()}"},
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


def in_process(story: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A story as a test, with a service without workers."""

    def test(**others: Any) -> None:
        async def run() -> None:
            service = SelectionService()
            try:
                await story(service, **others)
            finally:
                await service.shutdown_async()

        asyncio.run(run())

    given = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in list(inspect.signature(story).parameters)[1:]
    ]
    test.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    test.__name__, test.__doc__ = story.__name__, story.__doc__
    return test


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
