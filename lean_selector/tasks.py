"""Supervision of background tasks: what fails is logged and counted, and tasks that are
to run for good are begun again.

Without this a task that raises is a task that is gone: what it did just stops, and nothing says so.
The same of a callback of the loop, of a thread, and of a finaliser.
"""

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

log = logging.getLogger("lean_selector.tasks")

# Before a task that failed is begun again; doubled each time up to the limit, and as at first after
# a run that lasted that long.
AGAIN_FIRST_S = 0.1
AGAIN_LIMIT_S = 30.0

# How often a task failed since the process began, by name. Names are few: they name what the task
# does, not for whom. CALLBACK and so on are for those that have none.
failures: Counter[str] = Counter()
CALLBACK = "callback of the loop"
TASK = "task without a name"
THREAD = "thread"
FINALISER = "finaliser"

T = TypeVar("T")


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
    failed(name, "it is begun again" if again else "it has ended")


def failed(name: str, outcome: str, error: BaseException | None = None) -> None:
    """Log and count a failure: `error`, or the exception that is being handled."""
    failures[name] += 1
    told = True if error is None else error
    log.critical("task failed: %s; %s", name, outcome, exc_info=told, extra={"task": name})


def watched(name: str, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Run `work` once, in a task that its owner need not look at: what it raises is logged and
    counted. It may be awaited all the same. Keep it, the loop does not."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_look_at)
    return task


def _look_at(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        failed(task.get_name(), "it has ended", error)


# -- work that seldom waits -----------------------------------------------------------------------
#
# A generator that yields what it has to wait for, and is sent what that gave. Where nothing has to
# be waited for it runs to its end in its caller's turn of the loop, without a task; and it can be
# compiled, which a coroutine cannot.

Steps = Generator[Awaitable[Any], Any, T]


def stepped(steps: Steps[None]) -> "asyncio.Task[None] | None":
    """Run `steps` as far as they go now. The task that waits for the rest of them; None where they
    have ended. If the task is cancelled before it ran, they are closed."""
    try:
        awaited = steps.send(None)
    except StopIteration:
        return None
    task = asyncio.get_running_loop().create_task(_step(steps, awaited))

    def close(_: object) -> None:
        if isinstance(awaited, Coroutine):
            awaited.close()
        steps.close()

    task.add_done_callback(close)
    return task


async def finished(steps: Steps[T]) -> T:
    """The result of all of them."""
    try:
        awaited = steps.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    return await _step(steps, awaited)


async def _step(steps: Steps[T], awaited: Awaitable[Any]) -> T:
    try:
        while True:
            try:
                given = await awaited
            except BaseException as error:
                awaited = steps.throw(error)
            else:
                awaited = steps.send(given)
    except StopIteration as end:
        result: T = end.value
        return result


async def within(limit_s: float | None, future: "asyncio.Future[T]") -> T:
    """What `future` gives. Raises TimeoutError after `limit_s`."""
    async with asyncio.timeout(limit_s):
        return await future


# -- what has no task of its own, or none that anybody watches ------------------------------------


def watch_process(loop: asyncio.AbstractEventLoop) -> None:
    """From here on, what callbacks of `loop`, tasks that nobody awaits, threads and finalisers
    raise is logged and counted as well. For a process that is ours; inside another program these
    are its own to watch."""
    loop.set_exception_handler(_told_by_the_loop)
    threading.excepthook = _told_by_a_thread
    sys.unraisablehook = _told_by_a_finaliser


def _told_by_the_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    name = TASK if "task" in context or "future" in context else CALLBACK
    error = context.get("exception")
    outcome = str(context.get("message") or "no message")
    if error is None:  # as for a task that is dropped while it waits
        failures[name] += 1
        log.critical("task failed: %s; %s", name, outcome, extra={"task": name})
    else:
        failed(name, outcome, error)


def _told_by_a_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is not None and not isinstance(told.exc_value, SystemExit):
        which = "unknown" if told.thread is None else told.thread.name
        failed(THREAD, f"{which} has ended", told.exc_value)


def _told_by_a_finaliser(told: "sys.UnraisableHookArgs") -> None:
    failed(FINALISER, told.err_msg or "its exception goes to nobody", told.exc_value)
