"""The answer of GET /discovery: the state of each target of --discover and --replica-sync-discover,
and of each discovered worker and peer (decision D22)."""

from typing import Final

import msgspec

# For engines that report no event source: the port where all of them publish.
EVENTS_PORT: Final = """--discover-defaults '{"events_port":5557}'"""
# For engines that publish no events.
WITHOUT_EVENTS: Final = "--use-kv-events false --router-ttl-secs 120"
# What to do about a worker whose block_size or is_eagle differs from that of its model (D3).
OTHER_BLOCKS: Final = (
    "block_size and is_eagle of a model change when no worker has the old ones any more: DELETE "
    "its workers, then POST them"
)
# How the only reason begins why such a worker cannot be scheduled.
OF_OTHER_BLOCKS: Final = (
    "reconciliation failed: block_size mismatch ",
    "reconciliation failed: is_eagle mismatch ",
)


class DiscoveryState(msgspec.Struct, frozen=True):
    """The state of one target of --discover or --replica-sync-discover."""

    discovery: str
    finds: str
    state: str
    since_s: float
    found: int | None
    failures: int
    last_error: str | None


class DiscoveredWorker(msgspec.Struct, frozen=True):
    """A worker that --discover finds, or no longer finds but has not removed yet."""

    endpoint: str
    worker_id: int
    discoveries: list[str]
    state: str
    leaves_in_s: float | None
    last_error: str | None


class DiscoveredPeer(msgspec.Struct, frozen=True):
    """A peer that --replica-sync-discover finds, or no longer finds but has not removed yet."""

    endpoint: str
    state: str
    leaves_in_s: float | None
    last_error: str | None


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
    uid: str = ""  # of the pod at the endpoint, where Kubernetes reports it
