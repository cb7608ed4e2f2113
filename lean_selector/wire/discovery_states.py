"""The answer of GET /discovery: the state of each target of --discover and --replica-sync-discover,
and of each discovered worker and peer (decision D22)."""

from typing import Final

import msgspec

# For engines that report no event source: the port where all of them publish.
EVENTS_PORT: Final = """--discover-defaults '{"events_port":5557}'"""


class DiscoveryState(msgspec.Struct, frozen=True):
    """The state of one target of --discover or --replica-sync-discover."""

    discovery: str
    finds: str  # "workers" or "peers"
    state: str  # "starting", "watching" or "failing"
    since_s: float  # seconds in this state
    found: int | None  # how many were found last, and are in effect; None before the first result
    failures: int
    last_error: str | None


class DiscoveredWorker(msgspec.Struct, frozen=True):
    """A worker that --discover finds, or no longer finds but has not removed yet."""

    endpoint: str
    worker_id: int
    discoveries: list[str]
    state: str  # see docs/guide/discovery.md
    leaves_in_s: float | None  # seconds until removal; None while it is listed
    last_error: str | None  # why it could not be queried or registered


class DiscoveredPeer(msgspec.Struct, frozen=True):
    """A peer that --replica-sync-discover finds, or no longer finds but has not removed yet."""

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
    """A discovered worker as stored in the state directory: which --discover targets found the
    worker, and whether the worker was deleted over HTTP while a target listed it."""

    key: str  # the normalized endpoint
    worker_id: int
    discoveries: list[str]
    is_removed: bool
