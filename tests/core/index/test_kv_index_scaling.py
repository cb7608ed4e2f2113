"""What the index does does not grow with what it holds: operations are counted, not timed."""

from collections.abc import ItemsView, Iterator, ValuesView
from struct import pack

import pytest

from lean_selector.core.index.kv_index import KvIndex, Tier
from lean_selector.core.index.runs import Run
from tests.operations import lines_run


def as_bytes(local: list[int]) -> bytes:
    return pack(f"<{len(local)}Q", *local)


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
        index.store(worker_id, 0, Tier.DEVICE, None, SHARED, as_bytes(SHARED))
        index.remove(worker_id, 0, Tier.DEVICE, SHARED[100 if worker_id else 200 :])
    (run,) = index._device.trie.strands.values()
    index.match_sets(as_bytes(SHARED))
    index.remove(1, 0, Tier.DEVICE, [100])
    run.partial = Watched(run.partial or {})
    return index, run, run.partial


def test_a_rank_that_lets_go_of_a_shared_run_does_not_look_at_the_others() -> None:
    lines = {}
    for ranks in (40, 400):
        index, _, holders = shared_run(ranks)
        lines[ranks] = lines_run(index.remove, 2, 0, Tier.DEVICE, [100, 99])
        assert holders.seen == 0
    assert lines[400] <= lines[40] + 5


def test_a_match_after_a_change_does_not_look_at_every_holder_of_a_part() -> None:
    lines = {}
    for ranks in (40, 400):
        index, _, holders = shared_run(ranks)
        index.remove(2, 0, Tier.DEVICE, [100, 99])
        prompt = as_bytes(SHARED)
        lines[ranks] = lines_run(index.match_sets, prompt)
        assert holders.seen == 0
        sets, _ = index.match_sets(prompt)
        assert sorted((n, mask.bit_count()) for n, mask in sets) == [
            (98, 1), (99, 1), (100, ranks - 3), (200, 1)
        ]  # fmt: skip
    assert lines[400] <= lines[40] + 5


def test_a_shared_run_loses_its_end_when_the_last_rank_lets_go_of_half() -> None:
    index, run, _ = shared_run(10)
    index.remove(0, 0, Tier.DEVICE, SHARED[150:200])
    assert len(run.label) >> 3 == 256
    index.remove(0, 0, Tier.DEVICE, SHARED[120:150])
    assert len(run.label) >> 3 == 120
    for worker_id in (0, 5):
        row = index._ranks[worker_id, 0].device.names.rows[run.strand]
        assert len(row) >> 3 <= 120
    assert {key: hit.device for key, hit in index.match(as_bytes(SHARED)).items()} == {
        (0, 0): 120, (1, 0): 99, **{(worker, 0): 100 for worker in range(2, 10)}
    }  # fmt: skip


def split_at_every_block(blocks: int) -> KvIndex:
    """A prompt that another one leaves after each of its blocks."""
    index, names = KvIndex(16), list(range(1, blocks + 1))
    index.store(1, 0, Tier.DEVICE, None, names, as_bytes(names))
    for name in names[:-1]:
        index.store(1, 0, Tier.DEVICE, name, [10_000 + name], as_bytes([10_000 + name]))
    return index


@pytest.mark.parametrize("order", ["from the end", "from the middle"])
def test_a_block_of_a_strand_in_many_runs_is_found_and_removed_at_once(order: str) -> None:
    lines = {}
    for blocks in (100, 1000):
        index = split_at_every_block(blocks)
        name = blocks if order == "from the end" else blocks // 2
        below = 1, 0, Tier.DEVICE, name - 2, [7_777], as_bytes([7_777])
        lines[blocks] = lines_run(index.store, *below)
        for gone in (name, name - 1):
            lines[blocks] += lines_run(index.remove, 1, 0, Tier.DEVICE, [gone])
    assert lines[1000] <= lines[100] + 20  # a doubling search may take some steps more


def test_eviction_from_a_strand_in_many_runs_does_not_look_at_all_of_them() -> None:
    lines = {}
    for blocks in (100, 1000):
        index = split_at_every_block(blocks)
        index.set_bound(1, 0, 2 * blocks - 2, None)
        one_more = 1, 0, Tier.DEVICE, None, [7_777], as_bytes([7_777])
        lines[blocks] = lines_run(index.store, *one_more)
        assert index.blocks(1, 0, Tier.DEVICE) == 2 * blocks - 2
    assert lines[1000] <= lines[100] + 20
