"""Builds the slot tracker and runs it on the host. Only wires."""

import asyncio

from lean_selector.core.replication.records import ReplicaEvent
from lean_selector.core.trackers import Tracker, Trackers
from lean_selector.http1.connections import Connections
from lean_selector.http1.limits import Limits
from lean_selector.observing import logs
from lean_selector.observing.lifecycle_log import TrackerLog
from lean_selector.observing.load_metrics import replica_families, tracker_families
from lean_selector.process.expiry_sweep import ExpirySweep
from lean_selector.process.host import HttpServer, new_zmq_context, observation, run
from lean_selector.process.replica_plane import ReplicaPlane
from lean_selector.process.slot_tracker_config import SlotTrackerConfig
from lean_selector.services.connection_metrics import connection_families
from lean_selector.services.observed import observed
from lean_selector.services.slot_tracker import SlotTrackerService

MAX_BODY_BYTES = 2 * 1024 * 1024  # the reference's


def run_slot_tracker(config: SlotTrackerConfig) -> None:
    """Runs the slot tracker until it is told to stop. Raises StartError."""
    run(config, config.listen, lambda log_state: _slot_tracker(config, log_state))


async def _slot_tracker(config: SlotTrackerConfig, log_state: logs.LogState) -> None:
    context = new_zmq_context()

    # What the plane asks; it does so only once all is made, the trackers below too.
    def lookup(model_name: str, tenant_id: str) -> Tracker | None:
        return trackers.lookup(model_name, tenant_id)

    def every_tracker() -> list[Tracker]:
        return trackers.in_order()

    plane = None
    if config.replica is not None:
        plane = ReplicaPlane(
            context,
            config.replica,
            lookup,
            every_tracker,
            _nobody_waits,
            config.reservation_expiry_s,
        )
    trackers = Trackers(
        None if plane is None else plane.events, reservation_expiry_s=config.reservation_expiry_s
    )
    service = SlotTrackerService(trackers, plane=plane)
    connections = Connections(
        asyncio.get_running_loop().call_soon,
        Limits(max_body_bytes=MAX_BODY_BYTES),
        max_connections=config.listen.max_connections,
    )
    server = HttpServer(
        observed(
            service.routes(),
            lambda _: [
                *tracker_families(trackers),
                *replica_families(plane),
                *connection_families(connections),
            ],
            observation("slot_tracker", config.listen, log_state),
        ),
        connections,
        config.listen,
        name="lean-slot-tracker",
    )
    await server.start()
    if plane is not None:
        plane.start()

    lifecycle = TrackerLog(trackers)

    def expire(now: float, max_steps: int) -> int:
        expired = len(trackers.expire(now, max_steps))
        lifecycle.expired(expired)
        return expired

    expiry = ExpirySweep(expire, trackers.arrived, asyncio.get_running_loop().call_soon)

    def tick(_: float) -> None:
        expiry.begin()
        lifecycle.look()

    async def close() -> None:
        expiry.stop()
        if plane is not None:
            await plane.close()

    await server.serve(tick, lambda: None, close)
    context.destroy(linger=0)


def _nobody_waits(event: ReplicaEvent, now: float) -> None:
    """The slot tracker parks no requests that an event could let in."""
