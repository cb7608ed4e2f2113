"""One GET of a peer's /dump, for start-up recovery. Spec: indexer.md 4.2."""

from lean_selector.outbound.credentials import Credentials
from lean_selector.sockets.peer_fetch import PeerFetch
from lean_selector.wire.dump import split_dump
from lean_selector.wire.dump_shapes import DumpedPartition

# 12 million blocks of 86 bytes: more than one process should index, and what memory may hold twice.
MAX_DUMP_BYTES = 1 << 30

Dump = tuple[list[DumpedPartition], list[str]]  # see split_dump


def fetch_dump(
    peer: str, timeout_s: float, credentials: Credentials | None = None
) -> PeerFetch[Dump]:
    """`peer` is a base URL; `timeout_s` bounds each wait of the fetch, not their sum.

    One of ours that speaks 1.6 tells names and watermarks only where `detail` is asked for.
    """
    path = "/dump?detail=true"
    return PeerFetch(peer, path, timeout_s, MAX_DUMP_BYTES, split_dump, credentials)
