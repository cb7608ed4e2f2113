"""Runs the discovery of workers and peers, and queries the engines of discovered workers."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from lean_selector.discovery.finders import (
    DnsFinder,
    FileFinder,
    Resolve,
    Sighting,
)
from lean_selector.discovery.kubernetes import KubernetesFinder
from lean_selector.discovery.particulars import (
    Found,
    FoundEndpoint,
    Particulars,
    Target,
    endpoint_key,
)
from lean_selector.discovery.peer_roster import PeerRoster
from lean_selector.discovery.roster import Asking, Roster, by_state
from lean_selector.http.outbound import OutboundClient
from lean_selector.parts import Part
from lean_selector.tasks import supervise
from lean_selector.wire.discovery_states import (
    DiscoveredPeer,
    DiscoveredWorker,
    DiscoveryReport,
    DiscoveryState,
)
from lean_selector.wire.exposition import Families, Sample, by, labels, table, table_of

Run = Callable[[], Coroutine[object, object, None]]

SWEEP_S = 0.5


@dataclass(eq=False)
class Discoveries(Part):
    """Discovers workers and peers. Used only on the event loop's thread.

    `interval_s`: seconds between look-ups. Kubernetes services need `api` (URL of the API server)
    and `api_client`; their `role_label` has the role of their workers."""

    resolve: Resolve
    interval_s: float
    api: str = ""
    api_client: OutboundClient | None = None
    role_label: str = ""

    def __post_init__(self) -> None:
        self._finders: list[tuple[Sighting, Run]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.workers: Roster | None = None
        self.peers: PeerRoster | None = None
        self._asking: Asking | None = None
        self.sightings: list[tuple[str, Sighting]] = []  # (workers or peers, state)

    # -- what to find ------------------------------------------------------------------------------

    def find_workers(self, targets: Iterable[Target], roster: Roster, asking: Asking) -> None:
        """Adds targets of --discover. `asking` queries the engines of workers in `roster`."""
        self.workers, self._asking = roster, asking
        for target in targets:
            self._add("workers", target)

    def find_peers(self, targets: Iterable[Target], roster: PeerRoster) -> None:
        self.peers = roster
        for target in targets:
            self._add("peers", target)

    def _add(self, finds: str, target: Target) -> None:
        sighting = Sighting(target.text)
        self.sightings.append((finds, sighting))
        self._finders.append((sighting, self._finder(finds, target, sighting)))

    def _finder(self, finds: str, target: Target, sighting: Sighting) -> Run:
        workers, peers = self.workers, self.peers

        def on_found(found: Found) -> None:
            assert workers is not None, "files and URLs list workers, not peers"
            workers.found(target.text, found, time.monotonic())

        def on_endpoints(
            endpoints: Mapping[FoundEndpoint, str], leaving: Iterable[FoundEndpoint]
        ) -> None:
            if finds == "peers" and peers is not None:
                peers.found(target.text, endpoints, leaving, time.monotonic())
                return
            entries = tuple(
                Particulars(endpoint=endpoint.url, worker_role=endpoint.role or None)
                for endpoint in endpoints
            )
            uids = {endpoint_key(endpoint.url): uid for endpoint, uid in endpoints.items()}
            on_found(Found(entries, frozenset(endpoint.url for endpoint in leaving), uids))

        if target.kind == "url":

            async def once() -> None:
                sighting.found(1)
                endpoint = endpoint_key(target.name)
                on_found(Found((Particulars(endpoint=endpoint, worker_role=target.role),)))

            return once
        if target.kind == "file":
            return FileFinder(sighting, target.name, self.interval_s, on_found).run
        if target.kind == "dns":
            return DnsFinder(sighting, target, self.interval_s, self.resolve, on_endpoints).run
        client, label = self.api_client, self.role_label if finds == "workers" else ""
        assert client is not None
        return KubernetesFinder(sighting, client, self.api, target, on_endpoints, label).run

    # -- running -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the search for workers and peers. Call this while the event loop is running."""
        for sighting, run in self._finders:
            self._tasks.append(supervise("discovery", partial(_recorded, sighting, run)))
        rosters = (self.workers, self.peers)
        self._tasks += [
            supervise("discovery looks", partial(_sweep_forever, roster.sweep))
            for roster in rosters
            if roster is not None
        ]

    async def close(self) -> None:
        """Stops all discovery. Registered workers stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.workers is not None and self._asking is not None:
            for known in self.workers:
                self._asking.end(known)
            await self._asking.close()

    # -- seen from outside -------------------------------------------------------------------------

    def families(self) -> Families:
        """Return the metrics of discovery. The number of time series depends only on the flags."""

        def states() -> list[Sample]:
            found = by_state(self.workers or ())
            return by("state", {state.value: count for state, count in found.items()})

        def changes() -> list[Sample]:
            roster = self.workers
            if roster is None:
                return []
            return by("change", {"registered": roster.registrations, "removed": roster.removals})

        def sightings() -> list[tuple[str, Sighting]]:
            return [(labels(discovery=one.name, finds=finds), one) for finds, one in self.sightings]

        return [
            table_of(sightings, {
                "discovery_failing": (lambda one: int(one.error is not None),
                    "1 while a discovery fails: its last result stays in use."),
                "discovery_found": (lambda one: one.count or 0,
                    "Endpoints in the last result of a discovery."),
                "discovery_failures_total": (lambda one: one.failures,
                    "Times that a discovery failed."),
            }),
            *table({
                "discovered_workers": (states,
                    "Workers by discovery, by state."),
                "discovery_changes_total": (changes,
                    "Registrations (new or changed) and removals by discovery."),
            }),
        ]  # fmt: skip

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
            [
                DiscoveredWorker(
                    known.key,
                    known.worker_id,
                    known.discoveries,
                    known.state.value,
                    _left_s(known.leaves_at, now),
                    known.error,
                )
                for known in sorted(self.workers or (), key=lambda known: known.key)
            ],
            [
                DiscoveredPeer(each.endpoint, each.state, _left_s(each.leaves_at, now), each.error)
                for each in (self.peers.known() if self.peers is not None else ())
            ],
        )


async def _recorded(sighting: Sighting, run: Run) -> None:
    try:
        await run()
    except Exception as error:
        sighting.failed(f"{type(error).__name__}: {error}")
        raise


async def _sweep_forever(sweep: Callable[[float], None]) -> None:
    while True:
        sweep(time.monotonic())
        await asyncio.sleep(SWEEP_S)


def _left_s(leaves_at: float | None, now: float) -> float | None:
    return None if leaves_at is None else round(max(0.0, leaves_at - now), 3)
