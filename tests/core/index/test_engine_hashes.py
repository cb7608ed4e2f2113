"""The engine's names of one rank's blocks, against a model that keeps lists."""

from collections import Counter
from collections.abc import Callable, Iterator
from types import FunctionType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lean_selector.core.index.engine_hashes import NOWHERE, EngineHashes, HashesInDict, is_chain
from lean_selector.core.index.hashes_packed import HashesPacked
from lean_selector.core.index.kv_index import engine_hashes
from lean_selector.core.index.runs import POSITION_BITS, POSITION_MASK, STRAND_BLOCKS
from tests.support.driven_selector import pack


@pytest.mark.parametrize(
    ("parent", "hashes", "follow"),
    [
        (None, [11, 12], True),
        (0, [11], True),
        (None, [11, 12, 11], False),
        (12, [11, 12], False),
        (11, [11], False),
    ],
)
def test_hashes_of_consecutive_blocks_differ(
    parent: int | None, hashes: list[int], follow: bool
) -> None:
    assert is_chain(parent, hashes) is follow


# 0 stands in a row as nothing does; the others share bytes and low bits.
NAMES = [0, 1, 2, 3, 33, 65, 256, 1 << 56, 2**64 - 1, *range(100, 110)]
names = st.sampled_from(NAMES)
strands = st.integers(0, 3)


class Names(RuleBasedStateMachine):
    """`held` is what each place was named first; a name stands for the newest of its places."""

    def none_yet(self) -> EngineHashes:
        return HashesInDict()

    @initialize()
    def start(self) -> None:
        self.hashes = self.none_yet()
        self.held: dict[int, int] = {}
        self.addresses: dict[int, list[int]] = {}
        self.second: dict[int, int] = {}  # a further name -> its place, oldest first
        self.copies: Counter[int] = Counter()
        self.ends: dict[int, int] = {}  # strand -> positions that were ever named, less what is cut

    def address_of(self, name: int) -> int:
        if name in self.second:
            return self.second[name]
        return self.addresses[name][-1] if self.addresses.get(name) else NOWHERE

    def name(self, address: int, given: list[int]) -> None:
        self.hashes.add(address, pack(given))
        for at, name in enumerate(given):
            self.forget_second(name)
            self.held[address + at] = name
            self.addresses.setdefault(name, []).append(address + at)

    def forget_second(self, name: int) -> None:
        if self.second.pop(name, None) is not None:
            del self.copies[name]

    def others(self, address: int) -> list[int]:
        return [other for other, at in self.second.items() if at == address]

    def forget(self, address: int) -> None:
        name = self.held.pop(address)
        self.addresses[name].remove(address)
        for gone in (name, *self.others(address)):
            if self.second.get(gone) == address:
                del self.second[gone]
            del self.copies[gone]

    @rule(strand=strands, given=st.lists(names, min_size=1, max_size=9, unique=True))
    def a_strand_grows(self, strand: int, given: list[int]) -> None:
        end = self.ends.get(strand, 0)
        self.name(strand << POSITION_BITS | end, given)
        self.ends[strand] = end + len(given)

    def holes(self) -> Iterator[int]:
        for strand, end in self.ends.items():
            for address in range(strand << POSITION_BITS, strand << POSITION_BITS | end):
                if address not in self.held:
                    yield address

    @precondition(lambda self: any(self.holes()))
    @rule(data=st.data(), given=st.lists(names, min_size=1, max_size=4, unique=True))
    def a_hole_is_filled(self, data: st.DataObject, given: list[int]) -> None:
        address = data.draw(st.sampled_from(list(self.holes())))
        free = set(self.holes())
        fitting = 0
        while fitting < len(given) and address + fitting in free:
            fitting += 1
        self.name(address, given[:fitting])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=names)
    def a_block_gets_a_second_name(self, data: st.DataObject, name: int) -> None:
        address = data.draw(st.sampled_from(sorted(self.held)))
        if self.held[address] == name:
            return  # it has that one
        self.hashes.alias(address, name)
        self.forget_second(name)
        self.second[name] = address

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_block_gets_a_copy(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({*self.held.values(), *self.second})))
        self.hashes.add_copy(name)
        self.copies[name] += 1

    @rule(given=st.lists(names, min_size=1, max_size=6))
    def names_are_removed(self, given: list[int]) -> None:
        gone: dict[int, int] = {}
        for name in given:
            address = self.address_of(name)
            if self.copies[name]:
                self.copies[name] -= 1
            elif name in self.second:
                del self.second[name]
            elif address != NOWHERE and (others := self.others(address)):
                self.addresses[name].remove(address)
                del self.second[others[0]]
                self.held[address] = others[0]
                self.addresses.setdefault(others[0], []).append(address)
            elif address != NOWHERE:
                self.forget(address)
                strand = address >> POSITION_BITS
                gone[strand] = gone.get(strand, 0) | 1 << (address & POSITION_MASK)
        assert self.hashes.take(pack(given)) == gone

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_block_is_dropped(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.held)))
        self.hashes.discard(address)
        self.forget(address)

    @rule(strand=strands)
    def the_end_of_a_row_is_given_back(self, strand: int) -> None:
        if strand in self.ends:
            held = [
                address & POSITION_MASK
                for address in self.held
                if address >> POSITION_BITS == strand
            ]
            end = max(held, default=-1) + 1
            self.hashes.cut_row(strand, end)
            self.ends[strand] = end
            if not end:
                del self.ends[strand]

    @invariant()
    def every_name_leads_to_its_newest_block(self) -> None:
        if hasattr(self, "hashes"):
            found = {name: self.hashes.find(name) for name in NAMES}
            assert found == {name: self.address_of(name) for name in NAMES}

    @invariant()
    def what_is_rare_is_counted(self) -> None:
        if hasattr(self, "hashes"):
            assert +self.copies == Counter(self.hashes.copies)
            assert self.hashes.extra == self.copies.total() + len(self.second)

    @invariant()
    def every_block_tells_its_first_name(self) -> None:
        if hasattr(self, "hashes"):
            for address, name in self.held.items():
                assert self.hashes.hash_at(address) == name.to_bytes(8, "little")

    @invariant()
    def rows_end_where_the_last_name_is(self) -> None:
        if not hasattr(self, "hashes"):
            return
        assert self.hashes.has_zero() is (0 in self.held.values())
        for strand in range(4):
            ends = [
                (address & POSITION_MASK) + 1
                for address, name in self.held.items()
                if address >> POSITION_BITS == strand and name
            ]
            assert self.hashes.hashes_end(strand) == max(ends, default=0)


class PackedNames(Names):
    """The same in a packed table."""

    def none_yet(self) -> EngineHashes:
        return HashesPacked()


class PackedNamesInSmallSegments(Names):
    """And where three names fill a segment of it."""

    def none_yet(self) -> EngineHashes:
        return HashesPacked(4)


TestNames = Names.TestCase
TestPackedNames = PackedNames.TestCase
TestPackedNamesInSmallSegments = PackedNamesInSmallSegments.TestCase
ALL_FORMS = TestNames, TestPackedNames, TestPackedNamesInSmallSegments
for _case in ALL_FORMS:
    _case.settings = settings(max_examples=60, stateful_step_count=30)
del _case  # or it would be collected once more


# Each once, as an engine has them that names a block but once.
ROWS = {
    0: [5, 6, 1 << 56, 0x0101010101010101, *range(300, 430)],
    STRAND_BLOCKS: [37, 69, *range(500, 509)],
    3 * STRAND_BLOCKS: [7],
}
PLACES = {name: first + at for first, row in ROWS.items() for at, name in enumerate(row)}
single_names = st.lists(st.sampled_from([0, 1, *PLACES]), min_size=1, max_size=4)


@st.composite
def stretches(draw: st.DrawFn) -> list[int]:
    """Names of some neighbours, forwards or backwards, or of every other one."""
    given, start = list(PLACES), draw(st.integers(0, len(PLACES) - 1))
    step = draw(st.sampled_from([-2, -1, 1, 2]))
    return given[start::step][: draw(st.integers(1, 70))]


@pytest.mark.parametrize("form", [HashesInDict, HashesPacked])
@settings(max_examples=100)
@given(removals=st.lists(st.one_of(single_names, stretches()), max_size=8))
def test_names_that_stand_once_are_removed_in_any_order(
    form: Callable[[], EngineHashes], removals: list[list[int]]
) -> None:
    hashes = form()
    for first, row in ROWS.items():
        hashes.add(first, pack(row))
    left = dict(PLACES)
    for removed in removals:
        gone: dict[int, int] = {}
        for name in removed:
            if (address := left.pop(name, NOWHERE)) != NOWHERE:
                strand = address >> POSITION_BITS
                gone[strand] = gone.get(strand, 0) | 1 << (address & POSITION_MASK)
        assert hashes.take(pack(removed)) == gone
        assert {name: hashes.find(name) for name in PLACES if name in left} == left
        assert all(hashes.find(name) == NOWHERE for name in PLACES if name not in left)
        assert {address: hashes.hash_at(address) for address in left.values()} == {
            address: pack([name]) for name, address in left.items()
        }
        for first in ROWS:
            strand = first >> POSITION_BITS
            there = [address for address in left.values() if address >> POSITION_BITS == strand]
            assert hashes.hashes_end(strand) == max(there, default=first - 1) + 1 - first


@pytest.mark.parametrize("form", [HashesInDict, HashesPacked])
def test_neighbours_in_different_strands_are_told_apart(form: Callable[[], EngineHashes]) -> None:
    hashes = form()
    first, second = list(range(1, STRAND_BLOCKS + 1)), [5_000, 5_001]
    hashes.add(0, pack(first))
    hashes.add(STRAND_BLOCKS, pack(second))
    assert hashes.take(pack([*first[-2:], *second])) == {0: 3 << STRAND_BLOCKS - 2, 1: 3}


@pytest.mark.parametrize("form", [HashesInDict, HashesPacked])
def test_what_is_dropped_is_taken_apart_in_steps(form: Callable[[], EngineHashes]) -> None:
    hashes = form()
    for strand in range(20):
        first = strand * STRAND_BLOCKS
        hashes.add(first, pack(list(range(first + 1, first + STRAND_BLOCKS + 1))))
    assert sum(1 for _ in hashes.dismantled()) >= 20


def test_each_form_of_the_package_uses_the_one_that_it_is_quick_with() -> None:
    is_plain = isinstance(engine_hashes, FunctionType)
    assert type(engine_hashes()) is (HashesInDict if is_plain else HashesPacked)
