"""Stories on the service's own kind of loop, and waiting there for what has no event to set.

`tests.support.running_service` waits without a loop.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

DEADLINE_S = 20.0  # generous: nothing here is expected to take a second


def on_loop(story: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A story as a test, which fails rather than hangs."""

    @functools.wraps(story)
    def test(*args: object, **kwargs: object) -> None:
        async def told() -> None:
            async with asyncio.timeout(6 * DEADLINE_S):
                await story(*args, **kwargs)

        uvloop.run(told())

    return test


async def until(
    holds: Callable[[], object], what: str | Callable[[], object] = "it can be seen"
) -> None:
    """Polls an observable without stopping the loop; fails with `what`, which did not happen."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not holds():
        in_time = asyncio.get_running_loop().time() < deadline
        assert in_time, what if isinstance(what, str) else what()
        await asyncio.sleep(0.002)
