"""What active prompts are kept as: the prefill of each, and the runs that they share."""

import msgspec


class Prefill(msgspec.Struct, frozen=True, gc=False):
    """tokens > 0; duration_s is None when nobody said how long it will take."""

    tokens: int
    duration_s: float | None


class ActiveRun(msgspec.Struct, eq=False, gc=False):
    """Consecutive blocks that are held by the same requests.

    Not tracked by the collector, nor are the dicts that hold only runs: a live trie costs a
    collection nothing. The cycle parent <-> children is cut when the run goes, as it does with its
    last request.
    """

    label: (
        bytes  # the blocks' sequence hashes, 8 bytes little-endian each; only the root's is empty
    )
    parent: "ActiveRun | None"  # None only at the root
    children: "dict[bytes, ActiveRun]"  # first hash of the child -> child
    # Requests per rank that cross the run, each >= 1; never empty but at the root. A rank is its
    # bit of `RankBits`, as a set of itself.
    refs: dict[int, int]
    mask: int = 0  # all ranks in refs
    ends: int = 0  # requests whose prompt ends with this run
    weights: dict[int, float] | None = None  # of each block, where not 1.0; None when empty
