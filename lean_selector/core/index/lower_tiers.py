"""One rank's blocks on one lower tier (host_pinned, disk or external).

A tier is a set of edges: (parent's engine hash, local hash) -> engine hash of the child; the
parent may live on another tier or nowhere yet. What all ranks share is a map that tells which of
them a prompt's next block could be found on at all, so that a match asks no others. Knows nothing
of the device tier's trie. Spec: indexer.md sections 3.3 and 3.5.
"""

from collections import OrderedDict
from collections.abc import Iterator

ROOT = b""  # the parent of a prompt's first block
_BLOCKS_PER_STEP = 64  # some 50 us


class Continuations:
    """Which ranks have a block with given tokens on a lower tier: local hash -> set of ranks.

    Exact but for hashes that agree in 7 of their 8 bytes, whose ranks are told for either.
    """

    __slots__ = ("_again", "_alone", "_ranks")

    def __init__(self) -> None:
        # A set of ranks, or ~bit where there is one. Most blocks are on one rank, and a set of one
        # of 4 000 ranks takes 560 bytes; so `_alone` keeps an int for each rank, to be shared.
        self._ranks: dict[int, int] = {}
        self._alone: list[int] = []
        # Per bit: of those in `_ranks`, how many more blocks with these tokens the rank has.
        self._again: dict[int, dict[int, int]] = {}

    def of(self, hashes: bytes, at: int) -> int:
        """The ranks that have the block at byte `at` of `hashes`, below whatever other block."""
        ranks = self._ranks.get(int.from_bytes(hashes[at : at + 7], "little"), 0)
        return 1 << ~ranks if ranks < 0 else ranks

    def add(self, bit: int, local: bytes) -> None:
        """A rank has another block with this local hash."""
        block = int.from_bytes(local[:7], "little")
        ranks = self._ranks.get(block)
        if ranks is None:
            self._ranks[block] = self._only(bit)
            return
        if ranks < 0:
            ranks = 1 << ~ranks
        if ranks >> bit & 1:
            again = self._again.setdefault(bit, {})
            again[block] = again.get(block, 0) + 1
        else:
            self._ranks[block] = ranks | 1 << bit

    def discard(self, bit: int, local: bytes) -> None:
        """The rank has one block with this local hash less."""
        block = int.from_bytes(local[:7], "little")
        again = self._again.get(bit)
        if again and block in again:
            again[block] -= 1
            if not again[block]:
                del again[block]
                if not again:
                    del self._again[bit]
            return
        ranks = self._ranks[block]
        if ranks < 0:
            del self._ranks[block]
        else:
            ranks ^= 1 << bit
            is_one = not ranks & (ranks - 1)
            self._ranks[block] = self._only(ranks.bit_length() - 1) if is_one else ranks

    def _only(self, bit: int) -> int:
        while len(self._alone) <= bit:
            self._alone.append(~len(self._alone))
        return self._alone[bit]


class LowerTier:
    """Edges of one tier, all hashes as 8 bytes. Every block has one edge that leads to it."""

    __slots__ = ("_bit", "_child", "_continuations", "_edge")

    def __init__(self, continuations: Continuations, bit: int) -> None:
        """`continuations` is to be kept in step for the rank with this bit index."""
        self._continuations = continuations
        self._bit = bit
        self._child: dict[bytes, bytes] = {}  # parent + local -> child
        # child -> parent + local, oldest first: at its bound a tier asks for the oldest each time.
        self._edge: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._edge)

    def store(self, parent: bytes, names: bytes, local: bytes) -> None:
        """Add a chain of blocks, up to the first that contradicts what is held.

        That is an edge that leads to another block, or a block that another edge leads to: the
        first one wins.
        """
        for at in range(0, len(local), 8):
            name, block = names[at : at + 8], local[at : at + 8]
            edge = parent + block
            held = self._child.get(edge)
            if held is None:
                if name in self._edge:
                    return
                self._child[edge] = name
                self._edge[name] = edge
                self._continuations.add(self._bit, block)
            elif held != name:
                return
            parent = name

    def remove(self, name: bytes) -> bool:
        """Drop one block; those behind it stay, and count again when it comes back."""
        edge = self._edge.pop(name, None)
        if edge is None:
            return False
        del self._child[edge]
        self._continuations.discard(self._bit, edge[-8:])
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
        """Drop so many blocks; the tier has them."""
        for _ in range(blocks):
            _, edge = self._edge.popitem(last=False)
            del self._child[edge]
            self._continuations.discard(self._bit, edge[-8:])

    def dismantled(self) -> Iterator[None]:
        """Drops all blocks, step by step."""
        while self._edge:
            self.drop_oldest(min(_BLOCKS_PER_STEP, len(self._edge)))
            yield

    def chains(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """(parent, child, local) of every block, oldest first. Blocks may come and go meanwhile."""
        # In the same order, and ten times as fast as an OrderedDict lists its keys.
        for name in list(self._child.values()):
            edge = self._edge.get(name)
            if edge is not None:
                yield edge[:-8], name, edge[-8:]
