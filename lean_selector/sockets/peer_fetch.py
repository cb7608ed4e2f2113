"""One GET from a peer that helps at start, in a thread, because name look-up and TLS block.

The thread only waits and copies: what it received is read by the loop's thread, in slices. It is a
daemon and is never waited for, so that a peer that hangs delays neither the next peer nor the end
of the process. http.client knows no proxies, which the environment may name for other traffic.
"""

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from lean_selector.outbound.allowed_endpoints import AllowedEndpoints
from lean_selector.outbound.connecting import reason
from lean_selector.outbound.credentials import Credentials

_READ_BYTES = 256 * 1024

_PORTS = {"http": 80, "https": 443}

T = TypeVar("T")
Addresses = list[tuple[int, tuple[Any, ...]]]  # the family, and what is connected to


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
        allowed: AllowedEndpoints | None = None,
    ) -> None:
        """`peer` is a base URL; `timeout_s` bounds each wait of the thread, not their sum. Where
        that is somebody else's word, `allowed` says which of its addresses may be connected to.

        `read` takes the body apart, in the thread: it should be quick, as Python runs one at a
        time.
        """
        self.progress = 0  # grows with whatever arrives
        self._peer = peer
        self._path = path
        self._max_bytes = max_bytes
        self._read = read
        self._timeout_s = timeout_s
        self._allowed = allowed
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
        host = url.hostname or ""
        tls = credentials.trust.context() if url.scheme == "https" else None
        connection = _Connection(
            host,
            url.port or _PORTS[url.scheme],
            self._timeout_s,
            (lambda found: found) if self._allowed is None else self._among,
            tls,
            credentials.tls_name or host,
        )
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

    def _among(self, addresses: Addresses) -> Addresses:
        assert self._allowed is not None
        return self._allowed.among(self._peer, addresses)

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


class _Connection(http.client.HTTPConnection):
    """To one of those addresses of a name that `among` leaves; over TLS with a certificate for
    `tls_name`, whatever the host is called."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout_s: float,
        among: Callable[[Addresses], Addresses],
        tls: ssl.SSLContext | None,
        tls_name: str,
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self.default_port = _PORTS["http" if tls is None else "https"]
        self._among, self._tls, self._tls_name = among, tls, tls_name

    def connect(self) -> None:
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        connection = _connected(self._among([(each[0], each[4]) for each in found]), self.timeout)
        if self._tls is None:
            self.sock = connection
            return
        try:
            self.sock = self._tls.wrap_socket(connection, server_hostname=self._tls_name)
        except BaseException:
            connection.close()
            raise


def _connected(addresses: Addresses, timeout_s: float | None) -> socket.socket:
    """To the first address that takes us. Raises OSError."""
    failure = OSError("the name has no addresses")
    for family, where in addresses:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout_s)
            connection.connect(where)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


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
