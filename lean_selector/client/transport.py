"""HTTP with httpx: calls to a service, and streams from workers.

Parses the address of a service, and converts httpx's errors to those of client/errors.py."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from functools import cached_property
from os import PathLike, fspath
from typing import TypeVar

import httpx
import msgspec

from lean_selector.client.calls import Call
from lean_selector.client.client_settings import Timeouts
from lean_selector.client.completions import error_text
from lean_selector.client.errors import (
    ClientClosed,
    ServiceRefused,
    ServiceUnreachable,
    WorkerRefused,
    WorkerStreamBroken,
    WorkerUnreachable,
    service_refusal,
)

T = TypeVar("T")
Verify = bool | str | PathLike[str] | ssl.SSLContext
Cert = str | PathLike[str] | tuple[str | PathLike[str], str | PathLike[str]]
Token = str | Callable[[], str]

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

# Errors of an exchange. In TLS 1.3, a server refuses our certificate after the handshake; httpx
# does not wrap this ssl.SSLError.
CALL_ERRORS = (httpx.HTTPError, ssl.SSLError)
# Errors of opening a stream; InvalidURL: the worker's registered endpoint is invalid.
OPEN_ERRORS = (httpx.HTTPError, httpx.InvalidURL)
STREAM_ERRORS = (httpx.HTTPError, httpx.StreamError)
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    return f"{kind}: {error}" if str(error) else kind


# -- the service -----------------------------------------------------------------------------------


def tls_context(verify: Verify, cert: Cert | None) -> ssl.SSLContext:
    """Return the context for these arguments of KvRouter. Raises OSError for unusable files."""
    if isinstance(verify, ssl.SSLContext):
        context = verify
    else:
        ca_file = None if isinstance(verify, bool) else fspath(verify)
        context = ssl.create_default_context(cafile=ca_file)
        if verify is False:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
    if cert is not None:
        cert_file, key_file = cert if isinstance(cert, tuple) else (cert, cert)
        try:
            # Without a password, OpenSSL would ask for that of a locked key on the terminal.
            context.load_cert_chain(cert_file, key_file, password="")
        except ssl.SSLError as error:
            raise OSError(
                f"{fspath(cert_file)} and {fspath(key_file)} are not a certificate and its key, in "
                f"PEM and without a passphrase: {error}"
            ) from None
    return context


def _checked(token: str) -> str:
    if not token or not all("!" <= letter <= "~" for letter in token):
        raise ValueError("a token is printable ASCII without blanks")
    return token


class ServiceConnection:
    """Connections to a selection service, at an http or https URL, or at `unix:PATH`."""

    def __init__(
        self,
        endpoint: str,
        timeouts: Timeouts,
        verify: Verify = True,
        cert: Cert | None = None,
        token: Token | None = None,
    ) -> None:
        """The arguments are those of KvRouter. Raises ValueError for an invalid endpoint or token,
        TypeError if the endpoint is not a string, and OSError for unusable files."""
        if not isinstance(endpoint, str):
            raise TypeError(f"expected http://, https:// or unix:PATH, not {endpoint!r}")
        self.endpoint = endpoint
        self._timeouts = timeouts
        self._token = _checked(token) if isinstance(token, str) else token
        self._takes_msgpack = True  # until the service refuses it
        self._base_url = endpoint.rstrip("/")
        uds: str | None = None
        context: ssl.SSLContext | bool = False  # no TLS
        if endpoint.startswith("unix:"):
            uds = endpoint.removeprefix("unix:")
            self._base_url = "http://localhost"
            if not uds:
                raise ValueError("unix: needs a path")
        elif endpoint.startswith("https://"):
            context = tls_context(verify, cert)
        elif not endpoint.startswith("http://"):
            raise ValueError(f"expected http://, https:// or unix:PATH, not {endpoint!r}")
        transport = httpx.AsyncHTTPTransport(uds=uds, verify=context, limits=SERVICE_LIMITS)
        self._http = httpx.AsyncClient(transport=transport, trust_env=False)

    async def exchange(self, call: Call[T]) -> T:
        """Sends a call, and returns its result. Raises a subclass of ClientError."""
        if self._http.is_closed:
            raise ClientClosed(self.endpoint)
        try:
            response = await self._http.send(self.request(call))
            if self._wants_json(response):
                response = await self._http.send(self.request(call))
        except CALL_ERRORS as error:
            never_sent = isinstance(error, NEVER_SENT)
            raise ServiceUnreachable(
                self.endpoint, _reason(error), never_sent=never_sent
            ) from error
        return answer_of(call, response)

    def request(self, call: Call[T]) -> httpx.Request:
        limit_s = self._timeouts.service_s
        read_s = self._timeouts.queue_s if call.waits else limit_s
        timeout = httpx.Timeout(limit_s, connect=self._timeouts.connect_s, read=read_s)
        # The body is sent unchanged; a POST without a body has no content type.
        if call.has_prompt and self._takes_msgpack:
            body: bytes | None = call.msgpack()
            headers = {"content-type": MSGPACK}
        else:
            body = call.json()
            headers = {} if body is None else {"content-type": "application/json"}
        headers.update(call.headers)
        if self._token is not None:
            token = self._token if isinstance(self._token, str) else _checked(self._token())
            headers["authorization"] = f"Bearer {token}"
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
    status = response.status_code
    if not response.is_success:
        asked = response.headers.get("retry-after", "").strip()
        retry_after_s = float(asked) if asked.isdigit() else None  # a date is not understood
        raise service_refusal(status, error_text(response.content), retry_after_s)
    try:
        return call.read(response.content)
    except msgspec.DecodeError as error:
        raise ServiceRefused(status, f"unexpected answer: {error}") from None


# -- workers ---------------------------------------------------------------------------------------


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

    def broken(self, error: Exception) -> WorkerStreamBroken:
        return WorkerStreamBroken(self.worker_id, self.endpoint, _reason(error))


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
            raise self._asked.broken(error) from error

    async def close(self) -> None:
        """Ends the response. After a complete response, the connection stays open for reuse.
        Closing an incomplete response stops the engine's work on the request."""
        with contextlib.suppress(*STREAM_ERRORS, WorkerStreamBroken, OSError):
            try:
                if self.is_done:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(DRAIN_S):
                            await self.read()
            finally:
                await self._response.aclose()


class WorkerConnections:
    """Connections to all workers of a router."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeout = httpx.Timeout(
            timeouts.connect_s, read=timeouts.worker_s, write=timeouts.worker_s
        )

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(limits=WORKER_LIMITS)
        return httpx.AsyncClient(transport=transport, trust_env=False, timeout=self._timeout)

    async def open(self, step: OpenStream) -> Opened:
        """Sends a request to a worker. Return its open response, or raise a WorkerError:
        WorkerStreamBroken if the worker timed out and may be working on the request."""
        worker = step.worker_id, step.endpoint
        try:
            request = self._http.build_request(
                "POST", step.url, content=step.body, headers=step.headers
            )
            response = await self._http.send(request, stream=True)
        except httpx.ReadTimeout as error:
            raise step.broken(error) from error
        except OPEN_ERRORS as error:
            never_connected = isinstance(error, NEVER_SENT)
            raise WorkerUnreachable(
                *worker, _reason(error), never_connected=never_connected
            ) from error
        if response.status_code == 200:
            return Opened(step, response)
        body = b""
        try:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_ERROR_BYTES:
                    break
        except httpx.HTTPError:
            pass  # the body is optional: the status is enough
        finally:
            await response.aclose()
        raise WorkerRefused(*worker, response.status_code, error_text(body))

    async def close(self) -> None:
        if "_http" in vars(self):
            await self._http.aclose()
