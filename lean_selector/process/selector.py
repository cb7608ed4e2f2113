"""Builds the selection service and runs it on the host.

Everything lives on one uvloop loop in one thread. This module only wires: it makes the objects,
hands each the two or three others that it uses, and takes them down again (decision D14).
"""

import asyncio
import random
from collections.abc import Iterable

from lean_selector.core.errors import Unavailable
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.replication.records import ReplicaEvent
from lean_selector.core.selection.inspection import established
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.selector import Selector
from lean_selector.http1.connections import Connections
from lean_selector.http1.limits import Limits
from lean_selector.observing import logs
from lean_selector.observing.lifecycle_log import SelectorLog
from lean_selector.observing.load_metrics import replica_families
from lean_selector.observing.selection_metrics import selection_families
from lean_selector.process.expiry_sweep import ExpirySweep
from lean_selector.process.host import HttpServer, new_zmq_context, observation, run
from lean_selector.process.replica_plane import ReplicaPlane
from lean_selector.process.selector_config import SelectorConfig
from lean_selector.services.busy_threshold import BusyThresholdService
from lean_selector.services.connection_metrics import connection_families
from lean_selector.services.dump_answers import DumpAnswers
from lean_selector.services.observed import observed
from lean_selector.services.selection import SHUTDOWN, SelectionService
from lean_selector.services.service_state import ServiceState
from lean_selector.sockets.index_sweeps import IndexSweeps
from lean_selector.sockets.kv_subscriptions import KvSubscriptions
from lean_selector.sockets.links import Links
from lean_selector.sockets.recovery import Recovery, log_discarded
from lean_selector.tasks import supervise


def run_selector(config: SelectorConfig) -> None:
    """Runs the selection service until it is told to stop. Raises StartError."""
    run(config, config.listen, lambda log_state: _selector(config, log_state), config.warnings)


async def _selector(config: SelectorConfig, log_state: logs.LogState) -> None:
    loop = asyncio.get_running_loop()
    context = new_zmq_context()
    links = Links(context)
    subscriptions = KvSubscriptions(links)

    sweeps = IndexSweeps()

    def new_index(block_size: int) -> KvIndex:
        return KvIndex(
            block_size,
            device_bound=config.device_blocks_per_rank,
            lower_tier_bound=config.lower_tier_blocks_per_rank,
            on_sweep=sweeps.start,
        )

    # What the plane asks; it does so only once all is made, the selector below too.
    def lookup(model_name: str, tenant_id: str) -> Partition | None:
        return selector.scheduling_partition(model_name, tenant_id)

    def every_partition() -> Iterable[Partition]:
        return established(selector.catalog, None, None)

    def on_applied(event: ReplicaEvent, now: float) -> None:
        request_id = event.booking.request_id
        selector.load_changed(event.model_name, event.tenant_id, request_id, now)

    plane = None
    if config.replica is not None:
        plane = ReplicaPlane(
            context,
            config.replica,
            lookup,
            every_partition,
            on_applied,
            config.router.reservation_expiry_s,
            links,
        )
    selector = Selector(
        config.router,
        subscriptions,
        random.Random(),
        new_index=new_index,
        events=None if plane is None else plane.events,
        thresholds=config.busy,
        on_discarded=log_discarded,
    )
    peers = config.indexer_peers if config.router.use_kv_events else []
    state = ServiceState(is_recovering=bool(peers))
    dumps = DumpAnswers(selector.catalog, subscriptions.watermarks, loop.call_soon)
    service = SelectionService(
        selector,
        dump=dumps.answer,
        sources=subscriptions,
        state=state,
        plane=plane,
        call_later=loop.call_later,
    )
    routes = (*service.routes(), *BusyThresholdService(selector).routes())
    recovery = Recovery(selector.catalog, subscriptions, peers, config.recovery_timeout_s)
    recovering = start_recovery(recovery, state) if peers else None
    connections = Connections(
        loop.call_soon, Limits(), max_connections=config.listen.max_connections
    )
    server = HttpServer(
        observed(
            routes,
            lambda meters: [
                *selection_families(selector, subscriptions, meters, config.overload_status),
                *replica_families(plane),
                *connection_families(connections),
            ],
            observation("selector", config.listen, log_state),
            config.overload_status,
        ),
        connections,
        config.listen,
    )
    await server.start()
    if plane is not None:
        plane.start()

    lifecycle = SelectorLog(selector)

    def expire(now: float, max_steps: int) -> int:
        expired = selector.expire(now, max_steps)
        lifecycle.expired(expired)
        return len(expired)

    expiry = ExpirySweep(expire, selector.arrived, loop.call_soon)

    def tick(now: float) -> None:
        expiry.begin()
        lifecycle.look()
        selector.admit_waiting(now)

    def refuse_new() -> None:
        state.drain()
        if recovering is not None:
            recovering.cancel()
        selector.refuse_parked(Unavailable(SHUTDOWN))

    async def close() -> None:
        expiry.stop()
        await subscriptions.close()
        if plane is not None:
            await plane.close()

    await server.serve(tick, refuse_new, close)
    context.destroy(linger=0)


def start_recovery(recovery: Recovery, state: ServiceState) -> "asyncio.Task[None]":
    """Recovers the KV index from a peer beside everything else."""

    async def recover() -> None:
        try:
            await recovery.run()
        finally:
            state.recovered()
        await recovery.forget_unclaimed()

    return supervise("recovery", recover, again=False)
