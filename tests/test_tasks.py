"""What runs beside the requests: what becomes of it when it fails, and that it is seen to."""

import ast
import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import lean_selector
from lean_selector import tasks
from lean_selector.tasks import failures, supervise, watched
from tests.support.on_loop import on_loop

ROOT = Path(lean_selector.__file__).parent

# What begins work that goes on beside its caller.
STARTS = {
    *("create_task", "ensure_future", "run_coroutine_threadsafe", "TaskGroup"),
    *("run_in_executor", "to_thread", "submit", "ThreadPoolExecutor", "ProcessPoolExecutor"),
    *("Thread", "Timer", "Process", "start_new_thread"),
}
# Where that is not left to `supervise` and `watched`: who sees how it ends.
ALLOWED = {
    ("tasks.py", "supervise", "create_task"),  # the task logs, counts and begins again itself
    ("tasks.py", "watched", "create_task"),  # _look_at sees to each of them
    # the tick: serve waits for its end, which stops the service, and raises what it raised
    ("app/host.py", "HttpServer.serve", "create_task"),
    # the gateway's: what it raises is logged in _place, and answered with 500
    ("tasks.py", "stepped", "create_task"),
    # _opened looks at it, and tells the loop's handler of what is not the client's doing
    ("http/listener.py", "Listener._accept", "create_task"),
    # how it ended is carried to who waits in another loop, by `tell`
    ("embedded/service.py", "Running.in_time.begin", "create_task"),
    # awaited; where that is cancelled, the release waits for it and looks at how it ended
    ("client/drivers.py", "Driver.book", "create_task"),
    # in the user's process: their errors are handled, and the loop's own handler tells others
    ("client/drivers.py", "Driver._spawn", "create_task"),
    # its caller waits for it, and is raised what it raised
    ("client/sync_router.py", "LoopThread.run", "run_coroutine_threadsafe"),
    ("embedded/service.py", "Running.at_once", "run_coroutine_threadsafe"),
    # it runs a loop, which tells its errors
    ("client/sync_router.py", "LoopThread._running", "Thread"),
    ("app/gateway_process.py", "Front.close", "to_thread"),  # awaited by the stop
    ("tools/demo.py", "Demo._traffic", "create_task"),  # _watch waits for and raises for them
    # no executor: the queue of an engine in virtual time
    ("tools/simulation.py", "Simulation._submit", "submit"),
    # no error of the descriptor ends it, and a line that it cannot write nobody would read
    ("api/logs.py", "LineWriter.__init__", "Thread"),
    ("tasks.py", "in_thread", "Thread"),  # whatever it raises is its result
    # in the engine's process: errors of readers are handled, and Python prints any other
    ("publisher.py", "KvEventPublisher._start_replay", "Thread"),
    ("discovery/finders.py", "FileFinder.run", "to_thread"),  # awaited in a supervised task
    # its work is begun in `tokens`
    ("gateway/local_tokenizer.py", "LocalTokenizer.__init__", "ThreadPoolExecutor"),
    # awaited; whatever it raises is made a NotTokenized
    ("gateway/local_tokenizer.py", "LocalTokenizer.tokens", "run_in_executor"),
}


def begun(node: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """What a source begins beside itself: in which function, and with which call."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            called = getattr(child.func, "attr", getattr(child.func, "id", ""))
            if called in STARTS:
                yield ".".join(inside), called
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from begun(child, (*inside, child.name))
        else:
            yield from begun(child, inside)


def test_nothing_is_begun_that_can_end_unseen() -> None:
    """A new place uses `supervise` or `watched`, or says here who sees how it ends."""
    found = [
        (str(path.relative_to(ROOT)), *where)
        for path in ROOT.rglob("*.py")
        for where in begun(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert [place for place in found if place not in ALLOWED] == []
    assert len(found) == len(set(found)), "two in one function: who sees how each ends?"
    assert ALLOWED - set(found) == set(), "these are no more"


async def cancelled_by_another() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def bug() -> None:
    raise RuntimeError("a bug")


@pytest.mark.parametrize("fails", [bug, cancelled_by_another])
@on_loop
async def test_a_task_that_fails_is_logged_counted_and_begun_again(
    fails: Callable[[], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A cancellation that nobody sent to the task is a failure too."""
    monkeypatch.setattr(tasks, "AGAIN_FIRST_S", 0.0)
    runs, name = 0, f"a test of {fails.__name__}"

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            await fails()

    await supervise(name, work)
    assert (runs, failures[name]) == (3, 2)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"task failed: {name}; it is restarted"] * 2
    assert caplog.records[0].exc_info is not None


@pytest.mark.parametrize(
    "begin",
    [lambda: supervise("a last test", bug, again=False), lambda: watched("a last test", bug())],
    ids=["supervised, not to be begun again", "watched"],
)
@on_loop
async def test_a_task_that_has_ended_by_an_error_is_logged_and_counted(
    begin: Callable[[], asyncio.Task[None]], caplog: pytest.LogCaptureFixture
) -> None:
    before = failures["a last test"]
    await asyncio.wait({begin()})
    assert failures["a last test"] == before + 1
    assert "task failed: a last test; it has ended" in caplog.text
    assert "RuntimeError: a bug" in caplog.text


@on_loop
async def test_a_task_that_is_cancelled_ends_and_is_no_failure() -> None:
    async def answer() -> int:
        return 42

    async def wait() -> None:
        await asyncio.Event().wait()

    for task in (supervise("a quiet test", wait), watched("a quiet test", wait())):
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
    assert await watched("a quiet test", answer()) == 42
    assert failures["a quiet test"] == 0


WHAT_NOBODY_WATCHES = """
import asyncio, gc, logging, threading
import uvloop
from lean_selector.tasks import failures, watch_process

class Resource:
    def __del__(self):
        raise RuntimeError("of the finaliser")

async def fails():
    raise RuntimeError("of the task")

def exits():
    raise SystemExit

async def story():
    loop = asyncio.get_running_loop()
    watch_process(loop)
    loop.call_soon({}.__getitem__, "of the callback")
    loop.call_later(0.001, {}.__getitem__, "of the timer")
    for target in ({}.__getitem__, exits):
        args = ("of the thread",) if target is not exits else ()
        thread = threading.Thread(target=target, args=args, name="worker")
        thread.start()
        thread.join()
    task = asyncio.create_task(fails())
    await asyncio.wait({task})
    del task
    Resource()
    gc.collect()
    loop.call_exception_handler({"message": "no exception at all"})
    while failures["callback of the loop"] < 3:
        await asyncio.sleep(0.001)

logging.basicConfig(format="%(message)s")
uvloop.run(story())
print(sorted(failures.items()))
"""


def test_what_callbacks_threads_finalisers_and_forgotten_tasks_raise_is_logged_and_counted() -> (
    None
):
    """In a process of its own: these hooks are the process's."""
    done = subprocess.run(
        [sys.executable, "-c", WHAT_NOBODY_WATCHES], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "[('callback of the loop', 3), ('finaliser', 1), "
        "('task without a name', 1), ('thread', 1)]\n"
    )
    for of in ("callback", "timer", "thread", "task", "finaliser"):
        assert f"of the {of}" in done.stderr
    assert "task failed: thread; worker has ended" in done.stderr
    assert "no exception at all" in done.stderr
