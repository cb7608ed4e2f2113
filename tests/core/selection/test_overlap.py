"""What a rank is taken to hold, from several indexes."""

from lean_selector.core.index.shapes import Matched, Tier
from lean_selector.core.selection.overlap import match_by_rank, match_of, match_sets
from tests.support.blocks import store_blocks
from tests.support.driven_selector import DrivenSelector, pack


def test_blocks_that_the_source_of_another_rank_reports_count_too() -> None:
    driven = DrivenSelector()
    driven.register(1)
    partition = driven.partition
    index, strays = partition.index, partition.index.of_strays(1)
    store_blocks(index, (1, 0), Tier.DEVICE, None, [1], pack([1]))
    store_blocks(strays, (1, 0), Tier.DEVICE, None, [1, 2], pack([1, 2]))
    store_blocks(strays, (1, 7), Tier.HOST_PINNED, None, [1], pack([1]))
    prompt = pack([1, 2, 3])
    assert match_by_rank(partition, prompt) == {(1, 0): Matched(2), (1, 7): Matched(0, 1)}
    mask = partition.slots.ranks[1, 0].mask
    assert match_of(match_sets(partition, prompt), mask) == Matched(2)
    assert index.ranks() == [(1, 0), (1, 7)]
    assert index.total_blocks == 4
    assert [(run.dp_rank, run.tier) for runs in index.dump() for run in runs] == [
        (0, Tier.DEVICE),
        (0, Tier.DEVICE),
        (7, Tier.HOST_PINNED),
    ]
    index.set_bound(2, 1, None)
    store_blocks(strays, (2, 7), Tier.DEVICE, None, [3, 4], pack([3, 4]))
    assert index.blocks(2, 7, Tier.DEVICE) == 1  # the bound of a worker is that of its strays, too
    store_blocks(strays, (2, 7), Tier.DEVICE, None, [1], pack([1]))
    index.drop_worker(1)
    assert index.ranks() == [(2, 7)]
    index.abandon()
    assert index.is_empty
