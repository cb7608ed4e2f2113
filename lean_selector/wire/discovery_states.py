"""The answer of GET /discovery: all discoveries, and the state of each discovered worker and peer
(decision D22)."""

from typing import Final

import msgspec

# For engines that report no event source: the port where all of them publish.
EVENTS_PORT: Final = """--discover-defaults '{"events_port":5557}'"""


class DiscoveryState(msgspec.Struct, frozen=True):
    """A discovery, which a flag of the service enables."""

    discovery: str
    finds: str  # "workers" or "peers"
    state: str  # "starting", "watching" or "failing"
    since_s: float  # seconds in this state
    found: int | None  # how many were found last, and are in effect; None before the first result
    failures: int
    last_error: str | None


class DiscoveredWorker(msgspec.Struct, frozen=True):
    """A worker that a discovery lists, or listed until a short while ago."""

    endpoint: str
    worker_id: int
    discoveries: list[str]
    state: str  # see docs/guide/discovery.md
    leaves_in_s: float | None  # seconds until removal; None while it is listed
    last_error: str | None  # why it could not be queried or registered


class DiscoveredPeer(msgspec.Struct, frozen=True):
    """A peer that a discovery lists, or listed until a short while ago."""

    endpoint: str
    # "registered", "known" (by flag or over HTTP), "removed" (over HTTP), "refused" or "itself"
    state: str
    leaves_in_s: float | None
    last_error: str | None  # why it was refused, or why its snapshot could not be fetched


class DiscoveryReport(msgspec.Struct, frozen=True):
    """The answer of GET /discovery."""

    discoveries: list[DiscoveryState]
    workers: list[DiscoveredWorker]
    peers: list[DiscoveredPeer]


class KeptWorker(msgspec.Struct, frozen=True):
    """A discovered worker as stored in the state directory: which `--discover` source found it, and
    whether it was deleted over HTTP while that source listed it."""

    key: str  # hash of its endpoint
    worker_id: int
    discoveries: list[str]
    is_removed: bool
