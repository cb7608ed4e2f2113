"""Requests of engines and API servers on the service's own loop: HTTP/1.1, also over TLS.

Each request has a connection of its own, so that none meets one that the other side has just let
go. Names are looked up by whom the client is given, beside the loop (D29); a TLS handshake
costs the loop a millisecond or two. Redirects are answers like others. Proxies of the environment
are for other traffic.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final

from lean_selector import __version__
from lean_selector.outbound.allowed_endpoints import AllowedEndpoints
from lean_selector.outbound.answer import OutboundAnswer
from lean_selector.outbound.connecting import Resolve as Resolve
from lean_selector.outbound.connecting import SocketAddress as SocketAddress
from lean_selector.outbound.connecting import connected, reason
from lean_selector.outbound.exchange import Exchange
from lean_selector.outbound.failure import OutboundFailed, OutboundTimedOut
from lean_selector.outbound.lines import Lines
from lean_selector.outbound.token_file import TokenFile
from lean_selector.outbound.trust import Trust
from lean_selector.outbound.url import Url

TIMEOUT_S: Final = 5.0
MOST_BODY_BYTES: Final = 4 << 20
MOST_LINE_BYTES: Final = 4 << 20
_SAID_CHARACTERS: Final = 200  # of an answer that is an error, in the line that tells of it


class OutboundClient:
    """From the loop's thread only. Keeps nothing between two requests but its token and trust."""

    def __init__(
        self,
        resolve: Resolve,
        *,
        token: TokenFile | None = None,
        trust: Trust | None = None,
        allowed: AllowedEndpoints | None = None,
    ) -> None:
        """`token` goes with every request; `trust` says who is believed over TLS, `allowed` where
        a request may go at all."""
        self._allowed = allowed
        self._resolve = resolve
        self._token = token
        self._trust = Trust() if trust is None else trust

    async def get(
        self,
        url: str,
        *,
        timeout_s: float = TIMEOUT_S,
        most_bytes: int = MOST_BODY_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> OutboundAnswer:
        """`request` of a GET."""
        return await self.request(
            "GET", url, timeout_s=timeout_s, most_bytes=most_bytes, headers=headers
        )

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        timeout_s: float = TIMEOUT_S,
        most_bytes: int = MOST_BODY_BYTES,
    ) -> OutboundAnswer:
        """`request` of a POST of JSON."""
        headers = {"content-type": "application/json"}
        return await self.request(
            "POST", url, body, timeout_s=timeout_s, most_bytes=most_bytes, headers=headers
        )

    async def request(
        self,
        method: str,
        url: str,
        body: bytes = b"",
        *,
        timeout_s: float = TIMEOUT_S,
        most_bytes: int = MOST_BODY_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> OutboundAnswer:
        """The answer, whatever its status. All of it takes `timeout_s` at most.

        Raises OutboundFailed where there is none, and for a body of more than `most_bytes`.
        """
        with _told_of(f"{method} {url}", timeout_s):
            async with (
                asyncio.timeout(timeout_s),
                self._answering(method, url, body, headers, timeout_s) as exchange,
            ):
                pieces: list[bytes] = []
                size = 0
                while (piece := await exchange.piece()) is not None:
                    size += len(piece)
                    if size > most_bytes:
                        raise OutboundFailed(
                            f"the answer has more than {most_bytes} bytes", exchange.status
                        )
                    pieces.append(piece)
                return OutboundAnswer(exchange.status, exchange.headers, b"".join(pieces))

    async def text(
        self, url: str, *, timeout_s: float = TIMEOUT_S, most_bytes: int = MOST_BODY_BYTES
    ) -> bytes:
        """The body of a 2xx answer to a GET; any other is an OutboundFailed that cites it."""
        answer = await self.get(url, timeout_s=timeout_s, most_bytes=most_bytes)
        if not 200 <= answer.status < 300:
            raise OutboundFailed(f"GET {url}: {_cited(answer.status, answer.body)}", answer.status)
        return answer.body

    @asynccontextmanager
    async def lines(
        self,
        url: str,
        *,
        timeout_s: float = TIMEOUT_S,
        silence_s: float,
        most_bytes: int = MOST_LINE_BYTES,
    ) -> AsyncIterator[Lines]:
        """A GET whose 2xx answer comes line by line; leaving the context ends it.

        `timeout_s` bounds the wait for its head, `silence_s` that for more of it, `most_bytes` a
        line. Raises OutboundFailed, and so do the lines.
        """
        with _told_of(f"GET {url}", timeout_s):
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(timeout_s):
                    exchange = await stack.enter_async_context(
                        self._answering("GET", url, b"", None, timeout_s)
                    )
                    if not 200 <= exchange.status < 300:
                        said = await exchange.piece() or b""
                        raise OutboundFailed(_cited(exchange.status, said), exchange.status)
                yield Lines(exchange, silence_s, most_bytes)

    @asynccontextmanager
    async def _answering(
        self,
        method: str,
        url: str,
        body: bytes,
        headers: Mapping[str, str] | None,
        timeout_s: float,
    ) -> AsyncIterator[Exchange]:
        """An exchange whose head has come."""
        to = Url(url)
        request = self._head(method, to, len(body), headers) + body
        context = self._trust.context() if to.is_secure else None
        exchange = await connected(
            self._resolve, to, context, timeout_s, lambda: Exchange(request), self._allowed
        )
        try:
            await exchange.head()
            yield exchange
        finally:
            exchange.close()

    def _head(
        self, method: str, to: Url, body_bytes: int, headers: Mapping[str, str] | None
    ) -> bytes:
        lines = [
            f"{method} {to.target} HTTP/1.1",
            f"host: {to.authority}",
            f"user-agent: lean-selector/{__version__}",
            "accept: */*",
            "accept-encoding: identity",
            "connection: close",
        ]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body_bytes or method == "POST":
            lines.append(f"content-length: {body_bytes}")
        head = "\r\n".join(lines).encode("latin-1")
        if self._token is not None:
            head += b"\r\nauthorization: Bearer " + self._token.token()
        return head + b"\r\n\r\n"


@contextmanager
def _told_of(asked: str, timeout_s: float) -> Iterator[None]:
    """Whatever goes wrong inside becomes an OutboundFailed that begins with what was asked."""
    try:
        yield
    except TimeoutError:
        raise OutboundTimedOut(f"{asked}: no answer in {timeout_s:g} s") from None
    except OutboundFailed as error:
        raise OutboundFailed(f"{asked}: {error.message}", error.status) from None
    except (OSError, ValueError) as error:
        raise OutboundFailed(f"{asked}: {reason(error)}") from None


def _cited(status: int, body: bytes) -> str:
    said = body[:_SAID_CHARACTERS].decode(errors="replace").strip()
    return f"status {status}: {said}" if said else f"status {status}"
