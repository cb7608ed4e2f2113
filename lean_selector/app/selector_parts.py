"""Parts of a selector: what each has (the selector, its subscriptions to engines, its upkeep), and
the features that need only a few lines to attach. Larger features have modules of their own."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import zmq.asyncio

from lean_selector.api.application import page_routes
from lean_selector.api.lifecycle_log import SelectorLog
from lean_selector.api.routes import Route
from lean_selector.api.selection import SHUTDOWN
from lean_selector.api.worker_handlers import ServiceState
from lean_selector.app.host import ExpirySweep
from lean_selector.app.selector_flags import SelectorConfig
from lean_selector.core.errors import Unavailable
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.selection.inspection import established
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.events.subscriptions import IndexSweeps, KvSubscriptions
from lean_selector.links.links import Links
from lean_selector.parts import Part
from lean_selector.tasks import supervise
from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.exposition import Families

if TYPE_CHECKING:
    from lean_selector.api.ui import Page
    from lean_selector.http.outbound import OutboundClient
    from lean_selector.replicas.recovery import Recovery

# Steps of the sessions' upkeep per model, twice a second; they take 5 ms at most.
SESSION_STEPS = 1_000


class SelectorCore(Part):
    """The objects that the optional parts of a selector use."""

    def __init__(self, config: SelectorConfig, context: zmq.asyncio.Context) -> None:
        """`context` is the process's ZMQ context, and must not have any sockets yet."""
        loop = asyncio.get_running_loop()
        self.config = config
        self.context = context
        self.router_id = secrets.randbits(64) or 1 if config.replica.endpoint is not None else 0
        self.allowed = config.endpoints.rules
        self.links = Links(context, allowed=self.allowed)
        self.resolve = self.links.resolver.resolve
        self.subscriptions = KvSubscriptions(self.links)
        self.state = ServiceState()
        sweeps = IndexSweeps()
        self.selector = Selector(
            config.settings,
            self.subscriptions,
            random.Random(),
            new_index=lambda block_size: KvIndex(
                block_size,
                device_bound=config.index.device_blocks,
                lower_tier_bound=config.index.lower_tier_blocks,
                on_sweep=sweeps.start,
            ),
            thresholds=config.thresholds,
            on_discarded=_log_discarded,
            check_worker=self._check_worker,
            call_soon=loop.call_soon,
            call_later=loop.call_later,
        )
        if config.peers.token_file or config.peers.ca_file or config.peers.cert_file:
            self.peer_client()  # unusable files stop the start, even if no request needs them yet

    def _check_worker(self, spec: WorkerSpec) -> None:
        if self.allowed is not None:
            from lean_selector.app.peer_access import check_worker

            check_worker(self.allowed, spec)

    def engine_client(self) -> "OutboundClient":
        """Return the HTTP client for requests to engines. Raises StartError."""
        from lean_selector.app.peer_access import credentials_of
        from lean_selector.http.outbound import OutboundClient

        return OutboundClient(self.resolve, credentials_of(self.config.engines), self.allowed)

    def peer_client(self) -> "OutboundClient":
        """Return the HTTP client for requests to other replicas. Raises StartError."""
        from lean_selector.app.peer_access import credentials_of
        from lean_selector.http.outbound import OutboundClient

        return OutboundClient(self.resolve, credentials_of(self.config.peers))

    def recovery(self, peers: Sequence[str]) -> "Recovery":
        """Return what copies the index of the first usable peer. Raises StartError."""
        from lean_selector.replicas.recovery import Recovery

        catalog = self.selector.catalog
        return Recovery(catalog, self.subscriptions, peers, self.peer_client())

    def refuse_new(self) -> None:
        self.state.is_draining = True
        self.selector.refuse_waiting(Unavailable(SHUTDOWN))

    async def close(self) -> None:
        await self.subscriptions.close()


def _log_discarded(partition: Partition) -> None:
    from lean_selector.replicas.recovery import log_discarded

    log_discarded(partition)


class Upkeep(Part):
    """Ends what is over: reservations, ejections, waits without hope, prompts assumed cached."""

    def __init__(self, core: SelectorCore) -> None:
        self._selector = core.selector
        self._log = SelectorLog(core.selector)
        self._loop = asyncio.get_running_loop()
        self._expiry = ExpirySweep(
            self._expire, core.selector.reservations.arrived, self._loop.call_soon
        )
        self._forgetting: asyncio.TimerHandle | None = None
        self._routed_ttl_s = core.config.settings.routed_ttl_s

    def start(self) -> None:
        if self._routed_ttl_s > 0.0:
            self._forget(max(0.01, min(0.5, self._routed_ttl_s / 40)))

    def _expire(self, now: float, max_steps: int) -> int:
        expired = self._selector.reservations.expire(now, max_steps)
        self._log.expired(expired)
        return len(expired)

    def _forget(self, every_s: float) -> None:
        """Every `every_s` seconds, forgets routed prompts that are assumed to be evicted by now.
        (`tick` is called too rarely for prompts that stay cached for only a few seconds.)"""
        self._forgetting = self._loop.call_later(every_s, self._forget, every_s)
        now = time.monotonic()
        for partition in self._selector.catalog.partitions.values():
            if partition.routed is not None:
                partition.routed.expire(now)

    def tick(self, now: float) -> None:
        self._expiry.begin()
        self._log.log_changes()
        self._selector.admit_waiting(now)

    async def close(self) -> None:
        self._expiry.stop()
        if self._forgetting is not None:
            self._forgetting.cancel()


# -- small features, whose own modules are imported only if the feature is on ----------------------


class Sessions(Part):
    """Keeps requests of a session on one worker."""

    def __init__(self, core: SelectorCore) -> None:
        from lean_selector.core.selection.peer_sessions import PeerSessions

        self._catalog = core.selector.catalog
        self.peers = PeerSessions(self._catalog, core.router_id)

    def families(self) -> Families:
        from lean_selector.api.selector_metrics import session_families

        return session_families(lambda: list(established(self._catalog, None, None)), self.peers)

    def tick(self, now: float) -> None:
        self.peers.expire_and_republish(now, SESSION_STEPS)


class StartRecovery(Part):
    """Copies the index from a peer at the start."""

    def __init__(self, core: SelectorCore, peers: list[str]) -> None:
        """From here on, workers wait for the recovery, restored ones too. Raises StartError."""
        self._state = core.state
        self._state.is_recovering = True
        core.subscriptions.hold()
        self._recovery = core.recovery(peers)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = supervise("recovery", self._recover, again=False)

    async def _recover(self) -> None:
        try:
            await self._recovery.run()
        finally:
            self._state.is_recovering = False  # serve the current state
        await self._recovery.forget_unclaimed()

    def refuse_new(self) -> None:
        if self._task is not None:
            self._task.cancel()


class PagePart(Part):
    """Serves the page /ui, which is imported on the first request for it."""

    def __init__(self, core: SelectorCore, report: Callable[[], DiscoveryReport] | None) -> None:
        """`report` tells what discovery found; None if it is off."""
        self._core = core
        self._report = report
        self._page: Page | None = None

    def routes(self) -> tuple[Route, ...]:
        return page_routes(self._open_page)

    def _open_page(self) -> "Page":
        if self._page is None:
            from lean_selector.api import fleet, ui

            loop, core = asyncio.get_running_loop(), self._core
            view = fleet.FleetView(core.selector, core.subscriptions, core.state, self._report)
            self._page = ui.Page(core.selector, view, loop.call_soon, loop.call_later)
        return self._page
