"""Calls of a selector that runs beside the gateway, over TCP or a UNIX socket, on kept connections.

A selector that does not answer is left alone for a moment, so that no request waits for it twice.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Final

import msgspec

from lean_selector.gateway.answer_head import AnswerHead
from lean_selector.gateway.endpoint import Endpoint
from lean_selector.gateway.selector_answers import Told
from lean_selector.gateway.worker_connection import Receiver, WorkerConnection
from lean_selector.outbound.connecting import Resolve, connected, reason
from lean_selector.outbound.credentials import Credentials

AGAIN_AFTER_S: Final = 0.5
_MOST_BODY_BYTES: Final = 64 << 20


class SelectorAway(Exception):
    """No answer; the message says why."""


class _Collecting(Receiver):
    """A whole answer."""

    def __init__(self) -> None:
        self.status = 0
        self.pieces: list[bytes] = []
        self.size = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, head: AnswerHead) -> bool:
        self.status = head.status
        return True

    def on_body(self, data: bytes) -> None:
        self.size += len(data)
        if self.size <= _MOST_BODY_BYTES:
            self.pieces.append(data)

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_lost(self, reason: str, is_stale: bool) -> None:
        if not self.done.done():
            self.done.set_exception(_Stale(reason) if is_stale else SelectorAway(reason))
            self.done.exception()  # whoever asked may be gone


class _Stale(SelectorAway):
    """The connection had been kept for too long."""


class SelectorLink:
    """`target` is `http://host:port`, `https://host:port` or `unix:PATH`."""

    def __init__(
        self,
        target: str,
        resolve: Resolve,
        timeout_s: float,
        clock: Callable[[], float],
        credentials: Credentials | None = None,
    ) -> None:
        """Raises ValueError for what is no target."""
        self._credentials = Credentials() if credentials is None else credentials
        self.target: Final = target
        self._path = target.removeprefix("unix:") if target.startswith("unix:") else None
        self.endpoint = Endpoint("http://selector" if self._path else target, 0, clock())
        self._resolve = resolve
        self._timeout_s = timeout_s
        self._clock = clock
        self._away_until = 0.0
        self._answers = 0  # ever
        self.failures = 0

    @property
    def is_away(self) -> bool:
        return self._clock() < self._away_until

    def sweep(self, now: float) -> None:
        """About every second."""
        self.endpoint.sweep(now, math.inf)  # calls have a limit of their own

    async def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        content_type: str = "application/json",
        *,
        insists: bool = False,
    ) -> tuple[int, bytes]:
        """Status and body. `insists`: also while it is thought to be away. Raises SelectorAway."""
        if self.is_away and not insists:
            raise SelectorAway("it did not answer a moment ago")
        answers = self._answers
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return await self._asked(method, path, body, content_type, fresh=False)
                except _Stale:
                    return await self._asked(method, path, body, content_type, fresh=True)
        except TimeoutError:
            why = f"no answer in {self._timeout_s:g} s"
            if self._answers > answers:  # others it answered: this one waits in its queue
                raise SelectorAway(why) from None
            raise self._away(why) from None
        except SelectorAway as error:
            raise self._away(str(error)) from None
        except (OSError, ValueError) as error:
            raise self._away(reason(error)) from None

    async def _asked(
        self, method: str, path: str, body: bytes, content_type: str, *, fresh: bool
    ) -> tuple[int, bytes]:
        endpoint = self.endpoint
        connection = None if fresh else endpoint.kept()
        if connection is None:
            connection = await self._connected()
        collecting = _Collecting()
        head = (
            f"{method} {path} HTTP/1.1\r\n"
            f"host: {endpoint.url.authority}\r\ncontent-length: {len(body)}\r\n"
            + (f"content-type: {content_type}\r\n" if body else "")
        ).encode()
        authorization = self._credentials.authorization()
        if authorization is not None:
            head += b"authorization: " + authorization + b"\r\n"
        connection.send(head + b"\r\n", body, collecting, False)
        try:
            await collecting.done
        except asyncio.CancelledError:
            connection.drop()
            raise
        self._answers += 1
        return collecting.status, b"".join(collecting.pieces)

    async def _connected(self) -> WorkerConnection:
        def new() -> WorkerConnection:
            return WorkerConnection(self.endpoint)

        if self._path is None:
            url, credentials = self.endpoint.url, self._credentials
            return await connected(
                self._resolve,
                url,
                credentials.trust.context() if url.is_secure else None,
                self._timeout_s,
                new,
                tls_name=credentials.tls_name,
            )
        loop = asyncio.get_running_loop()
        return (await loop.create_unix_connection(new, self._path))[1]

    def _away(self, why: str) -> SelectorAway:
        self.failures += 1
        self._away_until = self._clock() + AGAIN_AFTER_S
        return SelectorAway(why)


def told(answer: bytes) -> Told:
    """An answer that is an error, whoever gave it."""
    try:
        return msgspec.json.decode(answer, type=Told)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Told("")
