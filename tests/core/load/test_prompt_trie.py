"""When runs of the trie become one again; the rest is in tests/properties/test_slots_model.py."""

from lean_selector.core.load.prompt_trie import PromptTrie
from lean_selector.core.load.rank_load import BlockWeights
from tests.support.driven_selector import pack

ONE = 1  # a rank, as a set of itself


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
