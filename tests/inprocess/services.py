"""The class in each of its places: in this process, and in front of a service of either dialect."""

import asyncio
import contextlib
import inspect
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lean_selector import RemoteSelectionService, SelectionService
from tests.support.on_loop import until
from tests.support.running_service import DEADLINE_S, RunningService, free_port

FIRST = 2**63 + 5  # as Ray derives them: beyond what is signed
SECOND = 7
BLOCK_SIZE = 4
TOKENS = list(range(10))
PLACES = ("in process", "over HTTP", "over HTTP with --api 1.6")
UNIX = "over a UNIX socket"

Service = SelectionService | RemoteSelectionService


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


@contextlib.asynccontextmanager
async def service_in(place: str, folder: Path, *flags: str) -> AsyncIterator[Service]:
    """A service without workers; `flags` are for those that are not in this process."""
    with contextlib.ExitStack() as stack:
        service: Service
        if place == "in process":
            assert not flags
            service = SelectionService()
        else:
            path = folder / "s"
            wanted = [*flags, *(("--api", "1.6") if "1.6" in place else ())]
            if "UNIX" in place:
                wanted += ["--uds", str(path)]
            running = stack.enter_context(RunningService(*wanted))
            url = f"unix:{path}" if "UNIX" in place else f"http://127.0.0.1:{running.port}"
            service = RemoteSelectionService(url)
        try:
            yield service
        finally:
            await service.shutdown_async()


def rows(service: Service) -> dict[int, tuple[int, int, int]]:
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


async def shows(service: Service, expected: dict[int, tuple[int, int, int]]) -> None:
    await until(lambda: rows(service) == expected, lambda: f"{rows(service)}, not {expected}")


def in_places(*places: str) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """A story as a test, once with a service without workers in each of the places."""

    def decorated(story: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        def test(place: str, tmp_path: Path, **others: Any) -> None:
            async def run() -> None:
                async with service_in(place, tmp_path) as service:
                    await story(service, **others)

            asyncio.run(run())

        given = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("place", "tmp_path", *list(inspect.signature(story).parameters)[1:])
        ]
        test.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
        test.__name__, test.__doc__ = story.__name__, story.__doc__
        told: Callable[..., None] = pytest.mark.parametrize("place", places)(test)
        return told

    return decorated


everywhere = in_places(*PLACES)
in_process = in_places("in process")


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
