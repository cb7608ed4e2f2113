"""A file that is written again and again, in a thread that does little but wait for the disk.

The thread is a daemon: a disk that hangs keeps no process from its end.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Final, TypeVar

from lean_selector.state.directory import StateDirectory
from lean_selector.state.shapes import Stamp

# A disk that is slower than we are does not get all of a large file at once.
MOST_QUEUED_BYTES: Final = 8 << 20

T = TypeVar("T")


class _Dropped(Exception):
    """Whoever made the parts gave up."""


class _Job:
    """One file, from its first part to its last: None. What went wrong is raised where the end is
    awaited."""

    def __init__(self, work: "Callable[[_Job], object]") -> None:
        """`work` is done in the thread; its result is that of `done`."""
        self.work: Final = work
        self.done: Final = asyncio.get_running_loop().create_future()
        self.parts: SimpleQueue[bytes | _Dropped | None] = SimpleQueue()
        self.put = self.taken = 0  # bytes
        self.is_over = False
        self.moved = asyncio.Event()  # since it was cleared, something was taken, or it has failed

    def each(self, on_taken: Callable[[], object]) -> Iterator[bytes]:
        """The parts, in the thread."""
        while (part := self.parts.get()) is not None:
            if isinstance(part, _Dropped):
                raise part
            yield part
            self.taken += len(part)
            on_taken()


class FileWriter:
    """From the thread of the loop. One file is written at a time: `begin`, `add` parts, `end`."""

    def __init__(self, directory: StateDirectory, name: str) -> None:
        self._directory = directory
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._job: _Job | None = None  # between `begin` and its end
        self._idle = asyncio.Event()
        self._idle.set()
        self.spent_s = 0.0  # processor time of the thread, ever
        self.bytes = 0  # of the file that was written last
        self.begun_at: float | None = None  # monotonic; while a file is written
        threading.Thread(target=self._run, name=f"state {name}", daemon=True).start()

    def begin(self, stamp: Stamp) -> None:
        tell = self._loop.call_soon_threadsafe

        def write(job: _Job) -> int:
            parts = job.each(lambda: tell(job.moved.set))
            return self._directory.write(self._name, parts, stamp)

        self._begin(_Job(write))

    async def ask(self, question: Callable[[], T]) -> T:
        """What waits for the disk, too, and is no file. Raises what `question` raises."""
        job = _Job(lambda _: question())
        self._begin(job)
        answer: T = await job.done
        return answer

    def _begin(self, job: _Job) -> None:
        assert self._job is None, "one at a time"
        self._job = job
        self.begun_at = time.monotonic()
        self._idle.clear()
        self._jobs.put(job)

    async def add(self, part: bytes) -> None:
        """Waits where the disk is slower than we are."""
        job = self._job
        assert job is not None
        job.put += len(part)
        job.parts.put(part)
        while job.put - job.taken > MOST_QUEUED_BYTES and not job.is_over:
            await job.moved.wait()
            job.moved.clear()

    async def end(self) -> None:
        """The file is on disk. Raises OSError; then the one that was is still there."""
        job = self._job
        assert job is not None
        job.parts.put(None)
        self.bytes = await job.done

    def drop(self) -> None:
        """No more parts will come. Nothing happens where no file is being written."""
        if self._job is not None:
            self._job.parts.put(_Dropped())

    async def idle(self) -> None:
        """Nothing is being written."""
        await self._idle.wait()

    def close(self) -> None:
        self.drop()
        self._jobs.put(None)

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._work(job)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _work(self, job: _Job) -> None:
        result: object = None
        error: Exception | None = None
        try:
            result = job.work(job)
        except Exception as failed:
            error = failed
        self._loop.call_soon_threadsafe(self._ended, job, result, error, time.thread_time())

    def _ended(self, job: _Job, result: object, error: Exception | None, spent_s: float) -> None:
        self.spent_s = spent_s
        self._job = None
        self.begun_at = None
        self._idle.set()
        job.is_over = True
        job.moved.set()
        if job.done.cancelled():
            return
        if error is None:
            job.done.set_result(result)
        else:
            job.done.set_exception(error)
            job.done.exception()  # it is read where the end is awaited, if it still is
