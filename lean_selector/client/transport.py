"""HTTP with httpx: calls to a service, and streams from workers.

Parses the address of a service, and converts httpx's errors to those of client/errors.py."""

import asyncio
import contextlib
import ssl
from typing import Self, TypeVar

import httpx
import msgspec

from lean_selector.client.calls import Call
from lean_selector.client.client_settings import Access, Timeouts
from lean_selector.client.completions import error_text
from lean_selector.client.errors import (
    ClientClosed,
    ClientError,
    ServiceRefused,
    ServiceUnreachable,
    WorkerRefused,
    WorkerStreamBroken,
    WorkerUnreachable,
    service_refusal,
)

T = TypeVar("T")

# Connections to the service. A selection in the service's queue occupies one.
SERVICE_LIMITS = httpx.Limits(max_connections=512, max_keepalive_connections=64)
# A stream occupies a connection while it runs, so the caller's concurrency is the limit. Idle
# connections are kept for less than uvicorn's five seconds, so that no request is sent on a closing
# one.
WORKER_LIMITS = httpx.Limits(
    max_connections=None, max_keepalive_connections=256, keepalive_expiry=3.0
)
MAX_ERROR_BYTES = 64 * 1024  # of a worker's error body
DRAIN_S = 0.2  # for the few bytes after an engine's [DONE]

MSGPACK = "application/msgpack"


class OpenStream(msgspec.Struct, frozen=True):
    """A POST request to a worker that asks for a streamed answer."""

    worker_id: int
    endpoint: str
    body: bytes
    headers: dict[str, str]

    @property
    def url(self) -> str:
        """The URL to post to. The worker's endpoint may be registered without scheme or `/v1`."""
        scheme, found, rest = self.endpoint.rstrip("/").rpartition("://")
        version = "" if rest.endswith("/v1") else "/v1"
        return f"{scheme if found else 'http'}://{rest}{version}/completions"


def stream_request(wanted: OpenStream, timeouts: Timeouts) -> httpx.Request:
    return httpx.Request(
        "POST",
        wanted.url,
        content=wanted.body,
        headers=wanted.headers,
        extensions={"timeout": _stream_timeout(timeouts).as_dict()},
    )


# Errors of an exchange. In TLS 1.3, a server refuses our certificate after the handshake; httpx
# does not wrap this ssl.SSLError.
CALL_ERRORS = (httpx.HTTPError, ssl.SSLError)
# Errors of opening a stream; InvalidURL: the worker's registered endpoint is invalid.
OPEN_ERRORS = (httpx.HTTPError, httpx.InvalidURL)
STREAM_ERRORS = (httpx.HTTPError, httpx.StreamError)


def not_opened(wanted: OpenStream, error: Exception) -> WorkerUnreachable | WorkerStreamBroken:
    """Return the error for a request that got no response: WorkerStreamBroken if the worker timed
    out and may be working on the request, otherwise WorkerUnreachable."""
    if isinstance(error, httpx.ReadTimeout):
        return stream_broken(wanted, error)
    never_connected = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
    return WorkerUnreachable(
        wanted.worker_id, wanted.endpoint, _reason(error), never_connected=never_connected
    )


def worker_refused(wanted: OpenStream, status: int, body: bytes) -> WorkerRefused:
    return WorkerRefused(wanted.worker_id, wanted.endpoint, status, error_text(body))


def stream_broken(wanted: OpenStream, error: Exception | str) -> WorkerStreamBroken:
    reason = _reason(error) if isinstance(error, Exception) else error
    return WorkerStreamBroken(wanted.worker_id, wanted.endpoint, reason)


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind


def _retry_after_s(response: httpx.Response) -> float | None:
    """Return the seconds in a retry-after header, or None if it is missing or has a date."""
    text = response.headers.get("retry-after", "").strip()
    return float(text) if text.isdigit() else None


def _call_timeout(timeouts: Timeouts, waits: bool) -> httpx.Timeout:
    read_s = timeouts.queue_s if waits else timeouts.service_s
    return httpx.Timeout(timeouts.service_s, connect=timeouts.connect_s, read=read_s)


def _stream_timeout(timeouts: Timeouts) -> httpx.Timeout:
    return httpx.Timeout(timeouts.connect_s, read=timeouts.worker_s, write=timeouts.worker_s)


class Opened:
    """A worker's response with status 200, whose body is being read."""

    def __init__(self, asked: OpenStream, response: httpx.Response) -> None:
        self.is_done = False  # the engine has signalled the end
        self._asked = asked
        self._response = response
        self._pieces = response.aiter_raw()

    async def read(self) -> bytes | None:
        """Return the next bytes, or None at the end. Raises WorkerStreamBroken."""
        try:
            return await anext(self._pieces, None)
        except STREAM_ERRORS as error:
            raise stream_broken(self._asked, error) from error

    async def close(self) -> None:
        """Ends the response. After a complete response, the connection stays open for reuse.
        Closing an incomplete response stops the engine's work on the request."""
        with contextlib.suppress(*STREAM_ERRORS, ClientError, OSError):
            try:
                if self.is_done:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(DRAIN_S):
                            await self.read()
            finally:
                await self._response.aclose()


class ServiceConnection:
    """Connections to a selection service or slot tracker, at an http or https URL, or at
    `unix:PATH` (a UNIX socket)."""

    def __init__(self, endpoint: str, timeouts: Timeouts, access: Access | None = None) -> None:
        """Raises ValueError for an invalid endpoint, TypeError if the endpoint is not a string, and
        OSError if a certificate or key file in `access` cannot be used."""
        if not isinstance(endpoint, str):
            raise TypeError(f"expected http://, https:// or unix:PATH, not {endpoint!r}")
        self._endpoint = endpoint
        self._timeouts = timeouts
        self._access = Access() if access is None else access
        self._takes_msgpack = True  # until the service refuses it
        self._base_url = endpoint.rstrip("/")
        uds: str | None = None
        context: ssl.SSLContext | bool = False  # no TLS
        if endpoint.startswith("unix:"):
            path = endpoint.removeprefix("unix:")
            uds = path.removeprefix("//") if path.startswith("///") else path
            self._base_url = "http://localhost"
            if not uds:
                raise ValueError("unix: needs a path")
        elif endpoint.startswith("https://"):
            context = self._access.context()
        elif not endpoint.startswith("http://"):
            raise ValueError(f"expected http://, https:// or unix:PATH, not {endpoint!r}")
        transport = httpx.AsyncHTTPTransport(uds=uds, verify=context, limits=SERVICE_LIMITS)
        self._http = httpx.AsyncClient(transport=transport, trust_env=False)

    async def exchange(self, call: Call[T]) -> T:
        """Sends a call, and returns its result. Raises a subclass of ClientError."""
        if self._http.is_closed:
            raise ClientClosed(f"{self._endpoint}: the client is closed")
        try:
            response = await self._http.send(self.request(call))
            if self._wants_json(response):
                response = await self._http.send(self.request(call))
        except CALL_ERRORS as error:
            never_sent = isinstance(
                error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
            )
            raise ServiceUnreachable(
                self._endpoint, _reason(error), never_sent=never_sent
            ) from error
        return answer_of(call, response)

    def request(self, call: Call[T]) -> httpx.Request:
        timeout = _call_timeout(self._timeouts, call.waits)
        # The body is sent unchanged; a POST without a body has no content type.
        if call.has_prompt and self._takes_msgpack:
            body: bytes | None = call.msgpack()
            headers = {"content-type": MSGPACK}
        else:
            body = call.json()
            headers = {} if body is None else {"content-type": "application/json"}
        headers.update(call.headers)
        headers.update(self._access.headers())
        return httpx.Request(
            call.method,
            self._base_url + call.path,
            content=body,
            headers=headers,
            extensions={"timeout": timeout.as_dict()},
        )

    def _wants_json(self, response: httpx.Response) -> bool:
        """Whether the service refused MessagePack, as Dynamo's service does, and needs JSON."""
        if response.status_code != 415:
            return False
        was_msgpack: bool = response.request.headers.get("content-type") == MSGPACK
        self._takes_msgpack = self._takes_msgpack and not was_msgpack
        return was_msgpack

    async def close(self) -> None:
        await self._http.aclose()


def answer_of(call: Call[T], response: httpx.Response) -> T:
    """Return the result that `call` parses from a response. Raises ServiceRefused."""
    if not response.is_success:
        raise service_refusal(
            response.status_code, error_text(response.content), _retry_after_s(response)
        )
    try:
        return call.read(response.content)
    except msgspec.DecodeError as error:
        raise ServiceRefused(response.status_code, f"unexpected answer: {error}") from None


class AsyncClosing:
    """Base class that adds `async with`, which calls aclose() at its end."""

    async def aclose(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Closing:
    """Base class that adds `with`, which calls close() at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
