"""One rank's blocks on one lower tier (host_pinned, disk or external).

A tier is a set of edges: (parent's engine hash, local hash) -> engine hash of the child; the
parent may live on another tier or nowhere yet. All ranks have theirs in one place
(`lower_edges.py`), where a match looks for them. Knows nothing of the device tier's trie. Spec:
indexer.md sections 3.3 and 3.5.
"""

from collections import OrderedDict
from collections.abc import Iterator

from lean_selector.core.index.lower_edges import Edges

ROOT = b""  # the parent of a prompt's first block
_BLOCKS_PER_STEP = 64  # some 50 us


class LowerTier:
    """Edges of one tier, all hashes as 8 bytes. Every block has one edge that leads to it."""

    __slots__ = ("_bit", "_edge", "_edges")

    def __init__(self, edges: Edges, bit: int) -> None:
        """`edges` are those of all ranks; this is the one with this bit index."""
        self._edges = edges
        self._bit = bit
        # child -> parent + local, oldest first: at its bound a tier asks for the oldest each time.
        self._edge: OrderedDict[bytes, bytes] = OrderedDict()
        edges.admit(bit, self._edge)

    def __len__(self) -> int:
        return len(self._edge)

    def store(self, parent: bytes, names: bytes, local: bytes) -> None:
        """Add a chain of blocks, up to the first that contradicts what is held.

        That is an edge that leads to another block, or a block that another edge leads to: the
        first one wins.
        """
        edges, bit, mine = self._edges, self._bit, self._edge
        for at in range(0, len(local), 8):
            name = names[at : at + 8]
            if not edges.store(bit, parent + local[at : at + 8], name, mine):
                return
            parent = name

    def remove(self, name: bytes) -> bool:
        """Drop one block; those behind it stay, and count again when it comes back."""
        edge = self._edge.pop(name, None)
        if edge is None:
            return False
        self._edges.discard(self._bit, edge, name)
        return True

    def drop_oldest(self, blocks: int) -> None:
        """Drop so many blocks; the tier has them."""
        for _ in range(blocks):
            name, edge = self._edge.popitem(last=False)
            self._edges.discard(self._bit, edge, name)

    def dismantled(self) -> Iterator[None]:
        """Drops all blocks, step by step; the rank has this tier no more."""
        while self._edge:
            for _ in range(min(_BLOCKS_PER_STEP, len(self._edge))):
                name, edge = self._edge.popitem(last=False)
                self._edges.discard_old(self._bit, edge, name)
            yield

    def chains(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """(parent, child, local) of every block, oldest first. Blocks may come and go meanwhile."""
        # dict's own view: an OrderedDict's looks each key up as it goes, at ten times the cost.
        for name in list(dict.keys(self._edge)):
            edge = self._edge.get(name)
            if edge is not None:
                yield edge[:-8], name, edge[-8:]
