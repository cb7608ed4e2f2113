"""Adds and removes the peers that --replica-sync-discover finds, except this replica.

Uses the calls behind POST /replica_sync/register_peer and /deregister_peer. Peers from flags or
added over HTTP are left alone. A peer removed over HTTP stays removed while a target lists it."""

import logging
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from lean_selector.core.errors import SelectorError
from lean_selector.discovery.particulars import FoundEndpoint

log = logging.getLogger("lean_selector.discovery")

REGISTERED: Final = "registered"
KNOWN: Final = "known"
REMOVED: Final = "removed"
ITSELF: Final = "itself"
REFUSED: Final = "refused"


class Mesh(Protocol):
    """The part of the replica mesh's interface that discovery uses."""

    def register_peer(self, endpoint: str) -> bool: ...

    def deregister_peer(self, endpoint: str) -> bool: ...

    def peers(self) -> list[str]: ...

    def catch_up_from(self, urls: list[str]) -> None: ...


@dataclass(eq=False)
class KnownPeer:
    """The discovered endpoint of a replica, and its state as a peer."""

    found: Final[FoundEndpoint]
    state: str = ITSELF
    error: str | None = None  # why it is not a peer, or not usable for catch-up
    leaves_at: float | None = None  # monotonic time; set while no discovery finds it

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.found}"


def is_own_address_here(host: str) -> bool:
    """Whether `host` is an address of this machine, tested by binding to it. False for a name."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


@dataclass(eq=False)
class PeerRoster:
    """The peers that discovery finds. A peer at `own_endpoint`, or at `own_port` of this machine,
    is this replica, and skipped. Peers serve snapshots on `http_port` (HTTPS if `is_secure`).
    `refusal(url)` returns why a URL is refused, else None. Used only on the event loop's thread."""

    mesh: Mesh
    own_port: int
    own_endpoint: str | None
    http_port: int
    grace_s: float
    is_own_address: Callable[[str], bool] = is_own_address_here
    refusal: Callable[[str], str | None] = lambda endpoint: None
    is_secure: bool = False

    def __post_init__(self) -> None:
        self._found: dict[str, set[FoundEndpoint]] = {}
        self._known: dict[FoundEndpoint, KnownPeer] = {}
        self._urls: list[str] = []
        self._tried: set[str] = set()  # the mesh's peers when refused ones were last tried again

    def known(self) -> list[KnownPeer]:
        return [self._known[found] for found in sorted(self._known)]

    def found(
        self,
        discovery: str,
        endpoints: Iterable[FoundEndpoint],
        leaving: Iterable[FoundEndpoint],
        now: float,
    ) -> None:
        """Handles the list of all peers at the target `discovery`. A peer that no target lists any
        more is removed after a grace period, or at once if it is in `leaving`."""
        self._found[discovery] = set(endpoints)
        named = set[FoundEndpoint]().union(*self._found.values())
        for found in sorted(named):
            known = self._known.get(found)
            if known is None:
                known = self._known[found] = KnownPeer(found)
                self._join(known)
            else:
                known.leaves_at = None
        for known in self._known.values():
            if known.found not in named and known.leaves_at is None:
                known.leaves_at = now + self.grace_s
        for found in leaving:
            if found in self._known and found not in named:
                self._known[found].leaves_at = now
        self.sweep(now)

    def sweep(self, now: float) -> None:
        """Removes peers that no target lists and whose grace period is over. Notices peers that
        were removed over HTTP. Tries again what was refused, for too many peers for example, after
        the mesh has changed. Call this about twice a second."""
        peers = set(self.mesh.peers())
        for known in list(self._known.values()):
            if known.state == REGISTERED and known.endpoint not in peers:
                known.state = REMOVED
            if known.leaves_at is not None and known.leaves_at <= now:
                del self._known[known.found]
                if known.state == REGISTERED:
                    self.mesh.deregister_peer(known.endpoint)
        if self._tried != set(self.mesh.peers()):
            for known in self.known():
                if known.state == REFUSED:
                    self._join(known)
            self._tried = set(self.mesh.peers())
        urls = [url for known in self.known() if (url := self._url(known)) is not None]
        if urls != self._urls:
            self._urls = urls
            self.mesh.catch_up_from(urls)

    def _url(self, known: KnownPeer) -> str | None:
        """Return the URL for fetching a peer's snapshots; None if no snapshots are fetched."""
        if known.state not in (REGISTERED, KNOWN):
            return None
        scheme = "https" if self.is_secure else "http"
        url = f"{scheme}://{FoundEndpoint(known.found.host, self.http_port)}"
        known.error = self.refusal(url)
        return url if known.error is None else None

    def _join(self, known: KnownPeer) -> None:
        found, endpoint = known.found, known.endpoint
        if endpoint == self.own_endpoint:
            return
        if found.port == self.own_port and self.is_own_address(found.host):
            return
        try:
            known.state = REGISTERED if self.mesh.register_peer(endpoint) else KNOWN
            known.error = None
        except SelectorError as error:
            if known.error != error.message:
                log.warning("discovered peer %s: %s", endpoint, error.message)
            known.state, known.error = REFUSED, error.message
