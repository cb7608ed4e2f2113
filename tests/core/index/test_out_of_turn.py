"""What becomes of events that come before their turn; that all of it adds up is in
tests/properties/test_cursor_model.py.

In each story a batch is missing that stored block 1, in the state `given`; batch 2 comes early and
again.
"""

from typing import Any

import pytest

from lean_selector.core.index import out_of_turn
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.out_of_turn import Delivery, Turn
from lean_selector.core.index.shapes import AllBlocksCleared, Event, EventBatch, EventPart, Tier
from tests.support.blocks import remove_blocks
from tests.support.kv_records import removed_blocks, stored_blocks

CPU = Tier.HOST_PINNED


class Source:
    def __init__(self) -> None:
        self.index = KvIndex(2)
        self.ingest = KvIngest(self.index, 7, 0)
        self.left = self.ingest.out_of_turn

    def send(self, turn: Turn, seq: int, *events: Event, dp_rank: int = 0) -> bool:
        """Each event in a slice of its own."""
        delivery = Delivery(seq, turn, is_copied=False)
        return [self.ingest.apply(EventBatch(dp_rank, [e], []), delivery) for e in events][-1]

    def mend(self, missing: Event, *early: Event) -> None:
        """Batch 1 is missing, batch 2 comes early, then a replay brings both."""
        self.send(Turn.EARLY, 2, *early)
        self.send(Turn.LATE, 1, missing)
        self.send(Turn.AGAIN, 2, *early)

    def held(self, tier: Tier = Tier.DEVICE) -> list[int]:
        """Each block as often as it must be removed."""
        found = []
        for block in range(9, 0, -1):
            while self.index.knows((7, 0), tier, block):
                found.append(block)
                remove_blocks(self.index, (7, 0), tier, [block])
        return sorted(found)


def stored(block: int, parent: int | None = None, tier: Tier = Tier.DEVICE, **more: Any) -> Event:
    return stored_blocks([block], parent, [block, block], 2, tier, **more)


def removed(*blocks: int, tier: Tier = Tier.DEVICE, **more: Any) -> Event:
    return removed_blocks(blocks, tier, **more)


PARTS = [stored(block, block - 1, part=EventPart(block - 1)) for block in (2, 3, 4)]
HASH_ALONE = stored_blocks([1], None, [], 0, CPU)
KIND: dict[str, Any] = {"group_idx": 1, "kind": "full_attention"}


@pytest.mark.parametrize(
    ("missing", "early", "device", "host"),
    [
        pytest.param(stored(1), (stored(2, 1),), [1, 2], [], id="a child"),
        pytest.param(stored(1), (stored(2, 1), removed(2)), [1], [], id="a child that has gone"),
        pytest.param(stored(1), (stored(2, 1), stored(2, 1)), [1, 2, 2], [], id="two children"),
        pytest.param(stored(1), PARTS, [1, 2, 3, 4], [], id="a child in parts"),
        pytest.param(stored(1), (removed(1),), [], [], id="a removal"),
        pytest.param(stored(1), (removed(1), stored(1)), [1], [], id="a removal, and stored again"),
        pytest.param(stored(1), (stored(1), removed(1)), [1], [], id="a copy, and its removal"),
        pytest.param(stored(1), (stored(1), removed(1, 1)), [], [], id="a copy, and both removals"),
        pytest.param(stored(1), (HASH_ALONE,), [1], [1], id="a hash alone"),
        pytest.param(
            stored(1), (HASH_ALONE, removed(1, tier=CPU)), [1], [], id="a hash alone that has gone"
        ),
        pytest.param(
            stored(1, tier=CPU), (removed(1, tier=CPU), removed(1)), [], [], id="another tier"
        ),
        pytest.param(
            stored(1, **KIND), (stored(2, group_idx=1),), [1, 2], [], id="a group not yet known"
        ),
        pytest.param(
            stored(1, **KIND), (removed(1, group_idx=1),), [], [], id="a removal of such a group"
        ),
        pytest.param(AllBlocksCleared(), (stored(1),), [1], [], id="a clear"),
        pytest.param(
            stored(1), (stored(5), stored(2, 1), stored(6)), [1, 2, 5, 6], [], id="one of several"
        ),
        pytest.param(
            stored_blocks([1, 2, 3], None, [1] * 6, 2, Tier.DEVICE),
            (removed(3), removed(2)),
            *([1], []),
            id="removals of a chain",
        ),
    ],
)
def test_what_comes_early_has_its_effect_once(
    missing: Event, early: tuple[Event, ...], device: list[int], host: list[int]
) -> None:
    source = Source()
    source.send(Turn.EARLY, 2, *early)
    source.send(Turn.LATE, 1, missing)
    # Where the missing batch clears the rank, the early one is as good as missing.
    is_cleared = isinstance(missing, AllBlocksCleared)
    source.send(Turn.LATE if is_cleared else Turn.AGAIN, 2, *early)
    assert (source.held(), source.held(CPU)) == (device, host)
    assert not source.left.has_left(2)


def test_hashes_alone_that_come_late_are_removed_if_that_was_early() -> None:
    source = Source()
    source.send(Turn.IN_ORDER, 0, stored(1))
    source.mend(HASH_ALONE, removed(1, tier=CPU))
    assert (source.held(), source.held(CPU)) == ([1], [])


def test_what_is_left_stays_until_its_parent_comes_or_all_is_in_order() -> None:
    source = Source()
    source.send(Turn.EARLY, 2, stored(2, 1), removed(5))
    source.send(Turn.AGAIN, 2, stored(2, 1), removed(5))
    assert len(source.left) == 2
    source.send(Turn.IN_ORDER, 3, stored(5))
    assert not len(source.left)
    assert source.held() == [5]


def test_each_removal_that_is_owed_takes_one_copy() -> None:
    source = Source()
    source.send(Turn.EARLY, 2, removed(1, 1))
    source.send(Turn.LATE, 1, stored(1), stored(1))
    assert not len(source.left)
    source.send(Turn.LATE, 1, stored(1))
    assert source.held() == [1]


def test_a_clear_that_comes_late_ends_what_was_owed_before_the_rest_of_its_batch() -> None:
    source = Source()
    source.send(Turn.EARLY, 3, removed(1), removed(1, tier=CPU))
    delivery = Delivery(1, Turn.LATE, is_copied=False)
    events = [AllBlocksCleared(), stored(1), stored(1, tier=CPU)]
    source.ingest.apply(EventBatch(0, events, []), delivery)
    assert (source.held(), source.held(CPU)) == ([1], [1])


def test_a_clear_of_another_rank_leaves_what_is_owed() -> None:
    source = Source()
    source.send(Turn.IN_ORDER, 0, stored(9), dp_rank=1)
    source.send(Turn.EARLY, 2, removed(1))
    source.send(Turn.EARLY, 3, AllBlocksCleared(), dp_rank=1)
    source.send(Turn.LATE, 1, stored(1))
    assert source.held() == []


def test_what_another_batch_would_not_change_is_not_left() -> None:
    source = Source()
    source.send(Turn.EARLY, 2, stored(1, 1), stored(1, is_remote=True), removed(1, is_remote=True))
    assert not len(source.left)


@pytest.mark.parametrize("early", [[stored(2, 1)], [removed(1)]], ids=["left", "owed"])
def test_what_is_left_is_bounded(early: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out_of_turn, "MOST_LEFT", 1)
    monkeypatch.setattr(out_of_turn, "MOST_OWED", 1)
    source = Source()
    source.send(Turn.EARLY, 2, *early)
    assert not source.left.has_forgotten
    source.send(Turn.EARLY, 3, stored(3, 2), removed(2))
    assert (len(source.left), source.left.has_forgotten) == (2, True)
    assert [source.left.has_left(batch) for batch in (2, 3)] == [False, True]
    source.send(Turn.LATE, 1, stored(1), stored(2))
    source.send(Turn.AGAIN, 3, stored(3, 2), removed(2))  # the newest is what is known
    assert 2 not in source.held()
    source.ingest.clear()
    assert (len(source.left), source.left.has_forgotten) == (0, False)


def test_a_clear_of_one_rank_of_several_is_not_repaired() -> None:
    source = Source()
    source.send(Turn.IN_ORDER, 0, stored(1), dp_rank=1)
    source.send(Turn.EARLY, 2, AllBlocksCleared())
    assert source.left.has_forgotten
