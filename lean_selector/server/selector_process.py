"""Builds, starts and stops the parts of the selector, and its listener.

Everything runs on one uvloop loop in one thread. This module only creates the objects, and passes
to each object the other objects that it uses (decision D14)."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import zmq.asyncio

from lean_selector.core.errors import Unavailable
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.replication.ledger import LifecycleEvents
from lean_selector.core.replication.shapes import ReplicaEvent
from lean_selector.core.selection.inspection import established
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import ROUTE
from lean_selector.core.sessions.table import SessionTables
from lean_selector.core.settings import API_1_6
from lean_selector.events.ingest_turns import IndexSweeps
from lean_selector.events.links import Links
from lean_selector.events.subscriptions import KvSubscriptions
from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits
from lean_selector.http.protocol import App, HttpProtocol
from lean_selector.server.host import (
    ExpirySweep,
    HttpServer,
    new_zmq_context,
    run,
    tokens_of,
)
from lean_selector.server.selector_flags import SelectorConfig
from lean_selector.service import logs
from lean_selector.service.access import AccessTokens
from lean_selector.service.application import observed, page_routes
from lean_selector.service.exposition import AnyFamily, Families, RouteMeter
from lean_selector.service.header_warnings import refusal_lines
from lean_selector.service.lifecycle_log import SelectorLog
from lean_selector.service.metrics import connection_families
from lean_selector.service.routes import durable
from lean_selector.service.selection import SHUTDOWN, DumpAnswers, SelectionService
from lean_selector.service.selector_metrics import (
    selection_cache_families,
    selection_families,
    session_families,
)
from lean_selector.service.shared_handlers import discovery_routes
from lean_selector.service.worker_handlers import ServiceState
from lean_selector.tasks import supervise

if TYPE_CHECKING:
    from lean_selector.core.selection.peer_sessions import PeerSessions
    from lean_selector.core.selection.shapes import WorkerSpec
    from lean_selector.http.outbound import OutboundClient
    from lean_selector.server.decision_log import DecisionLog
    from lean_selector.server.gateway_routes import GatewayRoutes
    from lean_selector.server.replication import Replication
    from lean_selector.server.state_persister import Persister
    from lean_selector.service.ui import Page
    from lean_selector.workers.discoveries import Discoveries
    from lean_selector.workers.polls import WorkerPolls

# Steps of the sessions' upkeep per model, twice a second; they take 5 ms at most.
SESSION_STEPS = 1_000


class SelectorParts:
    """A selector on the running loop, without an HTTP listener: event sources, replication,
    discovery, recovery and route handlers.

    Call `start` to begin outbound work, `tick` every TICK_S, and `refuse_new` when a shutdown
    begins; then await `close`. If construction raises StartError, nothing is left running."""

    def __init__(self, config: SelectorConfig, context: zmq.asyncio.Context) -> None:
        """`context` is the process's ZMQ context, and must not have any sockets yet."""
        loop = asyncio.get_running_loop()
        allowed = self.allowed = config.endpoints.rules
        engine_keys = None
        if config.engine_keys.server_keys_file is not None:
            from lean_selector.server.curve_settings import engine_client_keys

            engine_keys = engine_client_keys(config.engine_keys)
        links = self._links = Links(context, allowed=allowed, engine_keys=engine_keys)
        self.resolve = links.resolver.resolve
        self.subscriptions = subscriptions = KvSubscriptions(links, config.index.source_grace_s)
        sweeps = IndexSweeps()

        def new_index(block_size: int) -> KvIndex:
            return KvIndex(
                block_size,
                device_bound=config.index.device_blocks,
                lower_tier_bound=config.index.lower_tier_blocks,
                on_sweep=sweeps.start,
            )

        def on_applied(event: ReplicaEvent, now: float) -> None:
            request_id = event.booking.request_id
            selector.load_changed(event.model_name, event.tenant_id, request_id, now)

        self.families: Families = []  # metrics of optional parts
        replication: Replication | None = None
        tables: SessionTables | None = None  # None: not replicated
        if config.replica.endpoint is not None:
            from lean_selector.server import replication as wiring

            replication = wiring.Replication(
                context,
                config,
                lambda *key: selector.scheduling_partition(*key),  # set below
                lambda: established(selector.catalog, None, None),
                on_applied,
                links,
                tells_sessions=config.settings.sessions is not None,
            )
            if (sessions := config.settings.sessions) is not None:
                tables = SessionTables(
                    sessions, replication.router_id, time.time_ns, replication.sync.publish
                )
            self.families += replication.families()
        self.replication = replication
        events: LifecycleEvents | None = None if replication is None else replication.events
        self.decisions: DecisionLog | None = None
        if (log := config.decisions).path is not None:
            from lean_selector.server import decision_log

            events = self.decisions = decision_log.DecisionLog(
                log.path, log.most_mb << 20, log.share, config.settings, events
            )
            self.decisions.keeps_matches = bool(config.access_logs.places)
            self.families += self.decisions.families()
        check_worker: Callable[[WorkerSpec], None] = lambda spec: None  # noqa: E731
        if allowed is not None:
            from lean_selector.server.peer_access import worker_check

            check_worker = worker_check(allowed)
        self.selector = selector = Selector(
            config.settings,
            subscriptions,
            random.Random(),
            new_index=new_index,
            events=events,
            thresholds=config.thresholds,
            on_discarded=_log_discarded,
            sessions=tables,
            check_worker=check_worker,
            call_soon=loop.call_soon,
            decisions=self.decisions,
        )
        self.sessions: PeerSessions | None = None
        if config.settings.sessions is not None:
            from lean_selector.core.selection import peer_sessions

            writer_id = 0 if replication is None else replication.router_id
            self.sessions = peer_sessions.PeerSessions(selector.catalog, writer_id)
            if replication is not None:
                replication.sessions = self.sessions
        self.finding: Discoveries | None = None
        if config.discover.targets or config.replica.discover:
            from lean_selector.server import discovery

            self.finding = discovery.selector_discoveries(
                config, selector, subscriptions, replication, links
            )
            self.families += discovery.discovery_families(self.finding)
        peers = config.index.recover_from if config.settings.use_kv_events else []
        if peers:
            subscriptions.hold()  # restored workers also wait for the recovery
        self._state = ServiceState(is_recovering=bool(peers))
        self.dumps = DumpAnswers(selector.catalog, subscriptions.watermarks, loop.call_soon)
        service = SelectionService
        if config.settings.dialect == API_1_6:
            from lean_selector.service import selection_16

            service = selection_16.SelectionService16
        self.service = service(
            selector,
            dump=self.dumps.answer,
            bare_dump=self.dumps.answer_16,
            sources=subscriptions,
            state=self._state,
            replication=replication,
            call_later=loop.call_later,
        )
        self.persister: Persister | None = None
        if config.state.path is not None:
            from lean_selector.server.state import keep_selector

            self.persister = keep_selector(config, selector, replication, self.finding, self._state)
            self.families += self.persister.families()
        report = None if self.finding is None else self.finding.report
        routes = (*self.service.routes(), *discovery_routes(report))
        self._page: Page | None = None  # created on the first request for it
        if not config.page.is_off:
            routes = (*routes, *page_routes(self._asked_page))
        self.routes = routes if self.persister is None else durable(routes, self.persister)
        self._config = config
        if config.peers.token_file or config.peers.ca_file or config.peers.cert_file:
            self.peer_client()  # unusable files stop the start, even if no request needs them yet
        self._recovering: asyncio.Task[None] | None = None
        if peers:
            from lean_selector.replicas import recovery

            timeout_s = config.index.recovery_timeout_s
            recovering = recovery.Recovery(
                selector.catalog, subscriptions, peers, timeout_s, self.peer_client()
            )

            async def recover() -> None:
                try:
                    await recovering.run()
                finally:
                    self._state.is_recovering = False  # serve the current state
                await recovering.forget_unclaimed()

            self._recovering = supervise("recovery", recover, again=False)
        self._polls: WorkerPolls | None = None
        if config.health.interval_s is not None:
            from lean_selector.workers import polls

            self._polls = polls.WorkerPolls(
                selector.catalog,
                selector.health,
                self.engine_client(),
                random.Random(),
                interval_s=config.health.interval_s,
                path=config.health.path,
                timeout_s=config.health.timeout_s,
            )
            subscriptions.on_lost = self._polls.soon
        self._lifecycle = SelectorLog(selector)
        self._expiry = ExpirySweep(self._expire, selector.arrived, loop.call_soon)
        self._forgetting: asyncio.TimerHandle | None = None
        if config.settings.routed_ttl_s > 0.0:
            self._forget(max(0.01, min(0.5, config.settings.routed_ttl_s / 40)))

    def engine_client(self) -> "OutboundClient":
        """Returns the HTTP client for requests to engines. Raises StartError."""
        from lean_selector.http.outbound import OutboundClient
        from lean_selector.server.peer_access import credentials_of

        return OutboundClient(self.resolve, credentials_of(self._config.engines), self.allowed)

    def peer_client(self) -> "OutboundClient":
        """Returns the HTTP client for requests to other replicas. Raises StartError."""
        from lean_selector.http.outbound import OutboundClient
        from lean_selector.server.peer_access import credentials_of

        return OutboundClient(self.resolve, credentials_of(self._config.peers))

    def start(self) -> None:
        for part in (self.replication, self.finding, self.persister):
            if part is not None:
                part.start()

    def _expire(self, now: float, max_steps: int) -> int:
        expired = self.selector.expire(now, max_steps)
        self._lifecycle.expired(expired)
        return len(expired)

    def _forget(self, every_s: float) -> None:
        """Every `every_s` seconds, forgets routed prompts that are assumed to be evicted by now.
        (`tick` is called too rarely for prompts that stay cached for only a few seconds.)"""
        loop = asyncio.get_running_loop()
        self._forgetting = loop.call_later(every_s, self._forget, every_s)
        now = time.monotonic()
        for partition in self.selector.catalog.partitions.values():
            if partition.routed is not None:
                partition.routed.expire(now)

    def tick(self, now: float) -> None:
        self._expiry.begin()
        self._lifecycle.look()
        if self.persister is not None:
            self.persister.look(now)
        if self._polls is not None:
            self._polls.look()
        if self.decisions is not None:
            self.decisions.hand_over()
        self.selector.admit_waiting(now)
        if self.sessions is not None:
            self.sessions.tend(now, SESSION_STEPS)

    def refuse_new(self) -> None:
        self._state.is_draining = True
        if self._page is not None:
            self._page.close()
        if self._recovering is not None:
            self._recovering.cancel()
        self.selector.refuse_parked(Unavailable(SHUTDOWN))

    def _asked_page(self) -> "Page":
        if self._page is None:
            from lean_selector.service import fleet, ui

            loop = asyncio.get_running_loop()
            report = None if self.finding is None else self.finding.report
            view = fleet.FleetView(self.selector, self.subscriptions, self._state, report)
            events = ui.Events(self.selector, view, loop.call_soon, loop.call_later)
            self._page = ui.Page(view, events, loop.call_soon)
            if self._state.is_draining:
                self._page.close()
        return self._page

    def begin_no_links(self) -> None:
        """Prevents new outgoing ZMQ connections, because the event loop is about to end."""
        self._links.is_ending = True

    async def close(self) -> None:
        if self.persister is not None:
            await self.persister.close()
        self._expiry.stop()
        if self._forgetting is not None:
            self._forgetting.cancel()
        if self.finding is not None:
            await self.finding.close()
        if self._polls is not None:
            await self._polls.close()
        await self.subscriptions.close()
        if self.replication is not None:
            await self.replication.close()
        if self.decisions is not None:
            self.decisions.close()


def _log_discarded(partition: Partition) -> None:
    from lean_selector.replicas.recovery import log_discarded

    log_discarded(partition)


# -- the selector behind its listener ------------------------------------------------------------


def run_selector(config: SelectorConfig) -> None:
    """Runs the selection service until a signal stops it. Raises StartError."""
    run(config, lambda log_state: _selector(config, log_state))


async def _selector(config: SelectorConfig, log_state: logs.LogState) -> None:
    """Runs the selector and serves its API over HTTP."""
    loop = asyncio.get_running_loop()
    tokens = tokens_of(config.listen)
    context = new_zmq_context()
    parts = SelectorParts(config, context)
    gateways = gateway_routes_of(config, parts)
    connections = Connections(
        loop.call_soon, Limits(), max_connections=config.listen.max_connections
    )
    app = selector_app(config, parts, connections, log_state, gateways, tokens=tokens)
    server = HttpServer(app, connections, config.listen, protocol=protocol_of(config))
    if tokens is not None:
        server.watch(tokens.look)
    await server.start()
    parts.start()

    async def close() -> None:
        if gateways is not None:
            await gateways.close()
        await parts.close()

    await server.serve(parts.tick, parts.refuse_new, close, log_state.doubts)
    context.destroy(linger=0)


def protocol_of(config: SelectorConfig) -> type[HttpProtocol]:
    """Returns the HTTP protocol class of the selector's API: with streaming if /ui is enabled."""
    if config.page.is_off:
        return HttpProtocol
    from lean_selector.http.streaming import StreamingProtocol

    return StreamingProtocol


def gateway_routes_of(config: SelectorConfig, parts: SelectorParts) -> "GatewayRoutes | None":
    """Returns what serves POST /route and access logs; None if both are off. Raises StartError."""
    if not config.access_logs.places and config.prompts.settings is None:
        return None
    from lean_selector.server.gateway_routes import GatewayRoutes

    # Responses to gateways are the same in every API version.
    service = SelectionService(
        parts.selector,
        dump=parts.dumps.answer,
        sources=parts.subscriptions,
        state=ServiceState(),
        call_later=asyncio.get_running_loop().call_later,
        books_at=ROUTE,
    )
    return GatewayRoutes(
        service,
        config.access_logs,
        config.prompts.settings,
        parts.engine_client,
        parts.decisions,
    )


def selector_app(
    config: SelectorConfig,
    parts: SelectorParts,
    connections: Connections,
    log_state: logs.LogState,
    gateways: "GatewayRoutes | None",
    more: Sequence[AnyFamily] = (),
    tokens: AccessTokens | None = None,
    meters: Sequence[RouteMeter] = (),
) -> App:
    """Returns the function that answers requests to the selector's API. `more`: metrics of other
    parts of the process. `meters`: counters of selections made without HTTP."""
    is_16 = config.settings.dialect == API_1_6
    return observed(
        (*parts.routes, *(() if gateways is None else gateways.routes())),
        lambda meters: [
            *selection_families(
                parts.selector, parts.subscriptions, meters, config.overload_status
            ),
            *selection_cache_families(parts.selector.selections),
            *session_families(
                lambda: list(established(parts.selector.catalog, None, None)), parts.sessions
            ),
            *connection_families(connections),
            *parts.families,
            *([] if gateways is None else gateways.families()),
            *more,
        ],
        log_state,
        service="selector",
        title="lean-selector --api 1.6" if is_16 else "lean-selector",
        access_log=config.listen.access_log,
        overload_status=config.overload_status,
        lines=refusal_lines,
        tokens=tokens,
        meters=meters,
        connections=connections,
    )
