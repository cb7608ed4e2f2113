"""Stories on the service's own kind of loop, and waiting there for what has no event to set.

`tests.support.running_service` waits without a loop.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from inspect import Signature, signature
from typing import Any, TypeVar

import uvloop

from lean_selector.tasks import Steps, stepped

# What does not happen at all fails then. What happens takes less than a second, but on a machine
# that others keep busy a process may need half a minute for its start.
DEADLINE_S = 120.0
T = TypeVar("T")
Story = Callable[..., Coroutine[Any, Any, None]]


def on_loop(story: Story) -> Callable[..., None]:
    """A story as a test, which fails rather than hangs."""

    @functools.wraps(story)
    def test(*args: object, **kwargs: object) -> None:
        async def told() -> None:
            async with asyncio.timeout(3 * DEADLINE_S):
                await story(*args, **kwargs)

        uvloop.run(told())

    return test


async def finished(steps: Steps[T]) -> T:
    """What a generator returns that may wait."""
    found: list[T] = []

    def run() -> Steps[None]:
        found.append((yield from steps))

    task = stepped(run())
    if task is not None:
        await task
    return found[0]


def inside(
    opened: Callable[[], AbstractAsyncContextManager[Any]],
) -> Callable[[Story], Callable[..., None]]:
    """A story as a test whose first argument is what it happens inside of."""

    def test_of(story: Story) -> Callable[..., None]:
        async def told(**fixtures: object) -> None:
            async with opened() as given:
                await story(given, **fixtures)

        told.__name__, told.__doc__ = story.__name__, story.__doc__
        fixtures = list(signature(story).parameters.values())[1:]
        vars(told)["__signature__"] = Signature(fixtures)
        return on_loop(told)

    return test_of


async def until(
    holds: Callable[[], object], what: str | Callable[[], object] = "it can be seen"
) -> None:
    """Polls an observable without stopping the loop; fails with `what`, which did not happen."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while not holds():
        in_time = asyncio.get_running_loop().time() < deadline
        assert in_time, what if isinstance(what, str) else what()
        await asyncio.sleep(0.002)


def faults() -> list[object]:
    """What the loop's exception handler is told from now on."""
    failed: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
    return failed
