"""Builds the gateway and runs it, with a selector in the same process.

Two HTTP servers share the event loop: the gateway's server, which handles signals, and the server
of the selector's API, which keeps answering until the gateway has finished its open requests."""

import asyncio
import importlib
import time
from typing import Any

from lean_selector.gateway.fleet import CatalogFleet
from lean_selector.gateway.gateway_metrics import Counts, gateway_families
from lean_selector.gateway.handler import GatewayHandler, guarded, http_refusal
from lean_selector.gateway.model_list import ModelList
from lean_selector.gateway.placing import Chooser, Placing
from lean_selector.gateway.upstreams import Directory, Rotation
from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits
from lean_selector.http.outbound import OutboundClient
from lean_selector.http.streaming import StreamingProtocol
from lean_selector.server.gateway_flags import GatewayConfig
from lean_selector.server.gateway_routes import prompts_of
from lean_selector.server.host import HttpServer, StartError, new_zmq_context, run, tokens_of
from lean_selector.server.peer_access import credentials_of
from lean_selector.server.selector_process import (
    SelectorParts,
    gateway_routes_of,
    protocol_of,
    selector_app,
)
from lean_selector.service import logs
from lean_selector.service.metrics import prompt_families


def run_gateway(config: GatewayConfig) -> None:
    """Runs the gateway until a signal stops it. Raises StartError."""
    run(config, lambda log_state: _gateway(config, log_state))


def _spans(endpoint: str | None) -> Any:
    """Returns the exporter of OTLP spans, or None without an endpoint. Raises StartError."""
    if endpoint is None:
        return None
    try:
        module = importlib.import_module("lean_selector.server.otlp_spans")
    except ImportError as error:
        text = f'--otlp-endpoint needs pip install "lean-selector[otel]": {error}'
        raise StartError(text) from None
    return module.OtlpSpans(endpoint)


async def _gateway(config: GatewayConfig, log_state: logs.LogState) -> None:
    loop, now = asyncio.get_running_loop(), time.monotonic()
    tokens = tokens_of(config.listen)
    context = new_zmq_context()
    parts = SelectorParts(config.selector, context)
    gateways = gateway_routes_of(config.selector, parts)
    catalog = parts.selector.catalog
    rotation = Rotation(config.settings.ejection, now)
    directory = Directory(config.gateway.workers, rotation, catalog)
    slow_start_s = config.health.slow_start_s
    chooser = Chooser(parts.selector, rotation, config.overload_status, slow_start_s)
    credentials = credentials_of(config.engines)
    counts = Counts()
    client = OutboundClient(parts.resolve, credentials, parts.allowed)
    fleet = CatalogFleet(catalog)
    prompts = prompts_of(config.prompt_settings, fleet, client)
    placing = Placing(
        prompts,
        chooser,
        rotation,
        directory,
        counts,
        parts.resolve,
        credentials.trust.context,
        parts.allowed,
        config.overload_status,
    )
    limits = Limits(
        max_body_bytes=config.most_body_bytes,
        max_discard_bytes=max(Limits().max_discard_bytes, config.most_body_bytes),
    )
    most = config.listen.max_connections
    front = Connections(loop.call_soon, limits, max_connections=most, refusal=http_refusal)
    behind = Connections(loop.call_soon, Limits(), max_connections=most)
    families = [*gateway_families(counts, rotation), *prompt_families(prompts.unknown)]
    own = selector_app(
        *(config.selector, parts, behind, log_state, gateways, families, tokens),
        meters=[chooser.meter],
    )
    spans = _spans(config.gateway.otlp_endpoint)
    handler = GatewayHandler(
        placing,
        rotation,
        ModelList(rotation, client),
        counts,
        silence_s=config.gateway.silence_s,
        touch_after_s=config.touch_after_s,
        request_timeout_s=config.gateway.request_timeout_s,
        token=None if credentials.token is None else credentials.token.token,
        access_log=config.listen.access_log,
        most_body_bytes=config.most_body_bytes,
        pass_through=config.gateway.pass_through,
        own=own,
        spans=spans,
    )
    api = HttpServer(
        own,
        behind,
        config.selector.listen,
        "lean-selector",
        protocol_of(config.selector),
        port_flag="--selector-port",
    )
    app = handler if tokens is None else guarded(handler, tokens, counts, front)
    server = HttpServer(app, front, config.listen, "gateway", StreamingProtocol)
    if tokens is not None:
        server.watch(tokens.look)
    await api.start()
    await server.start()
    server.on_reload += api.on_reload
    parts.start()

    def tick(now: float) -> None:
        api.sweep(now)
        parts.tick(now)
        directory.look()
        directory.pass_over(fleet.ejected())
        handler.sweep(now)

    async def close() -> None:
        await handler.close()
        if spans is not None:
            await asyncio.to_thread(spans.close)
        await prompts.close()
        api.abort()
        if gateways is not None:
            await gateways.close()
        await parts.close()

    await server.serve(tick, parts.refuse_new, close, log_state.doubts)
    context.destroy(linger=0)
