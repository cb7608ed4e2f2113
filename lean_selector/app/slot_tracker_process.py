"""Composes the slot tracker of its parts, and runs it."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import zmq.asyncio

from lean_selector.api import logs
from lean_selector.api.application import observed
from lean_selector.api.metrics import connection_families
from lean_selector.api.routes import Route, durable
from lean_selector.api.shared_handlers import discovery_routes
from lean_selector.api.slot_tracker_handlers import (
    SlotTrackerService,
    TrackerLog,
    tracker_families,
)
from lean_selector.app.host import (
    ExpirySweep,
    HttpServer,
    new_zmq_context,
    tokens_of,
)
from lean_selector.app.service_flags import TrackerConfig
from lean_selector.core.trackers import Trackers
from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits
from lean_selector.http.protocol import HttpProtocol
from lean_selector.links.links import Links
from lean_selector.parts import Part, Parts

if TYPE_CHECKING:
    from lean_selector.app.replication import Replication
    from lean_selector.app.state_persister import Persister
    from lean_selector.discovery.discoveries import Discoveries

MAX_BODY_BYTES = 2 * 1024 * 1024  # the reference's


class TrackerUpkeep(Part):
    """Expires reservations, and logs changes."""

    def __init__(self, trackers: Trackers) -> None:
        self._trackers = trackers
        self._log = TrackerLog(trackers)
        call_soon = asyncio.get_running_loop().call_soon
        self._expiry = ExpirySweep(self._expire, trackers.arrived, call_soon)

    def _expire(self, now: float, max_steps: int) -> int:
        expired = len(self._trackers.expire(now, max_steps))
        self._log.expired(expired)
        return expired

    def tick(self, now: float) -> None:
        self._expiry.begin()
        self._log.log_changes()

    def close(self) -> None:
        self._expiry.stop()


class TrackerParts(Parts):
    """A slot tracker without its listener. Construction may raise StartError."""

    def __init__(self, config: TrackerConfig, context: zmq.asyncio.Context) -> None:
        super().__init__()
        self.trackers = Trackers(reservation_expiry_s=config.reservations.reservation_expiry_s)
        replication: Replication | None = None
        discovery: Discoveries | None = None
        self._persister: Persister | None = None
        if config.replica.endpoint is not None:
            from lean_selector.app.replication import tracker_replication

            links = Links(context, allowed=config.endpoints.rules)
            replication = self.add(tracker_replication(config, context, links, self.trackers))
            if config.replica.discover:
                from lean_selector.app.discovery import tracker_discovery

                discovery = self.add(tracker_discovery(config, replication, links))
        if config.state.path is not None:
            from lean_selector.app.state import keep_trackers

            kept = keep_trackers(config, self.trackers, replication, discovery)
            self._persister = self.add(kept)
        self.add(TrackerUpkeep(self.trackers))
        self._service = SlotTrackerService(self.trackers, replication=replication)
        self._report = None if discovery is None else discovery.report

    def routes(self) -> tuple[Route, ...]:
        routes = (*self._service.routes(), *discovery_routes(self._report), *super().routes())
        return routes if self._persister is None else durable(routes, self._persister)


async def serve(config: TrackerConfig, log_state: logs.LogState) -> None:
    """Runs until a signal stops it. Raises StartError."""
    tokens = tokens_of(config.listen)
    context = new_zmq_context()
    parts = TrackerParts(config, context)
    connections = Connections(
        asyncio.get_running_loop().call_soon,
        Limits(max_body_bytes=MAX_BODY_BYTES),
        max_connections=config.listen.max_connections,
    )
    app = observed(
        parts.routes(),
        lambda _: [
            *tracker_families(parts.trackers),
            *connection_families(connections),
            *parts.families(),
        ],
        log_state,
        service="slot_tracker",
        title="lean-slot-tracker",
        access_log=config.listen.access_log,
        tokens=tokens,
        connections=connections,
    )
    new_protocol = partial(HttpProtocol, app, connections)
    server = HttpServer(
        new_protocol, connections, config.listen, "lean-slot-tracker", tokens=tokens
    )
    await server.start()
    await server.serve(parts, log_state.doubts)
    context.destroy(linger=0)
