"""Builds the selection service and runs it on the host.

Everything lives on one uvloop loop in one thread. This module only wires: it makes the objects,
hands each the two or three others that it uses, and takes them down again (decision D14).
"""

import asyncio
import random

from lean_selector.core.errors import Unavailable
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.replication.events import ReplicaEvent
from lean_selector.core.selection.inspection import established
from lean_selector.core.selection.selector import Selector
from lean_selector.http1.connections import Connections
from lean_selector.http1.limits import Limits
from lean_selector.observing import logs
from lean_selector.observing.lifecycle_log import SelectorLog
from lean_selector.observing.load_metrics import replica_families
from lean_selector.observing.selection_metrics import selection_families
from lean_selector.process.expiry_sweep import ExpirySweep
from lean_selector.process.host import HttpServer, StartError, new_zmq_context, observation, run
from lean_selector.process.replica_plane import ReplicaPlane
from lean_selector.process.selector_config import SelectorConfig
from lean_selector.services.busy_threshold import BusyThresholdService
from lean_selector.services.connection_metrics import connection_families
from lean_selector.services.dump_answers import DumpAnswers
from lean_selector.services.observed import observed
from lean_selector.services.selection import SHUTDOWN, SelectionService
from lean_selector.sockets.index_sweeps import IndexSweeps
from lean_selector.sockets.kv_subscriptions import KvSubscriptions
from lean_selector.sockets.links import Links
from lean_selector.sockets.recovery import Recovery
from lean_selector.sockets.replica_mesh import ReplicaSyncError
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
        index = KvIndex(
            block_size,
            device_bound=config.device_blocks_per_rank,
            lower_tier_bound=config.lower_tier_blocks_per_rank,
        )
        index.on_sweep = sweeps.start
        return index

    selector = Selector(
        config.router, subscriptions, random.Random(), new_index=new_index, thresholds=config.busy
    )
    plane = None
    if config.replica is not None:

        def on_applied(event: ReplicaEvent, now: float) -> None:
            request_id = event.booking.request_id
            selector.load_changed(event.model_name, event.tenant_id, request_id, now)

        try:
            plane = ReplicaPlane(
                context,
                config.replica,
                selector.scheduling_partition,
                lambda: established(selector.catalog, None, None),
                on_applied,
                config.router.reservation_expiry_s,
                links,
            )
        except ReplicaSyncError as error:
            raise StartError(str(error)) from None
        selector.events = plane.events
    dumps = DumpAnswers(selector.catalog, subscriptions.watermarks, loop.call_soon)
    service = SelectionService(
        selector,
        dump=dumps.answer,
        sources=subscriptions,
        plane=plane,
        call_later=loop.call_later,
    )
    routes = (*service.routes(), *BusyThresholdService(selector).routes())
    recovering = start_recovery(config, selector, subscriptions, service)
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
        service.draining = True
        recovering.cancel()
        selector.refuse_parked(Unavailable(SHUTDOWN))

    async def close() -> None:
        expiry.stop()
        await subscriptions.close()
        if plane is not None:
            await plane.close()

    await server.serve(tick, refuse_new, close)
    context.destroy(linger=0)


def start_recovery(
    config: SelectorConfig,
    selector: Selector,
    subscriptions: KvSubscriptions,
    service: SelectionService,
) -> "asyncio.Task[None]":
    """Recovers the KV index from a peer, if there are any, beside everything else."""
    peers = config.indexer_peers if config.router.use_kv_events else []
    recovery = Recovery(selector.catalog, subscriptions, peers, config.recovery_timeout_s)
    service.recovering = bool(peers)

    async def recover() -> None:
        try:
            if peers:
                await recovery.run()
        finally:
            service.recovering = False
        if peers:
            await recovery.forget_unclaimed()

    return supervise("recovery", recover, again=False)
