"""One rank's blocks on one lower tier (host_pinned, disk or external).

A tier is a set of edges: (parent's engine hash, local hash) -> engine hash of the child; the
parent may live on another tier or nowhere yet. Knows nothing of the device tier's trie. Spec:
indexer.md sections 3.3 and 3.5.
"""

from collections.abc import Iterator
from itertools import islice

ROOT = b""  # the parent of a prompt's first block


class LowerTier:
    """Edges of one tier, all hashes as 8 bytes. Every block has one edge that leads to it."""

    __slots__ = ("_child", "_edge")

    def __init__(self) -> None:
        self._child: dict[bytes, bytes] = {}  # parent + local -> child
        self._edge: dict[bytes, bytes] = {}  # child -> parent + local, oldest first

    def __len__(self) -> int:
        return len(self._edge)

    def store(self, parent: bytes, names: bytes, local: bytes) -> None:
        """Add a chain of blocks, up to the first that contradicts what is held.

        That is an edge that leads to another block, or a block that another edge leads to: the
        first one wins.
        """
        for at in range(0, len(local), 8):
            name, edge = names[at : at + 8], parent + local[at : at + 8]
            if self._child.setdefault(edge, name) != name:
                return
            if self._edge.setdefault(name, edge) != edge:
                del self._child[edge]
                return
            parent = name

    def remove(self, name: bytes) -> bool:
        """Drop one block; those behind it stay, and count again when it comes back."""
        edge = self._edge.pop(name, None)
        if edge is None:
            return False
        del self._child[edge]
        return True

    def walk(self, parent: bytes, hashes: bytes, at: int) -> tuple[bytes, int]:
        """Follow `hashes` from byte `at`; returns the last block reached and where it ends."""
        child = self._child.get(parent + hashes[at : at + 8])
        while child is not None and at < len(hashes):
            parent = child
            at += 8
            child = self._child.get(parent + hashes[at : at + 8])
        return parent, at

    def drop_oldest(self, blocks: int) -> None:
        for name in list(islice(self._edge, blocks)):
            self.remove(name)

    def chains(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """(parent, child, local) of every block, oldest first. Blocks may come and go meanwhile."""
        for name in list(self._edge):
            edge = self._edge.get(name)
            if edge is not None:
                yield edge[:-8], name, edge[-8:]
