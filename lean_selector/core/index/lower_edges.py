"""The edges that all ranks have on one lower tier, so that a prompt is walked once for all of them.

Engines that hash alike call the same blocks the same. Their edges are one here, with the set of the
ranks that have it, and as long as they have the same a match takes them along together. What a rank
has is told by its own tier alone (`lower_tiers.py`); this is how to find it. Spec: indexer.md
section 3.5.
"""

from lean_selector.core.index.continuations import MASK, SHARDS, Continuations
from lean_selector.core.index.edge import Edge
from lean_selector.core.rank_bits import bits_of


class Edges:
    """(parent's engine hash + local hash) -> (child's engine hash, set of ranks)."""

    __slots__ = ("_continuations", "_edges", "_held", "_odd", "doubtful")

    def __init__(self, continuations: Continuations) -> None:
        """`continuations` is to be kept in step."""
        self._continuations = continuations
        # Chosen as the dicts of `continuations` are, by the local hash.
        self._edges: list[dict[bytes, Edge]] = [{} for _ in range(SHARDS)]
        # By edge and bit, the child of a rank for which the edge leads elsewhere.
        self._odd: dict[bytes, dict[int, bytes]] = {}
        self._held: dict[int, dict[bytes, bytes]] = {}  # by bit, child -> edge, as the rank has it
        # Ranks that are back while what they held before is dismantled: an edge that has their bit
        # may be an old one, so of them each is looked up.
        self.doubtful = 0

    def admit(self, bit: int, held: dict[bytes, bytes]) -> None:
        """A rank has a tier, `held` being its blocks: child -> edge."""
        self._held[bit] = held

    def release(self, bit: int) -> None:
        """It has none any more. What is left there of its edges is to be dropped."""
        del self._held[bit]

    def store(self, bit: int, key: bytes, child: bytes, held: dict[bytes, bytes]) -> bool:
        """Let a rank, which has just `held`, have an edge that leads to `child`, unless it has.

        False, and nothing changes, where its edge leads elsewhere, or another edge to that block.
        """
        edges = self._edges[key[-8] & MASK]
        edge = edges.get(key)
        if edge is not None and held.get(edge.child) == key:
            return edge.child == child
        if self._odd and (odd := self._odd.get(key)) is not None:
            other = odd.get(bit)
            if other is not None and held.get(other) == key:
                return other == child
        if child in held:
            return False
        self._continuations.add(bit, key[-8:])
        if edge is None:
            edges[key] = Edge(key, child, self._continuations.only(bit))
        elif edge.child == child:
            ranks = edge.ranks
            if ranks != ~bit:  # else it is an old one of the same rank
                edge.ranks = (1 << ~ranks if ranks < 0 else ranks) | 1 << bit
            key, child = edge.key, edge.child  # one object for all of them
        else:
            self._odd.setdefault(key, {})[bit] = child
        held[child] = key
        return True

    def discard(self, bit: int, key: bytes, child: bytes) -> None:
        """A rank has an edge no more."""
        self._continuations.discard(bit, key[-8:])
        self._discard(bit, key, child)

    def discard_old(self, bit: int, key: bytes, child: bytes) -> None:
        """The same for what it held before it was cleared; it may have it again."""
        self._continuations.discard(bit, key[-8:])
        held = self._held.get(bit)
        if held is None or held.get(child) != key:
            self._discard(bit, key, child)

    def _discard(self, bit: int, key: bytes, child: bytes) -> None:
        edges = self._edges[key[-8] & MASK]
        edge = edges.get(key)
        if edge is not None and edge.child == child:
            ranks = edge.ranks
            if ranks == ~bit:
                del edges[key]
            elif ranks >= 0:
                ranks &= ~(1 << bit)
                is_one = not ranks & (ranks - 1)
                edge.ranks = self._continuations.only(ranks.bit_length() - 1) if is_one else ranks
        if self._odd and (odd := self._odd.get(key)) is not None and odd.get(bit) == child:
            del odd[bit]
            if not odd:
                del self._odd[key]

    def along(self, ranks: int, name: bytes, hashes: bytes, at: int) -> tuple[bytes, int]:
        """From a block on, as far as all of `ranks` have what `hashes` ask for from byte `at` on.

        Returns the last block and where it ends; who of them goes on there, `follow` tells.
        """
        if ranks & self.doubtful:
            return name, at
        alone = -ranks.bit_length() if not ranks & (ranks - 1) else 0
        edges, end = self._edges, len(hashes)
        while at < end:
            edge = edges[hashes[at] & MASK].get(name + hashes[at : at + 8])
            if edge is None:
                break
            having = edge.ranks
            if having != alone and (having < 0 or ranks & ~having):
                break
            name = edge.child
            at += 8
        return name, at

    def follow(self, ranks: int, key: bytes) -> tuple[bytes, int]:
        """The child that an edge leads to, and for whom of `ranks` it does. Others of them may have
        another one: `others`."""
        edge = self._edges[key[-8] & MASK].get(key)
        if edge is None:
            return b"", 0
        having = edge.ranks
        having = ranks & (1 << ~having if having < 0 else having)
        if doubtful := having & self.doubtful:
            for bit in bits_of(doubtful):
                if self._held[bit].get(edge.child) != key:
                    having ^= 1 << bit
        return edge.child, having

    def others(self, ranks: int, key: bytes) -> dict[bytes, int]:
        """The children that an edge leads to for those of `ranks` that `follow` told nothing of:
        child -> the ranks that call it so."""
        found: dict[bytes, int] = {}
        if self._odd and (odd := self._odd.get(key)) is not None:
            for bit in bits_of(ranks):
                child = odd.get(bit)
                if child is not None and self._held[bit].get(child) == key:
                    found[child] = found.get(child, 0) | 1 << bit
        return found
