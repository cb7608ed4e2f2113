"""All discoveries of a process, running: what finds, what is found, and what it is made of."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Final

from lean_selector.outbound.client import OutboundClient
from lean_selector.tasks import supervise
from lean_selector.wire.discovery_states import (
    DiscoveredPeer,
    DiscoveredWorker,
    DiscoveryReport,
    DiscoveryState,
)
from lean_selector.workers.finders import AskService, DnsFinder, FileFinder, OnPlaces, Sighting
from lean_selector.workers.kubernetes import KubernetesFinder
from lean_selector.workers.particulars import Found, Particulars, Place, endpoint_key
from lean_selector.workers.peer_roster import PeerRoster
from lean_selector.workers.roster import Asking, KnownWorker, Roster, by_state
from lean_selector.workers.targets import Target

SocketAddress = tuple[int, tuple[Any, ...] | bytes]
Resolve = Callable[[str, int], Awaitable[list[SocketAddress]]]
Run = Callable[[], Coroutine[object, object, None]]

LOOK_S: Final = 0.5


class Surroundings:
    """What finders need of the world: names, the API server, how often to look."""

    def __init__(
        self,
        resolve: Resolve,
        interval_s: float,
        ask_service: AskService | None,
        api: str,
        api_client: OutboundClient | None,
    ) -> None:
        """`ask_service` may be None where no SRV records are looked up, `api_client` where no
        service of Kubernetes is followed."""
        self.resolve: Final = resolve
        self.interval_s: Final = interval_s
        self.ask_service: Final = ask_service
        self.api: Final = api
        self.api_client: Final = api_client


class Discoveries:
    """Workers and peers by discovery. From the loop's thread, between start() and close()."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._world = surroundings
        self._finders: list[tuple[Sighting, Run]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.workers: Roster | None = None
        self.peers: PeerRoster | None = None
        self._asking: Asking | None = None
        self.sightings: list[tuple[str, Sighting]] = []  # with what they find

    # -- what to find --------------------------------------------------------------------------

    def find_workers(self, targets: Iterable[Target], roster: Roster, asking: Asking) -> None:
        """Engines that `roster` names are asked by `asking`."""
        self.workers = roster
        self._asking = asking
        for target in targets:
            sighting = Sighting(target.text)
            self.sightings.append(("workers", sighting))
            self._add(target, sighting, _Reporter(roster, target.text))

    def find_peers(self, targets: Iterable[Target], roster: PeerRoster) -> None:
        self.peers = roster
        for target in targets:
            sighting = Sighting(target.text)
            self.sightings.append(("peers", sighting))
            self._follow(target, sighting, _peer_reporter(roster, target.text))

    def _add(self, target: Target, sighting: Sighting, report: "_Reporter") -> None:
        if target.kind == "url":
            entry = Particulars(endpoint=endpoint_key(target.name))

            async def once() -> None:
                sighting.found(1)
                report.found(Found((entry,)))

            self._finders.append((sighting, once))
        elif target.kind == "file":
            finder = FileFinder(sighting, target.name, self._world.interval_s, report.found)
            self._finders.append((sighting, finder.run))
        else:
            self._follow(target, sighting, report.places)

    def _follow(self, target: Target, sighting: Sighting, on_places: OnPlaces) -> None:
        world = self._world
        if target.kind == "dns":
            dns = DnsFinder(
                sighting,
                target.name,
                None if target.port is None else int(target.port),
                target.is_secure,
                world.interval_s,
                world.resolve,
                world.ask_service,
                on_places,
            )
            self._finders.append((sighting, dns.run))
        else:
            assert world.api_client is not None
            kubernetes = KubernetesFinder(
                sighting,
                world.api_client,
                world.api,
                target.namespace,
                target.name,
                target.port,
                on_places,
            )
            self._finders.append((sighting, kubernetes.run))

    # -- running -------------------------------------------------------------------------------

    def start(self) -> None:
        """Call it in the running loop."""
        for sighting, run in self._finders:
            self._tasks.append(supervise("discovery", partial(_seen, sighting, run)))
        rosters = (self.workers, self.peers)
        self._tasks += [
            supervise("discovery looks", partial(self._look, roster.look))
            for roster in rosters
            if roster is not None
        ]

    async def close(self) -> None:
        """Nothing is found or asked any more; what was registered stays."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.workers is not None and self._asking is not None:
            for known in self.workers:
                self._asking.end(known)
            await self._asking.close()

    async def _look(self, look: Callable[[float], None]) -> None:
        while True:
            look(time.monotonic())
            await asyncio.sleep(LOOK_S)

    # -- seen from outside ---------------------------------------------------------------------

    def worker_states(self) -> dict[str, int]:
        """How many workers have come how far."""
        if self.workers is None:
            return {}
        return {state.value: count for state, count in by_state(self.workers).items()}

    def changes(self) -> dict[str, int]:
        """What was done to the catalog, since the start."""
        if self.workers is None:
            return {}
        roster = self.workers
        return {"registered": roster.registrations, "removed": roster.removals}

    def report(self) -> DiscoveryReport:
        now = time.monotonic()
        return DiscoveryReport(
            [
                DiscoveryState(
                    sighting.name,
                    finds,
                    sighting.state,
                    round(now - sighting.since, 3),
                    sighting.count,
                    sighting.failures,
                    sighting.error,
                )
                for finds, sighting in self.sightings
            ],
            [_shown(known, now) for known in sorted(self.workers or (), key=_key)],
            [
                DiscoveredPeer(each.endpoint, each.state, _left_s(each.leaves_at, now), each.error)
                for each in (self.peers.known() if self.peers is not None else ())
            ],
        )


async def _seen(sighting: Sighting, run: Run) -> None:
    """What a finder fails of is seen where it is looked for, until it finds again."""
    try:
        await run()
    except Exception as error:
        sighting.failed(f"{type(error).__name__}: {error}")
        raise


class _Reporter:
    """Tells the roster of workers what one discovery found."""

    def __init__(self, roster: Roster, discovery: str) -> None:
        self._roster = roster
        self._discovery = discovery

    def found(self, found: Found) -> None:
        self._roster.found(self._discovery, found, time.monotonic())

    def places(self, places: Iterable[Place], leaving: Iterable[Place]) -> None:
        entries = tuple(Particulars(endpoint=place.url) for place in places)
        self.found(Found(entries, frozenset(place.url for place in leaving)))


def _peer_reporter(roster: PeerRoster, discovery: str) -> OnPlaces:
    return lambda places, leaving: roster.found(discovery, places, leaving, time.monotonic())


def _key(known: KnownWorker) -> str:
    return known.key


def _shown(known: KnownWorker, now: float) -> DiscoveredWorker:
    return DiscoveredWorker(
        known.key,
        known.worker_id,
        known.discoveries,
        known.state.value,
        _left_s(known.leaves_at, now),
        known.error,
    )


def _left_s(leaves_at: float | None, now: float) -> float | None:
    return None if leaves_at is None else round(max(0.0, leaves_at - now), 3)
