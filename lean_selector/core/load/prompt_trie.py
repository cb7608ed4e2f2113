"""The active prompts of one partition, in one trie for all ranks.

A prompt is a path from the root. A block is a position on a path, not a hash value (D20).
Consecutive blocks that the same requests have form one run. So adding and removing a prompt cost
one step per run of the prompt, not per block. A run counts its requests per rank. A block adds 1 to
the load of a rank, unless the block's run stores another weight for this rank (selection.md section
6)."""

from typing import Final

from lean_selector.core.hashing import common_prefix
from lean_selector.core.load.rank_load import BlockWeights
from lean_selector.core.load.shapes import ActiveRun

HASH_BYTES: Final = 8


class PromptTrie:
    """A trie of prompts on one or more ranks. Each run of blocks without a branch is one node."""

    def __init__(self) -> None:
        self.root = ActiveRun(b"", None, {}, {})

    def insert(self, hashes: bytes, rank_set: int) -> tuple[ActiveRun, int]:
        """Add a prompt on a rank; `rank_set` has only this rank. Return the prompt's last
        run (the root for an empty prompt), and how many of its blocks are new on the rank. The run
        remains the prompt's last run when other prompts are inserted or removed."""
        run = self.root
        start, end, new_bytes = 0, len(hashes), 0
        while start < end:
            first = hashes[start : start + HASH_BYTES]
            child = run.children.get(first)
            if child is None:
                rest = hashes[start:]
                run.children[first] = run = ActiveRun(rest, run, {}, {rank_set: 1}, rank_set)
                new_bytes += len(rest)
                break
            label = child.label
            if not hashes.startswith(label, start):
                child = _split(child, common_prefix(label, 0, hashes, start))
                label = child.label
            run = child
            held = run.refs.get(rank_set, 0)
            run.refs[rank_set] = held + 1
            if not held:
                run.mask |= rank_set
                new_bytes += len(label)
            start += len(label)
        run.ends += 1
        return run, new_bytes // HASH_BYTES

    def remove(self, run: ActiveRun, rank_set: int, weights: BlockWeights) -> int:
        """Remove one prompt that ends with `run` from a rank. Return how many of its blocks no
        other prompt on the rank has. Updates `weights`, the weights of the rank's blocks."""
        run.ends -= 1
        freed_bytes = 0
        while (parent := run.parent) is not None:
            refs = run.refs
            held = refs[rank_set]
            if held > 1:
                refs[rank_set] = held - 1
            else:
                del refs[rank_set]
                run.mask ^= rank_set
                freed_bytes += len(run.label)
                if run.weights is not None:
                    _weigh_run(run, rank_set, 1.0, weights)
            if not refs:
                del parent.children[run.label[:HASH_BYTES]]
            elif not run.ends and len(run.children) == 1:
                _merge_into_child(run)
            run = parent
        return freed_bytes // HASH_BYTES

    def weigh(self, run: ActiveRun, rank_set: int, weight: float, weights: BlockWeights) -> None:
        """Set the weight of the blocks that only one prompt on this rank has: the prompt that ends
        with `run`. Updates `weights`, which counts the rank's blocks by weight."""
        while (parent := run.parent) is not None:
            if run.refs[rank_set] == 1:
                _weigh_run(run, rank_set, weight, weights)
            if not run.ends and len(run.children) == 1:
                _merge_into_child(run)
            run = parent

    def active_prefix(self, hashes: bytes) -> list[tuple[int, int]]:
        """Return pairs (n, ranks): exactly n leading blocks of the prompt are active on these
        ranks. The highest n comes first. Ranks without active blocks are in no pair."""
        found: list[tuple[int, int]] = []
        run = self.root
        start, end = 0, len(hashes)
        while start < end:
            child = run.children.get(hashes[start : start + HASH_BYTES])
            if child is None:
                break
            label = child.label
            whole = hashes.startswith(label, start)
            start += len(label) if whole else common_prefix(label, 0, hashes, start)
            # A rank that crosses a run also crosses all runs above it.
            found.append((start // HASH_BYTES, child.mask))
            if not whole:
                break
            run = child
        found.reverse()
        seen = 0
        for at, (blocks, mask) in enumerate(found):
            found[at] = (blocks, mask & ~seen)
            seen = mask
        return found

    def hashes_of(self, run: ActiveRun) -> bytes:
        """Return the packed block hashes on the path from the trie's root to the end of `run`."""
        labels = []
        while run.parent is not None:
            labels.append(run.label)
            run = run.parent
        labels.reverse()
        return b"".join(labels)


def _split(run: ActiveRun, head_bytes: int) -> ActiveRun:
    """Split a run after `head_bytes` bytes, and return the first part, which is a new run. `run`
    becomes the second part: reservations refer to `run` as the last run of their prompt."""
    parent, label = run.parent, run.label
    assert parent is not None
    tail = label[head_bytes:]
    head = ActiveRun(
        label[:head_bytes], parent, {tail[:HASH_BYTES]: run}, run.refs.copy(), run.mask
    )
    if run.weights is not None:
        head.weights = run.weights.copy()
    parent.children[label[:HASH_BYTES]] = head
    run.label = tail
    run.parent = head
    return head


def _merge_into_child(run: ActiveRun) -> None:
    """Merge a run into its only child, which has the same requests, if their weights are equal."""
    (child,) = run.children.values()
    if child.weights != run.weights:
        return
    parent = run.parent
    assert parent is not None
    child.label = run.label + child.label
    child.parent = parent
    parent.children[run.label[:HASH_BYTES]] = child


def _weigh_run(run: ActiveRun, rank_set: int, weight: float, weights: BlockWeights) -> None:
    held = run.weights or {}
    weights.move(held.get(rank_set, 1.0), weight, len(run.label) // HASH_BYTES)
    if weight != 1.0:
        held[rank_set] = weight
    else:
        held.pop(rank_set, None)
    run.weights = held or None
