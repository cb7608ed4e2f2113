"""GET /discovery: what is looked for, what was found, and what became of it (decision D22)."""

from typing import Final

import msgspec

# For engines that tell no source of events when they are asked, where all have them at one port.
EVENTS_PORT: Final = """--discover-defaults '{"events_port":5557}'"""


class DiscoveryState(msgspec.Struct, frozen=True):
    """One discovery, as a flag asks for it."""

    discovery: str
    finds: str  # "workers" or "peers"
    state: str  # "starting", "watching" or "failing"
    since_s: float  # how long it has been so
    found: int | None  # what it found last, which holds; None before
    failures: int
    last_error: str | None


class DiscoveredWorker(msgspec.Struct, frozen=True):
    """A worker that a discovery names, or named until a moment ago."""

    endpoint: str
    worker_id: int
    discoveries: list[str]
    state: str  # see docs/guide/discovery.md
    leaves_in_s: float | None  # while no discovery names it any more
    last_error: str | None  # why it could not be asked or registered


class DiscoveredPeer(msgspec.Struct, frozen=True):
    """A peer that a discovery names, or named until a moment ago."""

    endpoint: str
    # "registered", "known" (by flag or over HTTP), "removed" (over HTTP), "refused" or "itself"
    state: str
    leaves_in_s: float | None
    last_error: str | None  # why it was refused, or is not caught up from


class DiscoveryReport(msgspec.Struct, frozen=True):
    """GET /discovery."""

    discoveries: list[DiscoveryState]
    workers: list[DiscoveredWorker]
    peers: list[DiscoveredPeer]


class KeptWorker(msgspec.Struct, frozen=True):
    """A discovered worker as it outlives the process: whose it is, and that it was deleted over
    HTTP while they name it."""

    key: str  # of its endpoint
    worker_id: int
    discoveries: list[str]
    is_removed: bool
