"""HTTP through httpx, for both kinds of client: exchanges with a service, streams from workers.

Owns what the two share without waiting: where a service is, and which of httpx's errors means what.
Only the drivers and `timeouts` know httpx too.
"""

import ssl
from typing import TypeVar

import httpx
import msgspec

from lean_selector.client.access import Access
from lean_selector.client.completions import error_text
from lean_selector.client.errors import (
    ServiceRefused,
    ServiceUnreachable,
    WorkerRefused,
    WorkerStreamBroken,
    WorkerUnreachable,
    service_refusal,
)
from lean_selector.client.exchanges import Call
from lean_selector.client.steps import OpenStream
from lean_selector.client.timeouts import Timeouts

T = TypeVar("T")

# Connections to the service. A selection that waits in the service's queue holds one.
SERVICE_LIMITS = httpx.Limits(max_connections=512, max_keepalive_connections=64)
# A stream holds a connection for as long as it runs, so the caller's own concurrency is the bound.
# Kept for less than uvicorn's five seconds, so that a request does not meet a closing connection.
WORKER_LIMITS = httpx.Limits(
    max_connections=None, max_keepalive_connections=256, keepalive_expiry=3.0
)
MAX_ERROR_BYTES = 64 * 1024  # of a worker's error body
# A booking that was cancelled on its way is given this long to be answered, so that it is freed
# when it is certain to exist; after that the connection is cut, which takes it out of a queue.
BOOKING_GRACE_S = 0.5
DRAIN_S = 0.2  # for the few bytes that follow an engine's [DONE]


MSGPACK = "application/msgpack"


class ServiceAddress:
    """`http://host:port`, or `unix:PATH` for a UNIX socket."""

    def __init__(self, endpoint: str, access: Access | None = None) -> None:
        """Raises ValueError for anything else, TypeError for what is no text, and OSError for files
        of `access`."""
        if not isinstance(endpoint, str):
            raise TypeError(f"expected http://, https:// or unix:PATH, not {endpoint!r}")
        self._access = Access() if access is None else access
        self.endpoint = endpoint
        self.takes_msgpack = True  # until it says otherwise
        self.uds: str | None = None
        self.context: ssl.SSLContext | bool = False  # nobody is to be believed: no TLS
        self.base_url = endpoint.rstrip("/")
        if endpoint.startswith("unix:"):
            path = endpoint.removeprefix("unix:")
            self.uds = path.removeprefix("//") if path.startswith("///") else path
            self.base_url = "http://localhost"
            if not self.uds:
                raise ValueError("unix: needs a path")
        elif endpoint.startswith("https://"):
            self.context = self._access.context()
        elif not endpoint.startswith("http://"):
            raise ValueError(f"expected http://, https:// or unix:PATH, not {endpoint!r}")

    def request(self, call: Call[T], timeouts: Timeouts) -> httpx.Request:
        timeout = timeouts.of_call(call.waits)
        # The body goes out as it is; a POST without one has no content type either.
        if call.has_prompt and self.takes_msgpack:
            body: bytes | None = call.msgpack()
            headers = {"content-type": MSGPACK}
        else:
            body = call.json()
            headers = {} if body is None else {"content-type": "application/json"}
        headers.update(self._access.headers())
        return httpx.Request(
            call.method,
            self.base_url + call.path,
            content=body,
            headers=headers,
            extensions={"timeout": timeout.as_dict()},
        )

    def wants_json(self, response: httpx.Response) -> bool:
        """True when the service knows no MessagePack, as the reference does not: ask again."""
        if response.status_code != 415:
            return False
        was_msgpack: bool = response.request.headers.get("content-type") == MSGPACK
        self.takes_msgpack = self.takes_msgpack and not was_msgpack
        return was_msgpack

    def lost(self, error: Exception) -> ServiceUnreachable:
        never_sent = isinstance(
            error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
        )
        return ServiceUnreachable(self.endpoint, _reason(error), never_sent=never_sent)

    def answer(self, call: Call[T], response: httpx.Response) -> T:
        """What the call reads from a finished response. Raises ServiceRefused."""
        if not response.is_success:
            raise service_refusal(
                response.status_code, error_text(response.content), _retry_after_s(response)
            )
        try:
            return call.read(response.content)
        except msgspec.DecodeError as error:
            raise ServiceRefused(
                response.status_code, f"not the expected answer: {error}"
            ) from None


def stream_request(wanted: OpenStream, timeouts: Timeouts) -> httpx.Request:
    return httpx.Request(
        "POST",
        wanted.url,
        content=wanted.body,
        headers=wanted.headers,
        extensions={"timeout": timeouts.of_stream().as_dict()},
    )


# What an exchange may raise: httpx lets a refusal through that comes after the handshake, as that
# of our certificate does in TLS 1.3.
CALL_ERRORS = (httpx.HTTPError, ssl.SSLError)
# What opening a stream may raise; InvalidURL comes from how a worker was registered.
OPEN_ERRORS = (httpx.HTTPError, httpx.InvalidURL)
STREAM_ERRORS = (httpx.HTTPError, httpx.StreamError)


def not_opened(wanted: OpenStream, error: Exception) -> WorkerUnreachable | WorkerStreamBroken:
    """A worker that keeps silent has taken the request; one that hangs up has not."""
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
    """Seconds of a retry-after header; a date, the other form, is not honoured."""
    text = response.headers.get("retry-after", "").strip()
    return float(text) if text.isdigit() else None
