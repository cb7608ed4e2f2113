"""Builds the gateway and runs it, with a selector in the same process.

Two HTTP servers share the event loop: the gateway's server, which handles signals, and the server
of the selector's API, which keeps answering until the gateway has finished its open requests."""

import asyncio
import importlib
import time
from functools import partial
from typing import Any

from lean_selector.api import logs
from lean_selector.api.access import AccessTokens
from lean_selector.api.metrics import prompt_families
from lean_selector.app.gateway_flags import GatewayConfig
from lean_selector.app.gateway_routes import prompts_of
from lean_selector.app.host import HttpServer, StartError, new_zmq_context, tokens_of
from lean_selector.app.peer_access import credentials_of
from lean_selector.app.selector_process import SelectorParts, selector_app
from lean_selector.gateway.fleet import GatewayFleet
from lean_selector.gateway.gateway_metrics import Counts, gateway_families
from lean_selector.gateway.handler import GatewayHandler, guarded, http_refusal
from lean_selector.gateway.model_list import ModelList
from lean_selector.gateway.placing import Chooser, Placing
from lean_selector.gateway.upstreams import Rotation
from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits
from lean_selector.http.outbound import OutboundClient
from lean_selector.http.protocol import HttpProtocol
from lean_selector.http.streaming import StreamingProtocol
from lean_selector.parts import Part
from lean_selector.wire.exposition import Families


def _spans(endpoint: str | None) -> Any:
    """Return the exporter of OTLP spans, or None without an endpoint. Raises StartError."""
    if endpoint is None:
        return None
    try:
        module = importlib.import_module("lean_selector.app.otlp_spans")
    except ImportError as error:
        text = f'--otlp-endpoint needs pip install "lean-selector[otel]": {error}'
        raise StartError(text) from None
    return module.OtlpSpans(endpoint)


class Front(Part):
    """What brings the requests of clients to workers."""

    def __init__(
        self, config: GatewayConfig, parts: SelectorParts, tokens: AccessTokens | None
    ) -> None:
        """Raises StartError."""
        core, flags = parts.core, config.gateway
        credentials = credentials_of(config.engines)
        client = OutboundClient(core.resolve, credentials, core.allowed)
        self._fleet = GatewayFleet(core.selector.catalog, flags.named, flags.prefill)
        self._prompts = prompts_of(config.prompt_settings, self._fleet, client)
        self._rotation = Rotation(config.settings.ejection, time.monotonic())
        self._rotation.follow(self._fleet)
        slow_start_s, status = flags.slow_start_s, config.overload_status
        self.chooser = Chooser(core.selector, self._rotation, status, slow_start_s)
        self.counts = Counts()
        self._spans = _spans(flags.otlp_endpoint)
        placing = Placing(
            self._prompts,
            self.chooser,
            self._rotation,
            self._fleet,
            self.counts,
            core.resolve,
            credentials.trust.context,
            core.allowed,
            status,
            config.queue.headers(tokens, by_name=True),
        )
        self.handler = GatewayHandler(
            placing,
            self._rotation,
            ModelList(self._rotation, client),
            self.counts,
            silence_s=flags.silence_s,
            touch_after_s=config.reservations.touch_after_s,
            request_timeout_s=flags.request_timeout_s,
            token=None if credentials.token is None else credentials.token.token,
            access_log=config.listen.access_log,
            most_body_bytes=config.most_body_bytes,
            pass_through=flags.pass_through,
            selector_port=flags.selector_port,
            spans=self._spans,
        )

    def families(self) -> Families:
        return [
            *gateway_families(self.counts, self._rotation),
            *prompt_families(self._prompts.unknown),
        ]

    def tick(self, now: float) -> None:
        self._rotation.follow(self._fleet)
        self._rotation.ejected = self._fleet.ejected()
        self.handler.sweep(now)

    async def close(self) -> None:
        await self.handler.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)
        await self._prompts.close()


class Api(Part):
    """The listener of the selector's API."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server

    def tick(self, now: float) -> None:
        self._server.sweep(now)

    def close(self) -> None:
        self._server.abort()


async def serve(config: GatewayConfig, log_state: logs.LogState) -> None:
    """Runs until a signal stops it. Raises StartError."""
    call_soon, most = asyncio.get_running_loop().call_soon, config.listen.max_connections
    tokens = tokens_of(config.listen)
    context = new_zmq_context()
    parts = SelectorParts(config.selector, context)
    parts.add_gateway_routes()
    behind = Connections(call_soon, Limits(), max_connections=most)
    front = parts.add(Front(config, parts, tokens))
    own = selector_app(parts, behind, log_state, tokens, meters=[front.chooser.meter])
    handler = front.handler
    handler.own = own
    api = HttpServer(
        partial(HttpProtocol, own, behind),
        behind,
        config.selector.listen,
        port_flag="--selector-port",
    )
    parts.add(Api(api))
    limits = Limits(
        max_body_bytes=config.most_body_bytes,
        max_discard_bytes=max(Limits().max_discard_bytes, config.most_body_bytes),
    )
    faced = Connections(call_soon, limits, max_connections=most, refusal=http_refusal)
    app = handler if tokens is None else guarded(handler, tokens, front.counts, faced)
    new_protocol = partial(StreamingProtocol, app, faced)
    server = HttpServer(new_protocol, faced, config.listen, "gateway", tokens=tokens)
    await api.start()
    await server.start()
    server.watch(lambda again: api.reload(again) if again else None)  # else its `sweep` does
    await server.serve(parts, log_state.doubts)
    context.destroy(linger=0)
