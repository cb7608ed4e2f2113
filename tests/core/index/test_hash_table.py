"""The packed table against a dict, and what it gives back."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.index.hashes_packed import ABSENT, HashTable, mixed

# Signed, and some that differ only at one end.
NAMES = [*range(1, 12), -1, -(2**63), 2**63 - 1, *(at << 56 for at in range(1, 12))]
U32 = st.integers(0, 2**32 - 1)
STEPS = st.lists(st.tuples(st.sampled_from(NAMES), st.none() | U32), max_size=120)


@settings(max_examples=200)
@given(STEPS, st.sampled_from([4, 16, 1024]))
def test_a_table_keeps_what_a_dict_keeps(
    steps: list[tuple[int, int | None]], most_slots: int
) -> None:
    table, held = HashTable(most_slots), dict[int, int]()
    for name, value in steps:
        if value is None:
            assert table.pop(name) == held.pop(name, ABSENT)
        else:
            assert table.add(name, value) is (name not in held)
            held.setdefault(name, value)
        assert [table.get(name) for name in NAMES] == [held.get(name, ABSENT) for name in NAMES]


@pytest.mark.parametrize("shift", [0, 40])
def test_a_table_that_grew_and_was_emptied_has_one_small_segment_again(shift: int) -> None:
    table = HashTable(16)
    names = [name << shift for name in range(1, 3_000)]
    for name in names:
        assert table.add(name, name >> shift)
    assert len(set(map(id, table._segments))) > 200
    random.Random(3).shuffle(names)
    for name in names:
        assert table.pop(name) == name >> shift
    assert len(set(map(id, table._segments))) == 1


def test_a_hash_is_mixed_as_it_was_when_the_bounds_were_measured() -> None:
    assert [mixed(name) for name in (1, -1, 1 << 40, -(2**63), 0x0123456789ABCDEF)] == [
        *(2177342781968418220, 0, 141246009455532927, 25546008068538869, 1339536233041489459)
    ]


def test_a_table_is_four_fifths_full_at_most_and_an_eighth_at_least() -> None:
    table, size = HashTable(), 16
    for count in range(1, 400):
        table.add(count, 0)
        size *= 1 if 5 * count <= 4 * size else 2
        assert [len(each.names) for each in table._segments] == [size]
    for count in range(398, -1, -1):
        table.pop(count + 1)
        size //= 2 if 8 * count < size and size > 16 else 1
        assert [(len(each.names), each.bits) for each in table._segments] == [(size, 0)]


class Classes:
    """A table of segments of 16 slots, and names by the lowest two bits of their mixed hashes."""

    def __init__(self) -> None:
        self.table = HashTable(16)
        self.held: list[list[int]] = [[], [], [], []]
        for name in range(1, 200):
            held = self.held[mixed(name) & 3]
            if len(held) < 7:
                held.append(name)
                self.table.add(name, 0)

    def keep(self, at: int, count: int) -> None:
        while len(self.held[at]) > count:
            self.table.pop(self.held[at].pop())

    @property
    def bits(self) -> list[int]:
        """Of each segment once, from the first on."""
        return [each.bits for each in dict.fromkeys(self.table._segments)]


@pytest.mark.parametrize(("left", "bits"), [(5, [2, 2, 2, 2]), (4, [1, 2, 2])])
def test_an_almost_empty_segment_is_joined_with_a_half_that_leaves_it_room(
    left: int, bits: list[int]
) -> None:
    classes = Classes()
    assert classes.bits == [2, 2, 2, 2]
    classes.keep(2, left)
    classes.keep(0, 2)
    assert classes.bits == [2, 2, 2, 2]
    classes.keep(0, 1)
    assert classes.bits == bits


def test_what_was_joined_is_joined_again_once_it_is_almost_empty_itself() -> None:
    classes = Classes()
    classes.keep(3, 2)
    classes.keep(1, 1)
    classes.keep(2, 1)
    assert classes.bits == [2, 1, 2]
    classes.keep(0, 1)
    assert classes.bits == [1, 1]  # two in the first, and three in the second
    classes.keep(0, 0)
    assert classes.bits == [0]


def test_names_that_agree_in_what_chooses_a_segment_have_a_larger_one() -> None:
    alike = list[int]()
    name = 0
    while len(alike) < 4:
        name += 1
        if not mixed(name) & (1 << 16) - 1:
            alike.append(name)
    table = HashTable(4)
    for name in alike:
        assert table.add(name, 7)
    assert [table.get(name) for name in alike] == [7] * 4
    assert table._segments[0].bits == 16
    assert len(table._segments[0].names) == 8


def test_a_table_is_given_back_segment_by_segment() -> None:
    table = HashTable(16)
    for name in range(1, 100):
        table.add(name, 1)
    segments, steps = len(table._segments), 1
    while table.let_go():
        steps += 1
    assert steps == segments
    assert not table.let_go()  # nothing is left to give back
