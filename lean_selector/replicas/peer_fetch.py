"""One GET from a peer that helps at start, taken in pieces on the loop.

What was received is taken apart in a thread, as it may be a gigabyte. The thread is a daemon and is
never waited for, so that a fetch that was given up delays neither the next peer nor the end of the
process.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from lean_selector.http.outbound import OutboundClient, OutboundFailed, reason, succeeded

T = TypeVar("T")


class PeerFailed(Exception):
    """Nothing usable from this peer; the message is one clear line, `status` that of its answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class PeerFetch(Generic[T]):
    """Starts at once. `done` gets what was read, or PeerFailed; it may be cancelled at any time."""

    def __init__(
        self,
        client: OutboundClient,
        url: str,
        timeout_s: float,
        max_bytes: int,
        read: Callable[[bytes], T],
    ) -> None:
        """`timeout_s` bounds connecting alone; see `fetched`.

        `read` takes the body apart, in the thread: it should be quick, as Python runs one at a
        time.
        """
        self.progress = 0  # grows with whatever arrives
        self._client = client
        self._url = url
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._read = read
        self.done = asyncio.get_running_loop().create_task(self._run())
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _run(self) -> T:
        try:
            pieces = await self._fetched()
            return await _in_thread(lambda: self._read(b"".join(pieces)))
        except OutboundFailed as error:
            raise PeerFailed(error.message, error.status) from None
        except PeerFailed:
            raise
        except Exception as error:  # whatever it is, it is the next peer's turn
            raise PeerFailed(reason(error)) from None

    async def _fetched(self) -> list[bytes]:
        pieces: list[bytes] = []
        size = 0
        async with self._client.exchange("GET", self._url, b"", self._timeout_s) as exchange:
            self.progress += 1
            await succeeded(exchange)
            while (piece := await exchange.piece()) is not None:
                self.progress += 1
                pieces.append(piece)
                size += len(piece)
                if size > self._max_bytes:
                    raise PeerFailed(f"more than {self._max_bytes} bytes")
        return pieces


async def _in_thread(work: Callable[[], T]) -> T:
    """What `work` returns or raises; where it is cancelled, the thread goes on for nothing."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | Exception) -> None:
        if done.done():
            return
        if isinstance(result, Exception):
            done.set_exception(result)
        else:
            done.set_result(result)

    def run() -> None:
        result: T | Exception
        try:
            result = work()
        except Exception as error:
            result = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the service has stopped
            loop.call_soon_threadsafe(finish, result)

    threading.Thread(target=run, name="peer-fetch", daemon=True).start()
    return await done


async def fetched(fetch: PeerFetch[T], left_s: float, peers_left: int) -> T:
    """What a fetch brings within `left_s`; raises PeerFailed. It is given up at the end.

    A peer that sends nothing for its share of the time is given up, so that one that hangs leaves
    some to the others; one that sends may use all.
    """
    ends = time.monotonic() + left_s
    share_s = left_s / peers_left
    try:
        while True:
            progress = fetch.progress
            wait_s = min(share_s, ends - time.monotonic())
            done, _ = await asyncio.wait({fetch.done}, timeout=max(wait_s, 0.0))
            if done:
                return fetch.done.result()
            if time.monotonic() >= ends or fetch.progress == progress:
                raise PeerFailed(f"no answer in {time.monotonic() - ends + left_s:.1f} s")
    finally:
        fetch.done.cancel()
