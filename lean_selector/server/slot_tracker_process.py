"""Builds the slot tracker and runs it. This module only creates and connects objects."""

import asyncio
from typing import TYPE_CHECKING

from lean_selector.core.trackers import Trackers
from lean_selector.events.links import Links
from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits
from lean_selector.server.host import (
    ExpirySweep,
    HttpServer,
    new_zmq_context,
    run,
    tokens_of,
)
from lean_selector.server.service_flags import TrackerConfig
from lean_selector.service import logs
from lean_selector.service.application import observed
from lean_selector.service.exposition import Families
from lean_selector.service.metrics import connection_families
from lean_selector.service.routes import durable
from lean_selector.service.shared_handlers import discovery_routes
from lean_selector.service.slot_tracker_handlers import (
    SlotTrackerService,
    TrackerLog,
    tracker_families,
)

if TYPE_CHECKING:
    from lean_selector.server.replication import Replication
    from lean_selector.server.state_persister import Persister
    from lean_selector.workers.discoveries import Discoveries

MAX_BODY_BYTES = 2 * 1024 * 1024  # the reference's


def run_slot_tracker(config: TrackerConfig) -> None:
    """Runs the slot tracker until a signal stops it. Raises StartError."""
    run(config, lambda log_state: _slot_tracker(config, log_state))


async def _slot_tracker(config: TrackerConfig, log_state: logs.LogState) -> None:
    tokens = tokens_of(config.listen)
    context = new_zmq_context()
    links = Links(context, allowed=config.endpoints.rules)

    families: Families = []  # metrics of optional parts
    replication: Replication | None = None
    if config.replica.endpoint is not None:
        from lean_selector.server import replication as wiring

        replication = wiring.Replication(
            context,
            config,
            lambda model_name, tenant_id: trackers.lookup(model_name, tenant_id),  # set below
            lambda: trackers.in_order(),
            lambda event, now: None,  # there is no queue to admit requests from
            links,
        )
        families += replication.families()
    trackers = Trackers(
        None if replication is None else replication.events,
        reservation_expiry_s=config.reservations.reservation_expiry_s,
    )
    finding: Discoveries | None = None
    if config.replica.discover and replication is not None:
        from lean_selector.server import discovery

        finding = discovery.tracker_discoveries(config, replication, links)
        families += discovery.discovery_families(finding)
    service = SlotTrackerService(trackers, replication=replication)
    persister: Persister | None = None
    if config.state.path is not None:
        from lean_selector.server.state import keep_trackers

        persister = keep_trackers(config, trackers, replication, finding)
        families += persister.families()
    routes = (
        *service.routes(),
        *discovery_routes(None if finding is None else finding.report),
    )
    connections = Connections(
        asyncio.get_running_loop().call_soon,
        Limits(max_body_bytes=MAX_BODY_BYTES),
        max_connections=config.listen.max_connections,
    )
    server = HttpServer(
        observed(
            routes if persister is None else durable(routes, persister),
            lambda _: [
                *tracker_families(trackers),
                *connection_families(connections),
                *families,
            ],
            log_state,
            service="slot_tracker",
            title="lean-slot-tracker",
            access_log=config.listen.access_log,
            tokens=tokens,
            connections=connections,
        ),
        connections,
        config.listen,
        name="lean-slot-tracker",
    )
    if tokens is not None:
        server.watch(tokens.look)
    await server.start()
    optional: list[Replication | Discoveries | Persister | None] = [replication, finding, persister]
    parts = [part for part in optional if part is not None]
    for part in parts:
        part.start()

    lifecycle = TrackerLog(trackers)

    def expire(now: float, max_steps: int) -> int:
        expired = len(trackers.expire(now, max_steps))
        lifecycle.expired(expired)
        return expired

    expiry = ExpirySweep(expire, trackers.arrived, asyncio.get_running_loop().call_soon)

    def tick(now: float) -> None:
        expiry.begin()
        lifecycle.look()
        if persister is not None:
            persister.look(now)

    async def close() -> None:
        expiry.stop()
        for part in reversed(parts):
            await part.close()

    await server.serve(tick, lambda: None, close, log_state.doubts)
    context.destroy(linger=0)
