"""The device tier: what each rank holds of the trie of prompts, exact to the block.

Keeps the trie (which blocks, who holds them) and each rank's engine hashes (what its engine calls
them) in step. Ranks are bits in the trie and records here. Knows nothing of lower tiers, bounds or
events. Spec: indexer.md sections 3.1, 3.2 and 7.
"""

from collections.abc import Callable, Iterator

from lean_selector.core.index.device_ranks import DeviceRank, DeviceRanks
from lean_selector.core.index.engine_hashes import NOWHERE, EngineHashes
from lean_selector.core.index.matched import Matched
from lean_selector.core.index.odd_names import OddNames
from lean_selector.core.index.runs import (
    MAX_STRANDS,
    POSITION_BITS,
    STRAND_BLOCKS,
    Run,
    RunTrie,
    common_prefix,
)
from lean_selector.core.rank_bits import RankBits, RankKey, bits_of

# A run grows at its end only if few others hold it: each of them becomes a partial holder, which
# costs every match of that run a step. With more, the new blocks make a run of their own, which
# costs one step.
_MAX_OTHERS_TO_GROW = 2
_TRIM_BLOCKS = 32  # dead blocks at the end of a run before they are worth cutting off


class DeviceTier:
    """All ranks' device blocks of one partition."""

    __slots__ = ("_odd", "ranks", "trie")

    def __init__(self, bits: RankBits, new_names: Callable[[], EngineHashes]) -> None:
        self.trie = RunTrie()
        self.ranks = DeviceRanks(bits, new_names)
        self._odd = OddNames(self.ranks)

    def retire(self, rank: DeviceRank) -> Iterator[None]:
        """Let go of a rank and all that it holds: nothing of it is seen any more.

        The iterator returned gives the memory back, in steps between which anything may happen.
        """
        return self._sweep(rank, self.ranks.retire(rank))

    def _sweep(self, rank: DeviceRank, names: EngineHashes) -> Iterator[None]:
        bit = rank.bit
        while names.rows:
            strand, _ = names.rows.popitem()
            if self.ranks.rank_in(strand, bit) is None:
                self._odd.forget(strand, bit)
                self._settle(bit, strand)
            yield
        yield from names.dismantled()
        self.ranks.swept(rank)

    def _settle(self, bit: int, strand: int) -> None:
        """Take an old bit away from all runs of a strand."""
        for run in self.trie.pieces(strand):
            if run.held_by(bit):
                run.set_held(bit, 0)
                self.trie.prune(run)

    def _settle_along(self, local_hashes: bytes) -> None:
        """Take old bits of reborn ranks away from the runs that a prompt leads along."""
        old: list[tuple[int, int]] = []
        ranks = self.ranks
        children, at = self.trie.root.children, 0
        while children is not None:
            run = children.get(local_hashes[at : at + 8])
            if run is None:
                break
            bits = bits_of(run.whole & ranks.reborn)
            bits += [bit for bit in run.partial or () if ranks.reborn >> bit & 1]
            old += [(bit, run.strand) for bit in bits if ranks.rank_in(run.strand, bit) is None]
            if not local_hashes.startswith(run.label, at):
                break
            at += len(run.label)
            children = run.children
        for bit, strand in old:
            self._settle(bit, strand)

    def has_room(self, blocks: int) -> bool:
        """Whether the runs of a chain of so many blocks can still be numbered."""
        # One chain may split a run, and starts a strand per STRAND_BLOCKS.
        return len(self.trie.strands) + blocks // STRAND_BLOCKS + 2 <= MAX_STRANDS

    def by_rank(self, sets: list[tuple[int, int]]) -> dict[RankKey, Matched]:
        """Sets of ranks, as `match_sets` finds them, rank by rank."""
        result: dict[RankKey, Matched] = {}
        for blocks, mask in sets:
            result.update(dict.fromkeys(self.ranks.keys_of(mask), Matched(blocks)))
        return result

    def match_sets(self, local_hashes: bytes) -> tuple[list[tuple[int, int]], list[Run]]:
        """What ranks hold of the start of a prompt, and the runs along it.

        As (leading blocks, set of ranks), the sets apart and not empty, for ranks with a hit.
        """
        if self.ranks.reborn:
            self._settle_along(local_hashes)
        return self.trie.match_sets(self.ranks.in_use, local_hashes)

    def last_names(self, ranks: int, path: list[Run], blocks: int) -> list[tuple[bytes, int]]:
        """What these ranks call the last of the `blocks` that all of them hold along `path`: each
        name, and the set of those that use it."""
        last = blocks - 1
        for run in path:  # pragma: no branch: no rank matches more than the path has
            length = len(run.label) >> 3
            if last < length:
                break
            last -= length
        return self._odd.names_at(ranks, run.strand << POSITION_BITS | run.start + last)

    def store(self, rank: DeviceRank, parent: int, names: bytes, local: bytes) -> None:
        """Let a rank hold a chain below the block at place `parent` (NOWHERE: a prompt's start).

        Its own names and the local hashes are as many, 8 bytes each.
        """
        run, position = self.trie.root, 0
        if parent != NOWHERE:
            run, position = self.trie.resolve(parent)
            position += 1
            if (
                position << 3 == len(run.label)
                and run.whole == 1 << rank.bit
                and run.partial is None
                and run.children is None
                and run.after is None
                and run.start + position + (len(names) >> 3) <= STRAND_BLOCKS
            ):  # The end of a prompt that no other rank holds: what a decoding engine extends.
                run.label += local
                rank.names.add(parent + 1, names)
                rank.blocks += len(names) >> 3
                return
        # Walk down the trie; hold the blocks that are there, add the others.
        done = 0
        while done < len(local):
            label = run.label
            if position << 3 < len(label):
                same = common_prefix(label, position << 3, local, done)
                if same:
                    end = done + same
                    self._hold(rank, run, position, names[done:end])
                    position += same >> 3
                    done = end
                if done < len(local) and position << 3 < len(label):
                    run = self.trie.split(run, position)
                continue
            child = run.children.get(local[done : done + 8]) if run.children else None
            is_reborn = self.ranks.reborn >> rank.bit & 1
            if child and is_reborn and child.strand not in rank.names.rows:
                self._settle(rank.bit, child.strand)  # which may be all that kept it
                child = run.children.get(local[done : done + 8]) if run.children else None
            if child is not None:
                run, position = child, 0
                continue
            run, position, end = self._extend(rank, run, local, done)
            at = run.strand << POSITION_BITS | run.start + position
            rank.names.add(at, names[done:end])
            rank.blocks += end - done >> 3
            position += end - done >> 3
            done = end

    def _extend(self, rank: DeviceRank, run: Run, local: bytes, done: int) -> tuple[Run, int, int]:
        """Add blocks after `run`, up to a strand's end, and let the rank hold them.

        Returns their run, where they begin in it, and the new `done`.
        """
        mine = 1 << rank.bit
        length = len(run.label) >> 3
        room = STRAND_BLOCKS - run.start - length
        others = 0
        if run.whole != mine or run.partial:
            others = (run.whole & ~mine).bit_count() + len(run.partial or ())
        is_open = run.parent is not None and run.after is None and not run.children and room > 0
        if not is_open or others > _MAX_OTHERS_TO_GROW:
            end = min(len(local), done + (STRAND_BLOCKS << 3))
            run = self.trie.add(run, local[done:end])
            run.whole = mine
            return run, 0, end
        end = min(len(local), done + (room << 3))
        run.label += local[done:end]
        if run.whole != mine or run.partial:
            whole, run.whole = run.whole, 0
            held = (1 << length) - 1 if whole & mine else (run.partial or {}).get(rank.bit, 0)
            for bit in bits_of(whole & ~mine):
                run.set_held(bit, (1 << length) - 1)
            run.set_held(rank.bit, held | ((1 << (end - done >> 3)) - 1) << length)
        return run, length, end

    def _hold(self, rank: DeviceRank, run: Run, position: int, names: bytes) -> None:
        """Let the rank hold blocks that exist, from `position` of `run` on."""
        held = run.held_by(rank.bit)
        span = (1 << (len(names) >> 3)) - 1 << position
        both = held & span
        place = run.strand << POSITION_BITS | run.start + position
        if not both:
            rank.names.add(place, names)
            rank.blocks += len(names) >> 3
        else:
            for at in range(len(names) >> 3):
                name = names[at << 3 : (at + 1) << 3]
                if not both >> (position + at) & 1:
                    rank.names.add(place + at, name)
                    rank.blocks += 1
                elif rank.names.name_at(place + at) != name:
                    rank.names.alias(place + at, int.from_bytes(name, "little"))
        if both != span:
            self._odd.compare(rank, run, span, place)
            run.set_held(rank.bit, held | span)

    def remove(self, rank: DeviceRank, names: bytes) -> int:
        """Drop the blocks with these names, 8 bytes each; returns how many there were."""
        before = rank.blocks
        for strand, positions in rank.names.take(names).items():
            self._drop_positions(rank, strand, positions)
        return before - rank.blocks

    def _drop_positions(self, rank: DeviceRank, strand: int, positions: int) -> None:
        """Drop the blocks at these positions (a bit mask), whose names are forgotten already."""
        first = self.trie.strands[strand]
        if first.after is None:
            self._drop_blocks(rank, first, positions >> first.start)
            return
        while positions:
            lowest = (positions & -positions).bit_length() - 1
            run, _ = self.trie.resolve(strand << POSITION_BITS | lowest)
            here = (positions >> run.start) & ((1 << (len(run.label) >> 3)) - 1)
            positions ^= here << run.start
            self._drop_blocks(rank, run, here)

    def _drop_blocks(self, rank: DeviceRank, run: Run, gone: int) -> None:
        """The same for blocks of one run, `gone` being their positions in it."""
        held = run.held_by(rank.bit) ^ gone
        rank.blocks -= gone.bit_count()
        run.set_held(rank.bit, held)
        if not held:
            end = self._held_end(rank, run.strand)
            rank.names.cut_row(run.strand, end)
            if not end:
                self._odd.forget(run.strand, rank.bit)
            self.trie.prune(run)
        elif not run.whole and held.bit_length() << 4 <= len(run.label):
            self._trim(run)

    def _held_end(self, rank: DeviceRank, strand: int) -> int:
        """Positions of a strand up to the last that the rank holds; 0 if it holds none."""
        if not rank.names.has_unnamed():
            return rank.names.named_end(strand)
        # A row cannot tell a block named 0 from none.
        ends = [
            run.start + held.bit_length()
            for run in self.trie.pieces(strand)
            if (held := run.held_by(rank.bit))
        ]
        return ends[-1] if ends else 0

    def _trim(self, run: Run) -> None:
        """Cut the end off a run when half of it is held by nobody and nothing follows."""
        blocks = len(run.label) >> 3
        if run.after or run.children or blocks <= _TRIM_BLOCKS:
            return
        if not run.is_held_beyond(min(blocks >> 1, blocks - _TRIM_BLOCKS)):
            self._cut(run)

    def _cut(self, run: Run) -> None:
        """Cut off the end of a run, nothing of which is held or hung upon."""
        assert run.partial is not None
        top = max(map(int.bit_length, run.partial.values()))
        del run.label[top << 3 :]
        for bit, held in list(run.partial.items()):
            rank = self.ranks.rank_in(run.strand, bit)
            if rank is not None:  # else it is an old bit
                rank.names.cut_row(run.strand, run.start + top)
            run.set_held(bit, held)

    def held_in(self, rank: DeviceRank, strand: int) -> int:
        """The positions (a bit mask) of a strand that a rank with a row for it holds."""
        held = 0
        for run in self.trie.pieces(strand):
            held |= run.held_by(rank.bit) << run.start
        return held

    def drop(self, rank: DeviceRank, strand: int, positions: int) -> None:
        """Drop the blocks at these positions (a bit mask), which the rank holds."""
        for position in bits_of(positions):
            rank.names.discard(strand << POSITION_BITS | position)
        self._drop_positions(rank, strand, positions)

    def cut_row(self, rank: DeviceRank, strand: int) -> None:
        """Give back the memory of names behind the last block of a strand that a rank holds."""
        rank.names.cut_row(strand, self._held_end(rank, strand))

    def cut_label(self, strand: int) -> None:
        """Give back the memory of the blocks at the end of a strand that nobody holds."""
        for run in self.trie.pieces(strand)[-1:]:
            if run.partial and not run.whole and not run.children:
                self._cut(run)

    def drop_oldest(self, rank: DeviceRank, blocks: int) -> None:
        """Drop so many blocks of a rank: the runs stored first, from their ends."""
        while blocks:
            strand = next(iter(rank.names.rows))
            last = self._held_end(rank, strand) - 1
            run, offset = self.trie.resolve(strand << POSITION_BITS | last)
            held = run.held_by(rank.bit)
            places = bits_of(held & (2 << offset) - 1)[-blocks:]
            for position in places:
                rank.names.discard(strand << POSITION_BITS | run.start + position)
            self._drop_blocks(rank, run, sum(1 << position for position in places))
            blocks -= len(places)
