"""The ranks of a partition's device tier: bits in its trie, records here.

A rank that is retired is not seen any more at once, and keeps its bit until its runs have been
swept. Spec: indexer.md section 3.1.
"""

from collections.abc import Callable

from lean_selector.core.index.engine_hashes import EngineHashes
from lean_selector.core.rank_bits import RankBits, RankKey

_MAX_CACHED_MASKS = 1024  # sets of ranks that were just matched together


class DeviceRank:
    """What one rank holds on the device; `bit` is its place in the masks of the trie."""

    __slots__ = ("bit", "blocks", "key", "names")

    def __init__(self, key: RankKey, bit: int, names: EngineHashes) -> None:
        self.key = key
        self.bit = bit
        self.names = names
        self.blocks = 0  # held in the trie, in reach or not


class DeviceRanks:
    """Who has which bit, and whose bits in the trie count."""

    __slots__ = ("_bits", "_by_bit", "_keys", "_new_names", "_swept", "in_use", "reborn")

    def __init__(self, bits: RankBits, new_names: Callable[[], EngineHashes]) -> None:
        self._new_names = new_names
        self._bits = bits
        self._by_bit: list[DeviceRank | None] = []
        self._keys: dict[int, tuple[RankKey, ...]] = {}  # set of bits -> ranks; a cache
        self.in_use = 0  # the bits of all ranks here
        # By bit, the retired records that are being swept. Until that is done, a run may have the
        # rank's bit from before. A rank that has been admitted again meanwhile is in `reborn`: it
        # holds blocks in just the strands of its rows, so a bit in another strand is an old one,
        # which is to be taken away before anything could mistake it.
        self._swept: dict[int, int] = {}
        self.reborn = 0

    def admit(self, key: RankKey) -> DeviceRank:
        """A record for a rank that holds nothing yet."""
        bit = self._bits.acquire(key)
        rank = DeviceRank(key, bit, self._new_names())
        self.in_use |= 1 << bit
        self._by_bit += [None] * (bit + 1 - len(self._by_bit))
        self._by_bit[bit] = rank
        if bit in self._swept:
            self.reborn |= 1 << bit
        return rank

    def release(self, rank: DeviceRank) -> None:
        """Give back the record of a rank that holds nothing."""
        assert not rank.blocks
        self._hide(rank)
        self._bits.release(rank.key)

    def retire(self, rank: DeviceRank) -> EngineHashes:
        """See a rank no more. Returns the names of what it held, to be swept; then call `swept`."""
        self._hide(rank)
        names, rank.names, rank.blocks = rank.names, self._new_names(), 0
        self._swept[rank.bit] = self._swept.get(rank.bit, 0) + 1
        return names

    def swept(self, rank: DeviceRank) -> None:
        """Nothing in the trie is left of a record that was retired."""
        bit = rank.bit
        self._swept[bit] -= 1
        if not self._swept[bit]:
            del self._swept[bit]
            self.reborn &= ~(1 << bit)
        self._bits.release(rank.key)

    def _hide(self, rank: DeviceRank) -> None:
        bit = 1 << rank.bit
        self.in_use ^= bit
        self.reborn &= ~bit
        self._by_bit[rank.bit] = None
        self._keys.clear()

    def rank_in(self, strand: int, bit: int) -> DeviceRank | None:
        """The rank with this bit if it has a row for the strand.

        If not, a bit in the runs of the strand is from before its rank was retired.
        """
        rank = self._by_bit[bit]
        return rank if rank is not None and strand in rank.names.rows else None

    def name_at(self, bit: int, place: int) -> bytes:
        """What the rank with this bit, which is in use, calls a block that it holds."""
        rank = self._by_bit[bit]
        assert rank is not None
        return rank.names.name_at(place)

    def keys_of(self, bits: int) -> tuple[RankKey, ...]:
        """The ranks of a set."""
        keys = self._keys.get(bits)
        if keys is None:
            if len(self._keys) >= _MAX_CACHED_MASKS:
                self._keys.clear()
            keys = self._keys[bits] = tuple(
                rank.key for bit, rank in enumerate(self._by_bit) if rank and bits >> bit & 1
            )
        return keys
