"""The application on the gateway's port.

Completions and similar requests (ROUTED_PATHS) are proxied to the worker that `placing` chooses;
other permitted requests are proxied to any worker. Lists of models, /health and /ready are answered
here. Everything else is 404."""

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from time import monotonic
from typing import Final, Protocol
from urllib.parse import unquote_to_bytes

from lean_selector.api.access import OPEN, READ, WRITE, AccessTokens, Role, refusal_of
from lean_selector.api.logs import ACCESS_LOG
from lean_selector.gateway.gateway_metrics import Counts
from lean_selector.gateway.headers import (
    id_line,
    new_id,
    refusal,
    request_id_of,
    traceparent_of,
    wants_websocket,
    without_authorization,
)
from lean_selector.gateway.model_list import ModelList
from lean_selector.gateway.model_request import ROUTED_PATHS
from lean_selector.gateway.placing import Placing
from lean_selector.gateway.proxied_request import ProxiedRequest
from lean_selector.gateway.upstreams import Rotation, WorkerUse
from lean_selector.http.connections import Connections
from lean_selector.http.head import HttpError, Request
from lean_selector.http.protocol import App
from lean_selector.http.response import PendingReply
from lean_selector.wire.selection_bodies import OpenAiErrorBody

log = logging.getLogger(ACCESS_LOG)
gateway_log = logging.getLogger("lean_selector.gateway")

MOST_DETAIL_CHARACTERS: Final = 256  # a detail may come from a template or a client
ROUTED: Final = frozenset(path.encode() for path in ROUTED_PATHS)
MODELS: Final = b"/v1/models"
OWN: Final = frozenset({b"/health", b"/ready"})
# Other paths of these APIs; an engine's own routes are not included.
_OPENAI: Final = re.compile(
    rb"/v1/(?:audio|batches|conversations|files|images|messages|moderations|responses|uploads"
    rb"|vector_stores|videos)(?:/(?!\.{1,2}(?:/|\Z))[^/]++)*+"
)


_PERCENT: Final = 0x25


def resource_of(path: bytes) -> bytes:
    """Return a path as engines interpret it: unescaped, and without a trailing slash."""
    # _PERCENT is an int: `in` would first try to use bytes as a number, and catch an exception.
    return (unquote_to_bytes(path) if _PERCENT in path else path).rstrip(b"/") or b"/"


def _is_of_models(path: bytes) -> bool:
    return (path + b"/").startswith(MODELS + b"/")


def http_refusal(error: HttpError) -> bytes:
    """Return the gateway's response to an error of the HTTP layer."""
    return OpenAiErrorBody.encoded(error.status, error.text)


class Spans(Protocol):
    """Traces requests with OpenTelemetry (`app/otlp_spans.py` implements this)."""

    def begin(self, proxied: ProxiedRequest) -> None: ...

    def end(self, proxied: ProxiedRequest) -> None: ...


@dataclass(eq=False)
class GatewayHandler:
    """Handles all requests to the gateway's port. Used only on the loop's thread.

    `silence_s`: how long a worker may send nothing. `touch_after_s`: how often a reservation
    is renewed, so that it does not expire. `request_timeout_s`: if no answer has begun within
    this time, the client gets 504. `pass_through`: which requests outside ROUTED_PATHS are
    proxied (all, openai or none). `selector_port`: port of the selector's API; 0: any."""

    placing: Placing
    rotation: Rotation
    models: ModelList
    counts: Counts
    _: KW_ONLY
    silence_s: float
    touch_after_s: float
    request_timeout_s: float | None = None
    token: Callable[[], bytes] | None
    access_log: bool
    most_body_bytes: int
    pass_through: str
    selector_port: int
    spans: Spans | None = None
    own: App = field(init=False)  # answers /health and /ready; set it before the first request

    def __post_init__(self) -> None:
        self._under_way: set[ProxiedRequest] = set()

    def __call__(self, request: Request) -> bytes | PendingReply:
        own_id = new_id()
        request_id = request_id_of(request.section) or own_id.encode()
        if not request.keep_alive and wants_websocket(request.section):
            text = "websocket upgrades are not supported by this gateway"
            return self._refused(request_id, 501, text, "no_websocket")
        if request.body_too_large:
            text = f"the request body has more than {self.most_body_bytes} bytes"
            return self._refused(request_id, 413, text, "request_too_large")
        path, is_get = resource_of(request.path), request.method in (b"GET", b"HEAD")
        is_completion = path in ROUTED and request.method == b"POST"
        if is_completion or path in OWN:
            request.path = path
        if is_get and path in OWN:
            return self.own(request)
        if is_get and path == MODELS:
            return self.models.answer(id_line(request_id))
        if is_get and path.startswith(MODELS + b"/"):
            model = path.removeprefix(MODELS + b"/").decode(errors="replace")
            return self.models.answer(id_line(request_id), model)
        if not is_completion and not self._passes(request.method, path):
            port = f", {self.selector_port}" if self.selector_port else ""
            text = (
                f"{request.method.decode()} {path[:256].decode(errors='replace')} is not "
                "forwarded: this is the gateway; the selector's API and metrics are at "
                f"--selector-port{port}"
            )
            return self._refused(request_id, 404, text, "unknown_url")
        proxied = ProxiedRequest(
            request,
            request_id,
            own_id,
            self.counts,
            lambda each: self._place(each, is_completion),
            self._failed,
            self._over,
            self.token,
        )
        proxied.begin()
        if not proxied.is_over:
            self._under_way.add(proxied)
        return proxied.reply

    def _place(self, proxied: ProxiedRequest, is_completion: bool) -> "asyncio.Task[None] | None":
        if self.spans is not None and is_completion and proxied.traceparent is None:
            self.spans.begin(proxied)
        return self.placing.begin(proxied, is_completion)

    def _passes(self, method: bytes, path: bytes) -> bool:
        """Whether a request is proxied for which no worker is chosen. Browsers ask by OPTIONS."""
        if method == b"OPTIONS" and (path in ROUTED or _is_of_models(path)):
            return True
        if self.pass_through == "openai":
            return _OPENAI.fullmatch(path) is not None
        return self.pass_through == "all"

    def _refused(self, request_id: bytes, status: int, message: str, code: str) -> bytes:
        self.counts.answers[status] += 1
        return refusal(status, message, code, id_line(request_id))

    def _failed(self, use: WorkerUse, outcome: str) -> None:
        self.rotation.record_outcome(use.endpoint, outcome, monotonic())

    def _over(self, proxied: ProxiedRequest) -> None:
        self._under_way.discard(proxied)
        use = proxied.use
        if use is not None and proxied.outcome is not None:
            self.rotation.record_outcome(use.endpoint, proxied.outcome, monotonic())
        routed, timing = proxied.routed, proxied.timing
        if use is not None and routed is not None and timing is not None:
            path = proxied.request.path
            self.counts.genai.add(path, routed.model_name, use.endpoint, timing)
        if self.spans is not None:
            self.spans.end(proxied)
        if self.access_log:
            self._log(proxied)

    def _log(self, proxied: ProxiedRequest) -> None:
        request, use = proxied.request, proxied.use
        fields: dict[str, object] = {
            "method": request.method.decode("latin-1"),
            "path": request.path.decode("latin-1")[:1024],
            "status": proxied.status or 499,
            "duration_us": round(proxied.age_s * 1e6),
            "request_id": proxied.request_id.decode("latin-1"),
        }
        if use is not None:
            fields["worker"] = use.endpoint.text
            if use.overlap_tokens is not None:
                fields["overlap_tokens"] = use.overlap_tokens
                if proxied.why_unknown is not None:
                    fields["prompt"] = proxied.why_unknown.why.value
                    fields["prompt_detail"] = proxied.why_unknown.text[:MOST_DETAIL_CHARACTERS]
        if proxied.pair_reason:
            fields["pd"] = proxied.pair_reason
        if proxied.held is not None:
            fields["prefill_worker"] = proxied.held.leg.endpoint.text
        if proxied.routed is not None:
            fields["model"] = proxied.routed.model_name
        timing = proxied.timing
        if timing is not None:
            if timing.first_token_s is not None:
                fields["ttft_us"] = round(timing.first_token_s * 1e6)
            if timing.lengths is not None:
                fields["prompt_tokens"], fields["output_tokens"] = timing.lengths
            if timing.cached_tokens is not None:
                fields["cached_tokens"] = timing.cached_tokens
        traceparent = proxied.traceparent or traceparent_of(request.section)
        if traceparent is not None:
            fields["traceparent"] = traceparent
        if proxied.tried:
            fields["tried"] = len(proxied.tried)
        if proxied.why:
            fields["worker_failure"] = proxied.why
        log.info("request", extra=fields)

    def sweep(self, now: float) -> None:
        """Ends requests that took too long, and renews reservations. Call this every second."""
        self.rotation.sweep(now, self.silence_s)
        self.counts.genai.keep(self.rotation.endpoints.values())
        self._log_troubles()
        limit_s = self.request_timeout_s
        for proxied in list(self._under_way):
            if limit_s is not None and not proxied.reply.begun and proxied.age_s > limit_s:
                proxied.time_out(limit_s)
            elif proxied.use is not None and now - proxied.used_since > self.touch_after_s:
                proxied.used_since = now
                proxied.use.touch()

    def _log_troubles(self) -> None:
        """Logs one line per kind of failure and worker, because a killed worker fails many
        requests."""
        troubles = self.counts.troubles
        for (worker, trouble), requests in troubles.items():
            more = {"worker": worker, "requests": requests}
            gateway_log.warning(
                "worker %s: %s (requests: %d)", worker, trouble, requests, extra=more
            )
        troubles.clear()

    def close(self) -> "asyncio.Future[list[BaseException | None]]":
        """Ends the requests that still run at the end of a shutdown, after all clients were
        disconnected. Return a future that the caller must await."""
        placing = [each.placing for each in self._under_way if each.placing is not None]
        for proxied in list(self._under_way):
            proxied.reply.hang_up()
        self._log_troubles()
        self.models.close()
        self.rotation.close()
        return asyncio.gather(*placing, return_exceptions=True)


def _role_for(request: Request) -> Role:
    path, is_get = resource_of(request.path), request.method in (b"GET", b"HEAD")
    if is_get and path in OWN:
        return OPEN
    return READ if is_get and _is_of_models(path) else WRITE


def guarded(handle: App, tokens: AccessTokens, counts: Counts, connections: Connections) -> App:
    """Return an app that checks access tokens. No request without a valid token reaches a worker.

    /health and /ready need no token. Lists of models need the role `read`; all other requests need
    `write`, because they use a worker. The token is meant for the gateway, so it is not forwarded.
    Refusals are in OpenAI's format, and are sent even if the request's body has not arrived yet."""
    connections.refuses = lambda request: tokens.role_of(request.credential) < _role_for(request)

    def app(request: Request) -> bytes | PendingReply:
        role, needed = tokens.role_of(request.credential), _role_for(request)
        if role < needed:
            refused = refusal_of(request.credential, role, needed)
            counts.answers[refused.status] += 1
            line = id_line(request_id_of(request.section) or new_id().encode()) + refused.line
            return refusal(refused.status, refused.text, refused.code, line)
        if request.credential is not None:
            request.section = without_authorization(request.section)
        return handle(request)

    return app
