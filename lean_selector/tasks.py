"""Runs background tasks: logs and counts their exceptions, and restarts tasks that should not end.

Also logs and counts exceptions that are not handled in callbacks of the event loop, threads, and
finalisers."""

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar, cast

log = logging.getLogger("lean_selector.tasks")

# Pause before a failed task is restarted; doubled each time up to the limit, and reset after a run
# that was as long as the limit.
AGAIN_FIRST_S = 0.1
AGAIN_LIMIT_S = 30.0

# Failures since the process started, by task name. There are few names: they are the kind of work,
# not a worker or request. CALLBACK and the others are for work without a name.
failures: Counter[str] = Counter()
CALLBACK = "callback of the loop"
TASK = "task without a name"
THREAD = "thread"
FINALISER = "finaliser"

T = TypeVar("T")


def supervise(
    name: str, work: Callable[[], Coroutine[object, object, None]], *, again: bool = True
) -> "asyncio.Task[None]":
    """Runs `work()` in a task until it returns or the task is cancelled.

    An exception is logged and counted. Then `work()` is called again after a pause, unless `again`
    is false. A CancelledError counts as an exception if the task was not cancelled. The task never
    raises. The caller must keep a reference to the task, because the event loop does not."""
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
    failed(name, "it is restarted" if again else "it has ended")


def failed(name: str, outcome: str, error: BaseException | None = None) -> None:
    """Counts a failure of task `name`. Logs `outcome` and `error` (None: the current exception)."""
    failures[name] += 1
    told = True if error is None else error
    log.critical("task failed: %s; %s", name, outcome, exc_info=told, extra={"task": name})


def watched(name: str, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Runs `work` once, in a task that need not be awaited. An exception is logged and counted. The
    caller must keep a reference to the task, because the event loop does not."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        failed(task.get_name(), "it has ended", error)


def in_thread(name: str, work: Callable[[], T]) -> "asyncio.Future[T]":
    """Calls `work` in a daemon thread, which does not keep the process from ending. If the returned
    future is cancelled, the thread continues, and its result is dropped. Raises RuntimeError if no
    thread can be started."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(cast(T, result))
        else:
            done.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        # The loop is closed, because the service has stopped
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


# -- work that rarely waits ------------------------------------------------------------------------
#
# A generator that yields futures and receives their results. If it need not wait, it runs to its
# end in its caller's turn of the loop, without a task. Unlike a coroutine, it can be compiled.

Steps = Generator[Awaitable[Any], Any, T]


def stepped(steps: Steps[None]) -> "asyncio.Task[None] | None":
    """Runs the generator `steps` until it yields its first future. Return a task that awaits the
    futures and runs the rest, or None if the generator ends without yielding a future."""
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


# -- unsupervised work: callbacks, unawaited tasks, threads, finalisers ----------------------------


def watch_process(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, logs and counts exceptions that are not handled in callbacks of `loop`, tasks,
    threads and finalisers. Only for lean-selector's own processes, not for its use as a library."""
    loop.set_exception_handler(_told_by_the_loop)
    threading.excepthook = _told_by_a_thread
    sys.unraisablehook = _told_by_a_finaliser


def _told_by_the_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    name = TASK if "task" in context or "future" in context else CALLBACK
    error = context.get("exception")
    outcome = str(context.get("message") or "no message")
    if error is None:  # for example, a pending task was garbage-collected
        failures[name] += 1
        log.critical("task failed: %s; %s", name, outcome, extra={"task": name})
    else:
        failed(name, outcome, error)


def _told_by_a_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is not None and not isinstance(told.exc_value, SystemExit):
        which = "unknown" if told.thread is None else told.thread.name
        failed(THREAD, f"{which} has ended", told.exc_value)


def _told_by_a_finaliser(told: "sys.UnraisableHookArgs") -> None:
    failed(FINALISER, told.err_msg or "its exception was not handled", told.exc_value)
