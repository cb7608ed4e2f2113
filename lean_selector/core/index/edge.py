"""One edge of a lower tier, as those ranks share it that call its blocks alike."""

import msgspec


class Edge(msgspec.Struct, gc=False):
    """From a block to one that follows it, by their engine hashes, 8 bytes each."""

    key: bytes  # the parent's hash, nothing for a prompt's first block; then the local hash
    child: bytes
    ranks: int  # the set of those that have it, or ~bit where there is one
