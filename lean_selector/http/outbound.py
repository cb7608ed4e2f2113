"""The service's own HTTP/1.1 requests, sent on its event loop, with or without TLS.

Each request gets a new connection, because a server may have just closed a reused one. Names are
resolved outside of the event loop's thread (decision D29). A TLS handshake occupies the event loop
for a millisecond or two. Redirects, and proxy settings of the environment, are ignored."""

import asyncio
import os
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Final, NamedTuple

from lean_selector import __version__
from lean_selector.http.allowed_endpoints import AllowedEndpoints
from lean_selector.http.client import AnswerHead, ClientConnection, Upstream
from lean_selector.http.trust import Credentials
from lean_selector.http.urls import Url

TIMEOUT_S: Final = 5.0
MOST_BODY_BYTES: Final = 4 << 20
MOST_LINE_BYTES: Final = 4 << 20
# Above this many unread bytes, reading pauses. One read of the kernel may exceed it.
MOST_WAITING_BYTES: Final = 256 * 1024
_FAULT: Final = re.compile(rb'^\s*\{"error": *(?:\{"message": *)?"((?:[^"\\]|\\.)*)"')
_CITED_CHARACTERS: Final = 200  # the error text quotes at most this much of an answer's body

# As resolvers return them: the family, and (ip, port) or more for IPv6.
SocketAddress = tuple[int, tuple[Any, ...] | bytes]
Resolve = Callable[[str, int], Awaitable[list[SocketAddress]]]


class OutboundFailed(Exception):
    """A request to another server failed. The text is one line and names the request. `status` is
    the HTTP status of the answer, if an answer arrived."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class OutboundTimedOut(OutboundFailed):
    """The answer to a request did not arrive in time."""


class OutboundAnswer(NamedTuple):
    """A complete answer to a request, whatever its status."""

    status: int
    body: bytes


# -- connecting ------------------------------------------------------------------------------------


async def connect(
    connection: ClientConnection,
    resolve: Resolve,
    context: ssl.SSLContext | None,
    timeout_s: float,
    allowed: AllowedEndpoints | None = None,
    tls_name: str | None = None,
) -> None:
    """Connect to the upstream server if `allowed` permits this. The addresses of the host are tried
    in turn, each for a share of `timeout_s`. The server's certificate must have the name
    `tls_name`; if `tls_name` is None, the name of the host. Raises OSError."""
    to, ends = connection.upstream.url, time.monotonic() + timeout_s
    if allowed is not None:
        allowed.check(to.origin)
    addresses = await resolve(to.host, to.port)
    if allowed is not None:
        addresses = allowed.among(to.origin, addresses)
    failure: Exception = OSError("the name has no addresses")
    for at, address in enumerate(addresses):
        share_s = max(0.0, ends - time.monotonic()) / (len(addresses) - at)
        try:
            async with asyncio.timeout(share_s):
                await _connect(connection, address, context, tls_name or to.host)
            if connection.is_open:
                return
            failure = OSError("the connection ended before an answer")
        except TimeoutError:
            failure = OSError(f"no connection in {share_s:.1f} s")
        except OSError as error:
            failure = error
    raise failure


async def _connect(
    connection: ClientConnection, address: SocketAddress, context: ssl.SSLContext | None, host: str
) -> None:
    loop = asyncio.get_running_loop()
    family, where = address
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setblocking(False)
        await loop.sock_connect(opened, where)
        await loop.create_connection(
            lambda: connection,
            sock=opened,
            ssl=context,
            server_hostname=host if context is not None else None,
        )
    except BaseException:
        opened.close()
        raise


def reason(error: Exception) -> str:
    """Return a few words that say why a connection to a server failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError | socket.gaierror):  # errno is not a system error then
        return error.strerror or str(error)
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


# -- answers ---------------------------------------------------------------------------------------


class Exchange:
    """The answer to the request on `connection`, read in pieces.

    Reading pauses while the caller leaves many bytes unread. Error texts do not name the
    request."""

    def __init__(self, connection: ClientConnection) -> None:
        self.status = 0  # 0 until `head` returns
        self._connection = connection
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_over = False
        self._failure: str | None = None
        self._news: asyncio.Future[None] | None = None

    async def head(self) -> None:
        """Wait for the head of the answer. Raises OutboundFailed."""
        while not self.status:
            await self._wait()

    async def piece(self) -> bytes | None:
        """Return the next bytes of the body; None at the end. Raises OutboundFailed."""
        while not self._pieces:
            if self._is_over:
                return None
            await self._wait()
        taken = self._pieces.popleft()
        self._waiting_bytes -= len(taken)
        if self._waiting_bytes <= MOST_WAITING_BYTES // 2:
            self._connection.resume()
        return taken

    async def body(self, most_bytes: int) -> bytes:
        """Return the whole body. Raises OutboundFailed, also for a body above `most_bytes`."""
        pieces: list[bytes] = []
        size = 0
        while (piece := await self.piece()) is not None:
            size += len(piece)
            if size > most_bytes:
                raise OutboundFailed(f"the answer has more than {most_bytes} bytes", self.status)
            pieces.append(piece)
        return b"".join(pieces)

    async def _wait(self) -> None:
        if self._failure is not None:
            raise OutboundFailed(self._failure)
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        finally:
            self._news = None

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # -- called by the connection ------------------------------------------------------------------

    def on_head(self, head: AnswerHead) -> bool:
        self.status = head.status
        self._wake()
        return True

    def on_body(self, data: bytes, is_last: bool) -> None:
        self._pieces.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > MOST_WAITING_BYTES:
            self._connection.pause()
        self._wake()

    def on_end(self) -> None:
        self._is_over = True
        self._wake()

    def on_lost(self, reason: str, is_stale: bool) -> None:
        self._failure = reason
        self._wake()


# -- the client ------------------------------------------------------------------------------------


class OutboundClient:
    """Sends HTTP requests, each on a new connection. Used only on the event loop's thread."""

    def __init__(
        self,
        resolve: Resolve,
        credentials: Credentials | None = None,
        allowed: AllowedEndpoints | None = None,
    ) -> None:
        """`credentials` are sent with every request; `allowed` restricts the destinations."""
        self._allowed = allowed
        self._resolve = resolve
        self._credentials = Credentials() if credentials is None else credentials

    async def get(
        self, url: str, *, timeout_s: float = TIMEOUT_S, most_bytes: int = MOST_BODY_BYTES
    ) -> OutboundAnswer:
        """Send a GET request and return the answer, whatever its status. Raises OutboundFailed."""
        return await self.request("GET", url, timeout_s=timeout_s, most_bytes=most_bytes)

    async def request(
        self,
        method: str,
        url: str,
        body: bytes = b"",
        *,
        timeout_s: float = TIMEOUT_S,
        most_bytes: int = MOST_BODY_BYTES,
    ) -> OutboundAnswer:
        """Send a request and return the answer, whatever its status. `timeout_s` limits the total
        time; `body` is JSON. Raises OutboundFailed, also for an answer above `most_bytes`."""
        with _failures_of(f"{method} {url}", timeout_s):
            async with (
                asyncio.timeout(timeout_s),
                self.exchange(method, url, body, timeout_s) as exchange,
            ):
                return OutboundAnswer(exchange.status, await exchange.body(most_bytes))

    async def text(
        self, url: str, *, timeout_s: float = TIMEOUT_S, most_bytes: int = MOST_BODY_BYTES
    ) -> bytes:
        """Send a GET request and return the body of a 2xx answer. For another status, raises
        OutboundFailed, which quotes the body."""
        answer = await self.get(url, timeout_s=timeout_s, most_bytes=most_bytes)
        if not 200 <= answer.status < 300:
            raise OutboundFailed(f"GET {url}: {_cited(answer.status, answer.body)}", answer.status)
        return answer.body

    async def lines(
        self, url: str, *, silence_s: float, most_bytes: int = MOST_LINE_BYTES
    ) -> AsyncGenerator[bytes, None]:
        """Send a GET, and yield the lines of the 2xx answer without their line ends; first an empty
        one, once the head is there. Closing the iterator ends the request. `silence_s` limits each
        wait for more data, `most_bytes` a line's length. Raises OutboundFailed."""
        with _failures_of(f"GET {url}", TIMEOUT_S):
            async with AsyncExitStack() as open_:
                async with asyncio.timeout(TIMEOUT_S):
                    exchange = await open_.enter_async_context(
                        self.exchange("GET", url, b"", TIMEOUT_S)
                    )
                    await succeeded(exchange)
                yield b""
                rest, is_over = b"", False
                while not is_over:
                    try:
                        async with asyncio.timeout(silence_s):
                            piece = await exchange.piece()
                    except TimeoutError:
                        raise OutboundFailed(f"nothing received for {silence_s:g} s") from None
                    is_over = piece is None
                    *whole, rest = (rest + (piece or b"")).split(b"\n")
                    if len(rest) > most_bytes:
                        raise OutboundFailed(f"a line has more than {most_bytes} bytes")
                    for line in whole:
                        yield line
                if rest:
                    yield rest

    @asynccontextmanager
    async def exchange(
        self, method: str, url: str, body: bytes, timeout_s: float
    ) -> AsyncIterator[Exchange]:
        """Send a request, and yield its answer. Leaving `async with` ends the request. `timeout_s`
        limits only the time to connect. Raises OutboundFailed, OSError and ValueError."""
        to, credentials = Url(url), self._credentials
        context = credentials.trust.context() if to.is_secure else None
        connection = ClientConnection(Upstream(to.origin))
        await connect(
            connection, self._resolve, context, timeout_s, self._allowed, credentials.tls_name
        )
        try:
            exchange = Exchange(connection)
            connection.send(self._head(method, to, len(body)), body, exchange)
            await exchange.head()
            yield exchange
        finally:
            connection.drop()

    def _head(self, method: str, to: Url, body_bytes: int) -> bytes:
        lines = [
            f"{method} {to.target} HTTP/1.1",
            f"host: {to.authority}",
            f"user-agent: lean-selector/{__version__}",
            "accept: */*",
            "accept-encoding: identity",
            "connection: close",
        ]
        if body_bytes or method == "POST":
            lines += ["content-type: application/json", f"content-length: {body_bytes}"]
        head = "\r\n".join(lines).encode("latin-1")
        authorization = self._credentials.authorization()
        if authorization is not None:
            head += b"\r\nauthorization: " + authorization
        return head + b"\r\n\r\n"


async def succeeded(exchange: Exchange) -> None:
    """Unless the status is 2xx, raise an OutboundFailed that quotes the start of the body."""
    if not 200 <= exchange.status < 300:
        said = b""
        while len(said) < _CITED_CHARACTERS and (piece := await exchange.piece()) is not None:
            said += piece
        raise OutboundFailed(_cited(exchange.status, said), exchange.status)


@contextmanager
def _failures_of(asked: str, timeout_s: float) -> Iterator[None]:
    """Convert exceptions of a `with` block to OutboundFailed. `asked` names the failed request."""
    try:
        yield
    except TimeoutError:
        raise OutboundTimedOut(f"{asked}: no answer in {timeout_s:g} s") from None
    except OutboundFailed as error:
        raise OutboundFailed(f"{asked}: {error.message}", error.status) from None
    except (OSError, ValueError) as error:
        raise OutboundFailed(f"{asked}: {reason(error)}") from None


def _cited(status: int, body: bytes) -> str:
    fault = _FAULT.search(body)  # of an error in JSON its text alone
    said = (fault[1] if fault else body)[:_CITED_CHARACTERS].decode(errors="replace").strip()
    return f"status {status}: {said}" if said else f"status {status}"
