"""Tasks that nobody awaits, watched: one that fails is logged, counted and begun again.

Without this a task that raises is a task that is gone: what it did just stops, and nothing says so.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine

log = logging.getLogger("lean_selector.tasks")

# Before a task that failed is begun again; doubled each time up to the limit, and as at first after
# a run that lasted that long.
AGAIN_FIRST_S = 0.1
AGAIN_LIMIT_S = 30.0

# How often a task failed since the process began, by name. Names are few: they name what the task
# does, not for whom.
failures: Counter[str] = Counter()


def supervise(
    name: str, work: Callable[[], Coroutine[object, object, None]], *, again: bool = True
) -> "asyncio.Task[None]":
    """Run `work()` in a task until it returns or the task is cancelled.

    What it raises is logged and counted; it is then begun again after a pause, or left if `again`
    is false. A CancelledError that nobody sent to this task counts as raised. The task itself never
    raises; keep it, the loop does not.
    """
    return asyncio.get_running_loop().create_task(_supervised(name, work, again), name=name)


async def _supervised(
    name: str, work: Callable[[], Coroutine[object, object, None]], again: bool
) -> None:
    task = asyncio.current_task()
    assert task is not None
    pause_s = AGAIN_FIRST_S
    while True:
        began = time.monotonic()
        try:
            await work()
            return
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            _failed(name, again)
        except Exception:
            _failed(name, again)
        if not again:
            return
        if time.monotonic() - began >= AGAIN_LIMIT_S:
            pause_s = AGAIN_FIRST_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, AGAIN_LIMIT_S)


def _failed(name: str, again: bool) -> None:
    failures[name] += 1
    outcome = "it is begun again" if again else "it has ended"
    log.critical("task failed: %s; %s", name, outcome, exc_info=True, extra={"task": name})
