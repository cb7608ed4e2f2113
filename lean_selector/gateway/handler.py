"""The app behind the gateway's port: which requests are proxied, and what is answered at once.

Completions and what is like them (ROUTED) are proxied to the worker that `placing` says, and what
else may pass to any. Lists of models, /health and /ready are answered here; the rest is 404.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from time import monotonic
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from lean_selector.core.errors import UnknownModel
from lean_selector.gateway.gateway_metrics import Counts
from lean_selector.gateway.headers import (
    id_line,
    new_id,
    refusal,
    request_id_of,
    wants_websocket,
    without_authorization,
)
from lean_selector.gateway.model_request import ROUTED_PATHS
from lean_selector.gateway.placing import Placing
from lean_selector.gateway.prompt_shapes import ModelCard
from lean_selector.gateway.proxied_request import ProxiedRequest
from lean_selector.gateway.upstreams import Rotation, WorkerLease
from lean_selector.http.connections import Connections
from lean_selector.http.head import HttpError, Request
from lean_selector.http.outbound import OutboundClient, OutboundFailed
from lean_selector.http.protocol import App
from lean_selector.http.response import PendingReply, encode_response
from lean_selector.service.access import OPEN, READ, WRITE, AccessTokens, Role, refusal_of
from lean_selector.service.logs import ACCESS_LOG
from lean_selector.tasks import watched
from lean_selector.wire.selection_bodies import OpenAiErrorBody

log = logging.getLogger(ACCESS_LOG)
gateway_log = logging.getLogger("lean_selector.gateway")

HOLDS_S: Final = 2.0  # a list of models
TIMEOUT_S: Final = 2.0  # of asking a worker for its models
MOST_DETAIL_CHARACTERS: Final = 256  # some are a template's or a client's words
ROUTED: Final = frozenset(path.encode() for path in ROUTED_PATHS)
MODELS: Final = b"/v1/models"
OWN: Final = frozenset({b"/health", b"/ready"})
# What these APIs have beside ROUTED and models. An engine's own routes stand elsewhere.
_OPENAI: Final = re.compile(
    rb"/v1/(?:audio|batches|conversations|files|images|messages|moderations|responses|uploads"
    rb"|vector_stores|videos)(?:/(?!\.{1,2}(?:/|\Z))[^/]++)*+"
)


def resource_of(path: bytes) -> bytes:
    """What engines take a path for: escapes are decoded, and a slash at its end does not count."""
    return (unquote_to_bytes(path) if b"%" in path else path).rstrip(b"/") or b"/"


class ModelList:
    """GET /v1/models, and one of them: what all workers list, each model once. They are asked when
    a client asks, all at once, and what they say is kept for a moment; of an ejected one counts
    what it said last."""

    def __init__(self, rotation: Rotation, client: OutboundClient) -> None:
        self._rotation = rotation
        self._client = client
        self._told: dict[str, dict[str, msgspec.Raw]] = {}  # by base URL
        self._known: dict[str, msgspec.Raw] | None = None  # by model
        self._until = 0.0
        self._asking: asyncio.Task[dict[str, msgspec.Raw]] | None = None

    def answer(self, line: bytes, model: str | None = None) -> bytes | PendingReply:
        """The list of models, or one model. `line` is added to the headers of the answer."""
        if self._known is not None and monotonic() < self._until:
            return _told_models(self._known, line, model)
        if self._asking is None:
            self._asking = watched("list of models", self._ask())
        reply = PendingReply()

        def told(asked: "asyncio.Task[dict[str, msgspec.Raw]]") -> None:
            if reply.response is not None or asked.cancelled():
                return
            models = {} if asked.exception() is not None else asked.result()
            reply.resolve(_told_models(models, line, model))

        self._asking.add_done_callback(told)
        return reply

    async def _ask(self) -> dict[str, msgspec.Raw]:
        try:
            workers = self._rotation.in_turn
            asked = [each.text for each in workers if self._rotation.is_well(each)]
            lists = await asyncio.gather(*map(self._models_of, asked))
            self._told = {each.text: self._told.get(each.text, {}) for each in workers}
            self._told |= zip(asked, lists, strict=True)
            models: dict[str, msgspec.Raw] = {}
            for rows in self._told.values():
                for name, row in rows.items():
                    models.setdefault(name, row)
            if models:
                self._known, self._until = models, monotonic() + HOLDS_S
            return models
        finally:
            self._asking = None

    async def _models_of(self, base: str) -> dict[str, msgspec.Raw]:
        try:
            text = await self._client.text(base + "/v1/models", timeout_s=TIMEOUT_S)
            listed = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            rows = msgspec.json.decode(listed["data"], type=list[msgspec.Raw])
            return {_named(row).id: row for row in rows}
        except (OutboundFailed, msgspec.DecodeError, LookupError, ValueError):
            return {}

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()


_named = msgspec.json.Decoder(ModelCard).decode


def _told_models(models: dict[str, msgspec.Raw], line: bytes, model: str | None) -> bytes:
    if not models:
        return refusal(503, "no worker tells its models", "no_worker", line)
    if model is None:
        listed = b",".join(bytes(row) for row in models.values())
        return encode_response(200, b'{"object":"list","data":[%b]}' % listed, extra=line)
    row = models.get(model)
    if row is None:
        return refusal(404, UnknownModel(model).message, "model_not_found", line)
    return encode_response(200, bytes(row), extra=line)


def http_refusal(error: HttpError) -> bytes:
    """What is answered to an error of the HTTP level."""
    return OpenAiErrorBody.encoded(error.status, error.text)


class GatewayHandler:
    """The app, and the requests that are under way. From the loop's thread only."""

    def __init__(
        self,
        placing: Placing,
        rotation: Rotation,
        models: ModelList,
        counts: Counts,
        *,
        silence_s: float,
        touch_after_s: float,
        request_timeout_s: float | None = None,
        token: Callable[[], bytes] | None,
        access_log: bool,
        most_body_bytes: int,
        pass_through: str,
        own: App,
    ) -> None:
        """`silence_s`: for so long a worker may say nothing; `touch_after_s`: so often a
        reservation is touched, which the selector would forget. `request_timeout_s`: an answer
        begins by then, or is 504. `pass_through`: which requests
        besides completions reach workers: all, openai or none; `own` answers /health and
        /ready."""
        self._pass_through = pass_through
        self._own = own
        self._placing = placing
        self._rotation = rotation
        self._models = models
        self._counts = counts
        self._silence_s = silence_s
        self._touch_after_s = touch_after_s
        self._request_timeout_s = request_timeout_s
        self._token = token
        self._access_log = access_log
        self._most_body_bytes = most_body_bytes
        self._under_way: set[ProxiedRequest] = set()

    def __call__(self, request: Request) -> bytes | PendingReply:
        own_id = new_id()
        request_id = request_id_of(request.section) or own_id.encode()
        if not request.keep_alive and wants_websocket(request.section):
            text = "websocket upgrades are not supported by this gateway"
            return self._refused(request_id, 501, text, "no_websocket")
        if request.body_too_large:
            text = f"the request body has more than {self._most_body_bytes} bytes"
            return self._refused(request_id, 413, text, "request_too_large")
        path, is_get = resource_of(request.path), request.method in (b"GET", b"HEAD")
        is_completion = path in ROUTED and request.method == b"POST"
        if is_completion or path in OWN:
            request.path = path
        if is_get and path in OWN:
            return self._own(request)
        if is_get and path == MODELS:
            return self._models.answer(id_line(request_id))
        if is_get and path.startswith(MODELS + b"/"):
            model = path.removeprefix(MODELS + b"/").decode(errors="replace")
            return self._models.answer(id_line(request_id), model)
        if not is_completion and not self._passes(path):
            text = (
                f"{request.method.decode()} {path[:256].decode(errors='replace')} is not passed on"
            )
            return self._refused(request_id, 404, text, "unknown_url")
        proxied = ProxiedRequest(
            request,
            request_id,
            own_id,
            self._counts,
            lambda each: self._placing.begin(each, is_completion),
            self._failed,
            self._over,
            self._token,
        )
        if not proxied.is_over:
            self._under_way.add(proxied)
        return proxied.reply

    def _passes(self, path: bytes) -> bool:
        if self._pass_through == "openai":
            return _OPENAI.fullmatch(path) is not None
        return self._pass_through == "all"

    def _refused(self, request_id: bytes, status: int, message: str, code: str) -> bytes:
        self._counts.answers[status] += 1
        return refusal(status, message, code, id_line(request_id))

    def _failed(self, lease: WorkerLease, outcome: str) -> None:
        self._rotation.report(lease.endpoint, outcome, monotonic())

    def _over(self, proxied: ProxiedRequest) -> None:
        self._under_way.discard(proxied)
        lease = proxied.lease
        if lease is not None and proxied.outcome is not None:
            self._rotation.report(lease.endpoint, proxied.outcome, monotonic())
        if self._access_log:
            self._log(proxied)

    def _log(self, proxied: ProxiedRequest) -> None:
        request, lease = proxied.request, proxied.lease
        fields: dict[str, object] = {
            "method": request.method.decode("latin-1"),
            "path": request.path.decode("latin-1")[:1024],
            "status": proxied.status or 499,
            "duration_us": round(proxied.age_s * 1e6),
            "request_id": proxied.request_id.decode("latin-1"),
        }
        if lease is not None:
            fields["worker"] = lease.endpoint.text
            if lease.overlap_tokens is not None:
                fields["overlap_tokens"] = lease.overlap_tokens
                if proxied.why_unknown is not None:
                    fields["prompt"] = proxied.why_unknown.why.value
                    fields["prompt_detail"] = proxied.why_unknown.text[:MOST_DETAIL_CHARACTERS]
        if proxied.tried:
            fields["tried"] = len(proxied.tried)
        if proxied.why:
            fields["worker_failure"] = proxied.why
        log.info("request", extra=fields)

    def sweep(self, now: float) -> None:
        """About every second."""
        self._rotation.sweep(now, self._silence_s)
        self._log_troubles()
        limit_s = self._request_timeout_s
        for proxied in list(self._under_way):
            if limit_s is not None and not proxied.reply.begun and proxied.age_s > limit_s:
                proxied.time_out(limit_s)
            elif proxied.lease is not None and now - proxied.lease_since > self._touch_after_s:
                proxied.lease_since = now
                proxied.lease.touch()

    def _log_troubles(self) -> None:
        """A line for what happened alike to many requests, as when their worker is killed."""
        troubles = self._counts.troubles
        for (worker, trouble), requests in troubles.items():
            more = {"worker": worker, "requests": requests}
            gateway_log.warning(
                "worker %s: %s (requests: %d)", worker, trouble, requests, extra=more
            )
        troubles.clear()

    async def close(self) -> None:
        """At the end of a stop, which has dropped every client: their requests are given up."""
        placing = [each.placing for each in self._under_way if each.placing is not None]
        for proxied in list(self._under_way):
            proxied.reply.hang_up()
        await asyncio.gather(*placing, return_exceptions=True)
        self._log_troubles()
        self._models.close()
        self._rotation.close()


def _role_for(request: Request) -> Role:
    path, is_get = resource_of(request.path), request.method in (b"GET", b"HEAD")
    if is_get and path in OWN:
        return OPEN
    return READ if is_get and (path + b"/").startswith(MODELS + b"/") else WRITE


def guarded(handle: App, tokens: AccessTokens, counts: Counts, connections: Connections) -> App:
    """The app where tokens are required: no request gets to a worker without one.

    /health and /ready need none, listing models `read`, everything else `write`, for it makes a
    worker work. The token is for us, so no worker is sent it. Refusals have OpenAI's shape.
    `connections` are those that it is served on.
    """
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
