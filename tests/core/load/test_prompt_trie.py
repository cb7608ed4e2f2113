"""When runs of the trie become one again; the rest is in tests/properties/test_slots_model.py."""

from lean_selector.core.load.prompt_trie import PromptTrie
from lean_selector.core.load.rank_load import BlockWeights
from lean_selector.core.load.shapes import ActiveRun
from tests.support.driven_selector import pack

ONE, TWO = 1, 2  # ranks, each as a set of itself


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


def test_runs_grow_together_when_the_split_has_no_reason_left() -> None:
    trie = PromptTrie()
    stays, _ = trie.insert(pack([1, 2, 3, 4]), ONE)
    weights = BlockWeights()
    goers: list[ActiveRun] = [
        trie.insert(hashes, TWO)[0] for hashes in (pack([1]), pack([1, 2, 9]), pack([1, 2, 3]))
    ]
    assert len(runs(trie)) == 5
    assert [trie.remove(run, TWO, weights) for run in goers] == [0, 1, 3]
    assert runs(trie) == [(pack([1, 2, 3, 4]), {ONE: 1})]
    assert trie.hashes_of(stays) == pack([1, 2, 3, 4])
    assert trie.remove(stays, ONE, weights) == 4
    assert runs(trie) == []


def test_a_run_where_another_prompt_ends_stays() -> None:
    trie = PromptTrie()
    weights = BlockWeights()
    trie.insert(pack([1, 2, 3]), ONE)
    stays, _ = trie.insert(pack([1, 2]), ONE)
    goes, _ = trie.insert(pack([1, 2]), ONE)
    assert goes is stays
    trie.remove(goes, ONE, weights)
    trie.weigh(stays, ONE, 0.5, weights)
    assert runs(trie) == [(pack([1, 2]), {ONE: 2}), (pack([3]), {ONE: 1})]
    assert trie.hashes_of(stays) == pack([1, 2])


def test_runs_of_unlike_weight_stay_apart_until_it_is_the_same() -> None:
    trie = PromptTrie()
    weights = BlockWeights()
    stays, _ = trie.insert(pack([1, 2, 3]), ONE)
    trie.weigh(stays, ONE, 0.5, weights)
    goes, _ = trie.insert(pack([1]), ONE)
    trie.weigh(stays, ONE, 0.25, weights)
    assert weights.counts == {0.5: 1, 0.25: 2}
    trie.remove(goes, ONE, weights)
    assert len(runs(trie)) == 2
    trie.weigh(stays, ONE, 0.75, weights)
    assert len(runs(trie)) == 1
    assert weights.counts == {0.75: 3}
    trie.weigh(stays, ONE, 1.0, weights)
    assert weights.counts == {}
