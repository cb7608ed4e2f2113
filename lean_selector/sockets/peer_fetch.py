"""One GET from a peer that helps at start, in a thread, because name look-up and TLS block.

The thread only waits and copies: what it received is read by the loop's thread, in slices. It is a
daemon and is never waited for, so that a peer that hangs delays neither the next peer nor the end
of the process. http.client knows no proxies, which the environment may name for other traffic.
"""

import asyncio
import contextlib
import http.client
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar
from urllib.parse import urlsplit

_READ_BYTES = 256 * 1024

T = TypeVar("T")


class PeerFailed(Exception):
    """Nothing usable from this peer; the message is one clear line, `status` that of its answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class PeerFetch(Generic[T]):
    """Starts at once. `done` gets what was read, or PeerFailed; it may be dropped at any time."""

    def __init__(
        self,
        peer: str,
        path: str,
        timeout_s: float,
        max_bytes: int,
        read: Callable[[bytes], T],
    ) -> None:
        """`peer` is a base URL; `timeout_s` bounds each wait of the thread, not their sum.

        `read` takes the body apart, in the thread: it should be quick, as Python runs one at a
        time.
        """
        self.progress = 0  # grows with whatever arrives
        self._peer = peer
        self._path = path
        self._max_bytes = max_bytes
        self._read = read
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[T] = self._loop.create_future()
        threading.Thread(target=self._run, name="peer-fetch", daemon=True).start()

    def _run(self) -> None:
        result: T | Exception
        try:
            result = self._read(self._fetch())
        except PeerFailed as error:
            result = error
        except Exception as error:  # whatever it is, it is the next peer's turn
            result = PeerFailed(str(error) or type(error).__name__)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the service has stopped
            self._loop.call_soon_threadsafe(self._finish, result)

    def _finish(self, result: T | Exception) -> None:
        if self.done.done():
            return
        if isinstance(result, Exception):
            self.done.set_exception(result)
        else:
            self.done.set_result(result)

    def _fetch(self) -> bytes:
        url = urlsplit(self._peer)
        secure = url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=self._timeout_s)
        try:
            connection.request("GET", url.path + self._path, headers={"accept": "application/json"})
            response = connection.getresponse()
            self.progress += 1
            if not 200 <= response.status < 300:
                said = response.read(200).decode(errors="replace")
                raise PeerFailed(f"status {response.status}: {said}", response.status)
            return self._body(response)
        finally:
            connection.close()

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        parts: list[bytes] = []
        size = 0
        while part := response.read1(_READ_BYTES):
            self.progress += 1
            parts.append(part)
            size += len(part)
            if size > self._max_bytes:
                raise PeerFailed(f"more than {self._max_bytes} bytes")
            if self.done.cancelled():
                raise PeerFailed("given up")
        if response.length:
            raise PeerFailed(f"{response.length} bytes short of its content-length")
        return b"".join(parts)


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
