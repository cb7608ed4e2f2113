"""The packed table against a dict, and how it grows."""

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
def test_a_table_keeps_thousands_that_come_and_go(shift: int) -> None:
    table, held, dice = HashTable(16), dict[int, int](), random.Random(3)
    for value in range(12_000):
        name = dice.randrange(1, 3_000) << shift
        if name in held:
            assert table.pop(name) == held.pop(name)
        else:
            held[name] = value
            assert table.add(name, value)
    assert all(table.get(name) == value for name, value in held.items())
    segments = dict.fromkeys(table._segments)
    assert len(segments) > 100
    assert sum(each.used for each in segments) == len(held)


def test_a_hash_is_mixed_as_it_was_when_the_bounds_were_measured() -> None:
    assert [mixed(name) for name in (1, -1, 1 << 40, -(2**63), 0x0123456789ABCDEF)] == [
        *(2177342781968418220, 0, 141246009455532927, 25546008068538869, 1339536233041489459)
    ]


def test_a_table_is_four_fifths_full_at_most() -> None:
    table, size = HashTable(), 16
    for count in range(1, 400):
        table.add(count, 0)
        size *= 1 if 5 * count <= 4 * size else 2
        assert [len(each.hashes) for each in table._segments] == [size]


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
    assert len(table._segments[0].hashes) == 8


def test_a_table_is_given_back_segment_by_segment() -> None:
    table = HashTable(16)
    for name in range(1, 100):
        table.add(name, 1)
    segments, steps = len(table._segments), 1
    while table.let_go():
        steps += 1
    assert steps == segments
    assert not table.let_go()  # nothing is left to give back
