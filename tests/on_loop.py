"""Waiting on a loop for what has no event to set; `tests.running_service` waits without one."""

import asyncio
from collections.abc import Callable

DEADLINE_S = 20.0  # generous: nothing here is expected to take a second


async def until(
    holds: Callable[[], object], what: str | Callable[[], object] = "it can be seen"
) -> None:
    """Polls an observable without stopping the loop; fails with `what`, which did not happen."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not holds():
        in_time = asyncio.get_running_loop().time() < deadline
        assert in_time, what if isinstance(what, str) else what()
        await asyncio.sleep(0.002)
