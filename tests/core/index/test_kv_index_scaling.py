"""What the index does does not grow with what it holds: operations are counted, not timed."""

from collections.abc import Callable, ItemsView, Iterator, ValuesView

import pytest

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.runs import Run
from lean_selector.core.index.shapes import Matched, Tier
from tests.support.blocks import matches, remove_blocks, store_blocks
from tests.support.driven_selector import pack
from tests.support.operations import lines_run


class Watched(dict[int, int]):
    """A dict that counts how many of its entries were gone through."""

    seen = 0

    def __iter__(self) -> Iterator[int]:
        self.seen += len(self)
        return super().__iter__()

    def values(self) -> ValuesView[int]:  # type: ignore[override]  # dict_values is final
        self.seen += len(self)
        return super().values()

    def items(self) -> ItemsView[int, int]:  # type: ignore[override]  # as values
        self.seen += len(self)
        return super().items()


SHARED = list(range(1, 257))


def shared_run(ranks: int) -> tuple[KvIndex, Run, Watched]:
    """A prompt of 256 blocks: rank 0 keeps 200 of them, the others 100."""
    index = KvIndex(16)
    for worker_id in range(ranks):
        store_blocks(index, (worker_id, 0), Tier.DEVICE, None, SHARED, pack(SHARED))
        remove_blocks(index, (worker_id, 0), Tier.DEVICE, SHARED[100 if worker_id else 200 :])
    (run,) = index._device.trie.strands.values()
    index.match_sets(pack(SHARED))
    remove_blocks(index, (1, 0), Tier.DEVICE, [100])
    run.partial = Watched(run.partial or {})
    return index, run, run.partial


def test_a_rank_that_lets_go_of_a_shared_run_does_not_look_at_the_others() -> None:
    lines = {}
    for ranks in (40, 400):
        index, _, holders = shared_run(ranks)
        lines[ranks] = lines_run(remove_blocks, index, (2, 0), Tier.DEVICE, [100, 99])
        assert holders.seen == 0
    assert lines[400] <= lines[40] + 5


def test_a_match_after_a_change_does_not_look_at_every_holder_of_a_part() -> None:
    lines = {}
    for ranks in (40, 400):
        index, _, holders = shared_run(ranks)
        remove_blocks(index, (2, 0), Tier.DEVICE, [100, 99])
        prompt = pack(SHARED)
        lines[ranks] = lines_run(index.match_sets, prompt)
        assert holders.seen == 0
        sets, _ = index.match_sets(prompt)
        assert sorted((n, mask.bit_count()) for n, mask in sets) == [
            (98, 1), (99, 1), (100, ranks - 3), (200, 1)
        ]  # fmt: skip
    assert lines[400] <= lines[40] + 5


def test_a_shared_run_loses_its_end_when_the_last_rank_lets_go_of_half() -> None:
    index, run, _ = shared_run(10)
    remove_blocks(index, (0, 0), Tier.DEVICE, SHARED[150:200])
    assert len(run.label) >> 3 == 256
    remove_blocks(index, (0, 0), Tier.DEVICE, SHARED[120:150])
    assert len(run.label) >> 3 == 120
    for worker_id in (0, 5):
        row = index._ranks[worker_id, 0].device.hashes.rows[run.strand]
        assert len(row) >> 3 <= 120
    assert {key: hit.device for key, hit in matches(index, pack(SHARED)).items()} == {
        (0, 0): 120, (1, 0): 99, **{(worker, 0): 100 for worker in range(2, 10)}
    }  # fmt: skip


def split_at_every_block(blocks: int) -> KvIndex:
    """A prompt that another one leaves after each of its blocks."""
    index, names = KvIndex(16), list(range(1, blocks + 1))
    store_blocks(index, (1, 0), Tier.DEVICE, None, names, pack(names))
    for name in names[:-1]:
        store_blocks(index, (1, 0), Tier.DEVICE, name, [10_000 + name], pack([10_000 + name]))
    return index


@pytest.mark.parametrize("order", ["from the end", "from the middle"])
def test_a_block_of_a_strand_in_many_runs_is_found_and_removed_at_once(order: str) -> None:
    lines = {}
    for blocks in (100, 1000):
        index = split_at_every_block(blocks)
        name = blocks if order == "from the end" else blocks // 2
        below = index, (1, 0), Tier.DEVICE, name - 2, [7_777], pack([7_777])
        lines[blocks] = lines_run(store_blocks, *below)
        for gone in (name, name - 1):
            lines[blocks] += lines_run(remove_blocks, index, (1, 0), Tier.DEVICE, [gone])
    assert lines[1000] <= lines[100] + 20  # a doubling search may take some steps more


def test_eviction_from_a_strand_in_many_runs_does_not_look_at_all_of_them() -> None:
    lines = {}
    for blocks in (100, 1000):
        index = split_at_every_block(blocks)
        index.set_bound(1, 2 * blocks - 2, None)
        one_more = index, (1, 0), Tier.DEVICE, None, [7_777], pack([7_777])
        lines[blocks] = lines_run(store_blocks, *one_more)
        assert index.blocks(1, 0, Tier.DEVICE) == 2 * blocks - 2
    assert lines[1000] <= lines[100] + 20


def with_lower_tiers(ranks: int) -> KvIndex:
    """Each rank has a block of its own on the device and another on each lower tier."""
    index = KvIndex(16)
    for worker_id in range(ranks):
        own = 10_000 + worker_id
        store_blocks(index, (worker_id, 0), Tier.DEVICE, None, [own], pack([own]))
        for tier in (Tier.HOST_PINNED, Tier.DISK, Tier.EXTERNAL):
            store_blocks(index, (worker_id, 0), tier, own, [own + 10_000], pack([own + 10_000]))
    return index


def test_a_match_does_not_ask_ranks_whose_lower_tiers_cannot_go_on() -> None:
    prompt = pack([1, 2, 3, 4])
    lines: dict[int, int] = {}
    for ranks in (40, 4_000):
        index = with_lower_tiers(ranks)
        for worker_id in (7, 8, 9):
            store_blocks(index, (worker_id, 0), Tier.DEVICE, None, [1, 2], pack([1, 2]))
        store_blocks(index, (7, 0), Tier.HOST_PINNED, 2, [3], pack([3]))
        store_blocks(index, (8, 0), Tier.DISK, 555, [3], pack([3]))  # below another block
        store_blocks(index, (11, 0), Tier.EXTERNAL, None, [1], pack([1]))
        extended = {(7, 0): Matched(2, 1, 0), (11, 0): Matched(0, 0, 1)}
        assert matches(index, prompt) == {**extended, (8, 0): Matched(2), (9, 0): Matched(2)}
        bits = [1 << index.bits.acquire((worker_id, 0)) for worker_id in (7, 8, 9, 11)]
        sets, going_on = index.match_sets(prompt)
        assert sets == [(2, bits[1] | bits[2])]
        assert going_on == [(Matched(2, 1, 0), bits[0]), (Matched(0, 0, 1), bits[3])]
        lines[ranks] = lines_run(index.match_sets, prompt)
    # Asking a rank takes some ten lines.
    assert lines[4_000] <= lines[40] + 20


def test_what_all_ranks_share_of_lower_tiers_is_in_many_dicts_none_of_which_grows_long() -> None:
    index = KvIndex(16)
    lower = index._lower_matches
    assert (lower._tiers, lower._continuations._ranks) == ([], [])  # which are small, too
    local = [(block * 0x9E3779B97F4A7C15 + 0xB5) % 2**64 for block in range(4_000)]
    for worker_id in range(5):  # each calls them otherwise
        names = [block + 1 + worker_id for block in local]
        store_blocks(index, (worker_id, 0), Tier.HOST_PINNED, None, names, pack(local))
    for shared, entries in (
        (lower._tiers[0]._edges, 5 * 4_000 - 4),  # the first block of a prompt has one for all
        (lower._continuations._ranks, 4_000),
    ):
        lengths = [len(part) for part in shared]
        assert sum(lengths) == entries
        assert max(lengths) < entries // 32


# Dropping


def filled(prompts: int, blocks: int = 4) -> KvIndex:
    """A rank with so many prompts, and as many blocks on a lower tier."""
    index = KvIndex(16)
    for at in range(prompts):
        names = list(range(at * blocks, (at + 1) * blocks))
        store_blocks(index, (1, 0), Tier.DEVICE, None, names, pack(names))
        store_blocks(index, (1, 0), Tier.DISK, None, names, pack(names))
    return index


def swept(index: KvIndex) -> list[int]:
    """The lines that each step took, up to the last."""
    lines = []
    while index.sweep(0):
        lines.append(lines_run(index.sweep, 1))
    return lines


def clear(index: KvIndex) -> None:
    assert index.clear(1, 0) == 8 * (len(index._device.trie.strands))


def drop(index: KvIndex) -> None:
    index.drop_worker(1)


def bound(index: KvIndex) -> None:
    index.set_bound(1, 0, 0)


@pytest.mark.parametrize("let_go", [clear, drop, bound, KvIndex.abandon])
def test_dropping_is_done_in_steps_that_do_not_grow_with_what_is_dropped(
    let_go: Callable[[KvIndex], None],
) -> None:
    worst: dict[int, int] = {}
    at_once: dict[int, int] = {}
    for prompts in (200, 2_000):
        index = filled(prompts)
        at_once[prompts] = lines_run(let_go, index)
        steps = swept(index)
        worst[prompts] = max(steps)
        assert len(steps) > prompts // 50
        assert index.is_empty
        trie, continuations = index._device.trie, index._lower_matches._continuations
        left = trie.strands, trie.root.children, any(continuations._ranks), index.bits.keys
        assert left == ({}, None, False, [])
    assert at_once[2_000] <= at_once[200] + 20
    assert worst[2_000] <= worst[200] + 20


def test_an_engine_that_clears_again_and_again_does_not_pile_up_what_it_dropped() -> None:
    index = KvIndex(16)
    names = list(range(1, 65))
    for _ in range(2_000):
        store_blocks(index, (1, 0), Tier.DEVICE, None, names, pack(names))
        index.clear(1, 0)
        assert len(index._sweeps) <= 2
