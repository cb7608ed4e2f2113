"""Builds the slot tracker and runs it on the host. Only wires."""

import asyncio

from lean_selector.core.replication.events import ReplicaEvent
from lean_selector.core.trackers import Trackers
from lean_selector.http1.connections import Connections
from lean_selector.http1.limits import Limits
from lean_selector.observing import logs
from lean_selector.observing.lifecycle_log import TrackerLog
from lean_selector.observing.load_metrics import replica_families, tracker_families
from lean_selector.process.expiry_sweep import ExpirySweep
from lean_selector.process.host import HttpServer, StartError, new_zmq_context, observation, run
from lean_selector.process.replica_plane import ReplicaPlane
from lean_selector.process.slot_tracker_config import SlotTrackerConfig
from lean_selector.services.connection_metrics import connection_families
from lean_selector.services.observed import observed
from lean_selector.services.slot_tracker import SlotTrackerService
from lean_selector.sockets.replica_mesh import ReplicaSyncError

MAX_BODY_BYTES = 2 * 1024 * 1024  # the reference's


def run_slot_tracker(config: SlotTrackerConfig) -> None:
    """Runs the slot tracker until it is told to stop. Raises StartError."""
    run(config, config.listen, lambda log_state: _slot_tracker(config, log_state))


async def _slot_tracker(config: SlotTrackerConfig, log_state: logs.LogState) -> None:
    context = new_zmq_context()
    trackers = Trackers(reservation_expiry_s=config.reservation_expiry_s)
    plane = None
    if config.replica is not None:
        try:
            plane = ReplicaPlane(
                context,
                config.replica,
                trackers.lookup,
                trackers.in_order,
                _nobody_waits,
                config.reservation_expiry_s,
            )
        except ReplicaSyncError as error:
            raise StartError(str(error)) from None
        trackers.events = plane.events
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
