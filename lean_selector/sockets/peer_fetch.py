"""One GET from a peer that helps at start, in a thread, because name look-up and TLS block.

The thread only waits and copies: what it received is read by the loop's thread, in slices. It is a
daemon and is never waited for, so that a peer that hangs delays neither the next peer nor the end
of the process. http.client knows no proxies, which the environment may name for other traffic.
"""

import asyncio
import contextlib
import http.client
import ssl
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar
from urllib.parse import urlsplit

from lean_selector.outbound.connecting import reason
from lean_selector.outbound.credentials import Credentials

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
        credentials: Credentials | None = None,
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
        self._credentials = Credentials() if credentials is None else credentials
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
            result = PeerFailed(reason(error))
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
        url, credentials = urlsplit(self._peer), self._credentials
        host, timeout_s = url.hostname or "", self._timeout_s
        connection = http.client.HTTPConnection(host, url.port, timeout=timeout_s)
        if url.scheme == "https":
            context = credentials.trust.context()
            connection = _OverTls(host, url.port, timeout_s, context, credentials.tls_name or host)
        headers = {"accept": "application/json"}
        authorization = credentials.authorization()
        if authorization is not None:
            headers["authorization"] = authorization.decode("ascii")
        try:
            connection.request("GET", url.path + self._path, headers=headers)
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


class _OverTls(http.client.HTTPConnection):
    """With a certificate for `tls_name`, whatever the host is called."""

    default_port = http.client.HTTPS_PORT

    def __init__(
        self,
        host: str,
        port: int | None,
        timeout_s: float,
        context: ssl.SSLContext,
        tls_name: str,
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._tls, self._tls_name = context, tls_name

    def connect(self) -> None:
        super().connect()
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._tls_name)


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
