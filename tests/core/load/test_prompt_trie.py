import pytest

from lean_selector.core.load.prompt_trie import PromptTrie
from lean_selector.core.load.rank_load import BlockWeights
from lean_selector.core.load.shapes import ActiveRun

ONE, TWO, THREE = 1, 2, 4  # ranks, each as a set of itself


def packed(*hashes: int) -> bytes:
    return b"".join(h.to_bytes(8, "little") for h in hashes)


def runs(trie: PromptTrie) -> list[tuple[bytes, dict[int, int]]]:
    """Labels and counts, parents first."""
    found = []
    todo = [trie.root]
    while todo:
        run = todo.pop()
        assert all(c.mask == sum(c.refs) for c in run.children.values())
        found += [(child.label, child.refs) for child in run.children.values()]
        todo += run.children.values()
    return found


def test_a_run_is_shared_by_all_ranks_and_counted_for_each() -> None:
    trie = PromptTrie()
    assert trie.insert(packed(1, 2, 3), ONE)[1] == 3
    assert trie.insert(packed(1, 2, 3), TWO)[1] == 3
    assert trie.insert(packed(1, 2, 3), TWO)[1] == 0
    assert runs(trie) == [(packed(1, 2, 3), {ONE: 1, TWO: 2})]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_split_is_exact_and_leaves_the_tail_its_identity(cut: int) -> None:
    trie = PromptTrie()
    long = packed(*range(40))
    first, _ = trie.insert(long, ONE)
    second, new = trie.insert(long[: cut * 8] + packed(99), ONE)
    assert new == 1
    assert first.label == long[cut * 8 :]
    assert trie.hashes_of(first) == long
    assert trie.hashes_of(second) == long[: cut * 8] + packed(99)
    assert trie.active_prefix(long[: cut * 8] + packed(98)) == [(cut, ONE)]


def test_a_prompt_that_ends_inside_a_run_splits_it() -> None:
    trie = PromptTrie()
    trie.insert(packed(1, 2, 3), ONE)
    end, new = trie.insert(packed(1, 2), ONE)
    assert new == 0
    assert trie.hashes_of(end) == packed(1, 2)
    assert runs(trie) == [(packed(1, 2), {ONE: 2}), (packed(3), {ONE: 1})]


def test_runs_grow_together_when_the_split_has_no_reason_left() -> None:
    trie = PromptTrie()
    stays, _ = trie.insert(packed(1, 2, 3, 4), ONE)
    weights = BlockWeights()
    goers: list[ActiveRun] = [
        trie.insert(hashes, TWO)[0] for hashes in (packed(1), packed(1, 2, 9), packed(1, 2, 3))
    ]
    assert len(runs(trie)) == 5
    assert [trie.remove(run, TWO, weights) for run in goers] == [0, 1, 3]
    assert runs(trie) == [(packed(1, 2, 3, 4), {ONE: 1})]
    assert trie.hashes_of(stays) == packed(1, 2, 3, 4)
    assert trie.remove(stays, ONE, weights) == 4
    assert runs(trie) == []


def test_a_run_where_another_prompt_ends_stays() -> None:
    trie = PromptTrie()
    weights = BlockWeights()
    trie.insert(packed(1, 2, 3), ONE)
    stays, _ = trie.insert(packed(1, 2), ONE)
    goes, _ = trie.insert(packed(1, 2), ONE)
    assert goes is stays
    trie.remove(goes, ONE, weights)
    trie.weigh(stays, ONE, 0.5, weights)
    assert runs(trie) == [(packed(1, 2), {ONE: 2}), (packed(3), {ONE: 1})]
    assert trie.hashes_of(stays) == packed(1, 2)


def test_runs_of_unlike_weight_stay_apart_until_it_is_the_same() -> None:
    trie = PromptTrie()
    weights = BlockWeights()
    stays, _ = trie.insert(packed(1, 2, 3), ONE)
    trie.weigh(stays, ONE, 0.5, weights)
    goes, _ = trie.insert(packed(1), ONE)
    trie.weigh(stays, ONE, 0.25, weights)
    assert weights.counts == {0.5: 1, 0.25: 2}
    trie.remove(goes, ONE, weights)
    assert len(runs(trie)) == 2
    trie.weigh(stays, ONE, 0.75, weights)
    assert len(runs(trie)) == 1
    assert weights.counts == {0.75: 3}
    trie.weigh(stays, ONE, 1.0, weights)
    assert weights.counts == {}


def test_an_empty_prompt_ends_at_the_root() -> None:
    trie = PromptTrie()
    end, new = trie.insert(b"", ONE)
    assert (end, new) == (trie.root, 0)
    assert trie.hashes_of(end) == b""
    assert trie.remove(end, ONE, BlockWeights()) == 0
    assert trie.active_prefix(b"") == []


def test_each_rank_gets_its_own_depth() -> None:
    trie = PromptTrie()
    trie.insert(packed(1, 2, 3), ONE)
    trie.insert(packed(1), TWO)
    trie.insert(packed(8), THREE)
    assert trie.active_prefix(packed(1, 2, 4)) == [(2, ONE), (1, TWO)]
    assert trie.active_prefix(packed(2)) == []
