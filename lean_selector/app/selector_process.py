"""Composes the selector of its parts, and runs it behind its listener (decision D14).

Everything runs on one uvloop loop in one thread."""

import asyncio
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import zmq.asyncio

from lean_selector.api import logs
from lean_selector.api.access import AccessTokens
from lean_selector.api.application import observed
from lean_selector.api.gate import RouteMeter
from lean_selector.api.routes import Route, durable
from lean_selector.api.selection import DumpAnswers, SelectionService
from lean_selector.api.shared_handlers import discovery_routes
from lean_selector.api.worker_handlers import ServiceState
from lean_selector.app.host import HttpServer, StartError, new_zmq_context, tokens_of
from lean_selector.app.picker_flags import SelectorServiceConfig
from lean_selector.app.selector_flags import SelectorConfig
from lean_selector.app.selector_parts import (
    PagePart,
    SelectorCore,
    Sessions,
    StartRecovery,
    Upkeep,
)
from lean_selector.core.selection.shapes import ROUTE
from lean_selector.core.settings import API_1_6
from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits
from lean_selector.http.protocol import App, HttpProtocol
from lean_selector.parts import Parts
from lean_selector.wire.exposition import Families

if TYPE_CHECKING:
    from lean_selector.app.decision_log import DecisionLog
    from lean_selector.app.endpoint_picker import EndpointPicker
    from lean_selector.app.gateway_routes import GatewayRoutes
    from lean_selector.app.replication import Replication
    from lean_selector.app.state_persister import Persister
    from lean_selector.core.selection.peer_sessions import PeerSessions
    from lean_selector.discovery.discoveries import Discoveries


class SelectorParts(Parts):
    """A selector on the running loop, without an HTTP listener.

    Call `start` to begin outbound work, `tick` every TICK_S, and `refuse_new` when a shutdown
    begins; then await `close`. If construction raises StartError, nothing is left running."""

    def __init__(self, config: SelectorConfig, context: zmq.asyncio.Context) -> None:
        """`context` is the process's ZMQ context, and must not have any sockets yet."""
        super().__init__()
        core = self.core = SelectorCore(config, context)
        self.decisions: DecisionLog | None = None
        self.replication: Replication | None = None
        peers: PeerSessions | None = None
        discovery: Discoveries | None = None
        self._persister: Persister | None = None
        if config.settings.sessions is not None:
            peers = self.add(Sessions(core)).peers
        if config.replica.endpoint is not None:
            from lean_selector.app.replication import selector_replication

            self.replication = self.add(selector_replication(core, peers))
        if config.decisions.path is not None:
            from lean_selector.app.decision_log import selector_log

            self.decisions = self.add(selector_log(core, config.decisions.path))
        self.add(core)
        if config.health.interval_s is not None:
            from lean_selector.discovery.polls import WorkerPolls

            polls = WorkerPolls(
                core.selector.catalog,
                core.selector.health,
                core.engine_client(),
                random.Random(),
                interval_s=config.health.interval_s,
                path=config.health.path,
            )
            core.subscriptions.on_lost = self.add(polls).check_now
        if config.discover.targets or config.replica.discover:
            from lean_selector.app.discovery import selector_discovery

            discovery = self.add(selector_discovery(core, self.replication))
        self.add(Upkeep(core))
        if config.settings.use_kv_events and config.index.recover_from:
            self.add(StartRecovery(core, config.index.recover_from))
        if config.state.path is not None:
            from lean_selector.app.state import keep_selector

            self._persister = self.add(keep_selector(core, self.replication, discovery))
        self.report = None if discovery is None else discovery.report
        if not config.page.is_off:
            self.add(PagePart(core, self.report))
        call_soon = asyncio.get_running_loop().call_soon
        self.dumps = DumpAnswers(core.selector.catalog, core.subscriptions, call_soon)
        self.service = self._new_service()

    def _new_service(self) -> SelectionService:
        core, kind = self.core, SelectionService
        if core.config.settings.dialect == API_1_6:
            from lean_selector.api.selection_16 import SelectionService16

            kind = SelectionService16
        return kind(
            core.selector,
            dump=self.dumps.answer,
            sources=core.subscriptions,
            state=core.state,
            replication=self.replication,
        )

    def routes(self) -> tuple[Route, ...]:
        routes = (*self.service.routes(), *discovery_routes(self.report), *super().routes())
        return routes if self._persister is None else durable(routes, self._persister)

    def add_gateway_routes(self, tokens: AccessTokens | None = None) -> "GatewayRoutes | None":
        """Adds what serves POST /route and access logs, if they are on. Raises StartError."""
        config, core, ends = self.core.config, self.core, None
        prompts, access_logs = config.prompts.settings, config.access_logs
        if access_logs.addresses:
            from lean_selector.app.gateway_routes import AccessLogReaders

            logs = AccessLogReaders(access_logs, core.selector, time.monotonic, self.decisions)
            ends = self.add(logs).ends
        if prompts is None:
            return None
        from lean_selector.app.gateway_routes import GatewayRoutes

        # Responses to gateways are the same in every API version.
        service = SelectionService(
            core.selector,
            dump=self.dumps.answer,
            sources=core.subscriptions,
            state=ServiceState(),
            books_at=ROUTE,
        )
        headers = config.queue.headers(tokens, by_name=False)  # the token is that of a proxy
        return self.add(GatewayRoutes(service, prompts, core.engine_client(), ends, headers))


# -- the selector behind its listener --------------------------------------------------------------


def _endpoint_picker(
    config: SelectorServiceConfig,
    parts: SelectorParts,
    routes: "GatewayRoutes",
    tokens: AccessTokens | None,
) -> "EndpointPicker":
    try:
        from lean_selector.app.endpoint_picker import EndpointPicker
    except ModuleNotFoundError as error:
        raise StartError(
            f'--epp-port needs the package `{error.name}`: pip install "lean-selector[epp]"'
        ) from None
    return EndpointPicker(parts.core, config, routes, tokens)


async def serve(config: SelectorServiceConfig, log_state: logs.LogState) -> None:
    """Runs until a signal stops it. Raises StartError."""
    loop = asyncio.get_running_loop()
    tokens = tokens_of(config.listen)
    context = new_zmq_context()
    parts = SelectorParts(config, context)
    routes, meters = parts.add_gateway_routes(tokens), list[RouteMeter]()
    picker: EndpointPicker | None = None
    if config.picker.port is not None:
        assert routes is not None
        picker = parts.add(_endpoint_picker(config, parts, routes, tokens))
        meters.append(picker.chooser.meter)
    connections = Connections(
        loop.call_soon, Limits(), max_connections=config.listen.max_connections
    )
    app = selector_app(parts, connections, log_state, tokens=tokens, meters=meters)
    new_protocol = partial(HttpProtocol, app, connections)
    server = HttpServer(new_protocol, connections, config.listen, tokens=tokens)
    if picker is not None:
        await picker.server.start()
    await server.start()
    await server.serve(parts, log_state.doubts)
    context.destroy(linger=0)


def selector_app(
    parts: SelectorParts,
    connections: Connections,
    log_state: logs.LogState,
    tokens: AccessTokens | None = None,
    meters: Sequence[RouteMeter] = (),
) -> App:
    """Return the function that answers requests to the selector's API. `meters`: counters of
    selections made without HTTP."""
    core, config = parts.core, parts.core.config
    overload_status = config.overload_status

    def families(meters: Sequence[RouteMeter]) -> Families:
        from lean_selector.api.metrics import connection_families
        from lean_selector.api.selector_metrics import selection_families

        return [
            *selection_families(core.selector, core.subscriptions, meters, overload_status),
            *connection_families(connections),
            *parts.families(),
        ]

    return observed(
        parts.routes(),
        families,
        log_state,
        service="selector",
        title="lean-selector --api 1.6" if config.settings.dialect == API_1_6 else "lean-selector",
        access_log=config.listen.access_log,
        overload_status=overload_status,
        tokens=tokens,
        meters=meters,
        connections=connections,
    )
