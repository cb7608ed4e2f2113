"""A small HTTP/1.1 keep-alive client for the simulated traffic, whose answers it measures."""

import asyncio
import socket
from urllib.parse import urlsplit

import msgspec

from lean_selector.http.client import ClientConnection, Upstream
from lean_selector.http.outbound import Exchange, OutboundFailed, SocketAddress, connect

# Longer than any answer should take; a request parked in the service's queue may come close.
ANSWER_TIMEOUT_S = 60.0
_MOST_ANSWER_BYTES = 1 << 30  # dumps


class ServiceError(Exception):
    """The service did not answer, or not with the status that was expected. A readable line."""


class HttpClient:
    """Requests to one service. As many connections as the caller has requests under way."""

    def __init__(self, url: str) -> None:
        """url: `http://host:port`. Raises ServiceError for anything else."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "http" or parts.hostname is None or port is None:
            raise ServiceError(f"not an http://host:port URL: {url}")
        self._upstream = Upstream(url)
        self._head_end = b" HTTP/1.1\r\n" + self._upstream.host_line + b"\r\n"

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer. body, if any, is sent as JSON.

        Raises ServiceError when there is no answer, whatever the reason.
        """
        head = method.encode() + b" " + path.encode() + self._head_end
        if body:
            head += b"content-type: application/json\r\n"
        if body or method == "POST":
            head += b"content-length: %d\r\n" % len(body)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                connection = self._upstream.kept()
                if connection is None:
                    connection = ClientConnection(self._upstream)
                    await connect(connection, _resolve, None, ANSWER_TIMEOUT_S)
                try:
                    exchange = Exchange(connection)
                    connection.send(head + b"\r\n", body, exchange)
                    await exchange.head()
                    return exchange.status, await exchange.body(_MOST_ANSWER_BYTES)
                except BaseException:
                    connection.drop()  # what it answers later is not wanted
                    raise
        except TimeoutError as error:
            raise ServiceError(f"{method} {path}: no answer in {ANSWER_TIMEOUT_S:.0f} s") from error
        except (OSError, OutboundFailed) as error:
            raise ServiceError(f"{method} {path}: {error}") from error

    async def call(self, method: str, path: str, body: object = None) -> bytes:
        """The body of a 2xx answer; raises ServiceError with the service's words otherwise."""
        encoded = b"" if body is None else msgspec.json.encode(body)
        status, answer = await self.request(method, path, encoded)
        if not 200 <= status < 300:
            text = answer.decode(errors="replace")[:300]
            raise ServiceError(f"{method} {path}: {status} {text}")
        return answer

    def close(self) -> None:
        """Close the connections; call it when no request is under way."""
        self._upstream.close()


async def _resolve(host: str, port: int) -> list[SocketAddress]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]
