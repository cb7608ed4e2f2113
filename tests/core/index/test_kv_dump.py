"""A dump in slices, and events between them."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lean_selector.core.index import kv_dump
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import StoredRun, StoreResult, Tier, Watermark
from tests.support.blocks import matches, remove_blocks, store_blocks
from tests.support.driven_selector import pack

RANKS = [(1, 0), (1, 1), (2, 0)]


@pytest.fixture(autouse=True)
def _one_run_per_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_dump, "_SLICE_BLOCKS", 1)


def name_of(path: tuple[int, ...]) -> int:
    """An engine hash that stands for one path only."""
    name = 1
    for token in path:
        name = name * 4 + token + 1
    return name


Event = tuple[str, tuple[int, int], Tier, tuple[int, ...], int]
Told = Callable[[KvIndex], None]
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
EVENTS = st.tuples(
    st.sampled_from(["store", "store", "store", "remove", "clear"]),
    st.sampled_from(RANKS),
    st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DISK]),
    PATHS,
    st.integers(0, 6),  # how many of the path's blocks are there already
)
STORES = EVENTS.map(lambda event: ("store", *event[1:]))


def tell(index: KvIndex, event: Event) -> StoreResult | None:
    kind, rank, tier, path, known = event
    if kind == "clear":
        index.clear(*rank)
    elif kind == "remove":
        remove_blocks(index, rank, tier, [name_of(path)])
    else:
        known = min(known, len(path) - 1)
        names = [name_of(path[: at + 1]) for at in range(known, len(path))]
        parent = name_of(path[:known]) if known else None
        return store_blocks(index, rank, tier, parent, names, pack(path[known:]))
    return None


def copy_of(runs: list[list[StoredRun]]) -> KvIndex:
    index = KvIndex(16)
    for run in (run for some in runs for run in some):
        where = (run.worker_id, run.dp_rank), run.tier, run.parent_hash
        store_blocks(index, *where, run.block_hashes, pack(run.tokens_hashes))
    return index


def held(index: KvIndex, path: tuple[int, ...]) -> dict[tuple[int, int], tuple[int, int]]:
    """Leading blocks of a prompt by rank: on the device, and with the lower tiers."""
    return {
        rank: (found.device, found.device + found.host + found.disk)
        for rank, found in matches(index, pack(path)).items()
    }


def dump_with_events(
    before: list[Event], after: list[Event], pauses: list[int]
) -> tuple[KvIndex, KvIndex]:
    """An index that changes while it is dumped, and a copy that then hears of the changes too.

    No engine stores a block before its parent, so events that the index had to refuse are left out.
    """
    index = KvIndex(16)
    for event in before:
        tell(index, event)
    slices = []
    to_come, came = list(after), []
    for at, runs in enumerate(index.dump()):
        slices.append(runs)
        for _ in range(pauses[at % len(pauses)]):
            if to_come:
                came.append(to_come.pop(0))
                if tell(index, came[-1]) is StoreResult.UNKNOWN_PARENT:
                    came.pop()
    copy = copy_of(slices)
    for event in came:
        tell(copy, event)
    return index, copy


PAUSES = st.lists(st.integers(0, 3), min_size=1, max_size=5)
MANY = st.lists(EVENTS, max_size=25)


@given(st.lists(STORES, max_size=25), st.lists(STORES, max_size=15), PAUSES, st.lists(PATHS))
@settings(max_examples=100)
def test_stores_between_slices_are_never_lost(
    before: list[Event], after: list[Event], pauses: list[int], prompts: list[tuple[int, ...]]
) -> None:
    index, copy = dump_with_events(before, after, pauses)
    for path in [*prompts, *(event[3] for event in before + after)]:
        assert held(copy, path) == held(index, path)


@given(MANY, MANY, PAUSES, st.lists(PATHS))
@example(  # a run that was told is removed, then one below it is told
    [
        *(("store", (1, 0), Tier.DEVICE, (0,), 0), ("store", (1, 0), Tier.DEVICE, (1, 1), 0)),
        *(("store", (1, 1), Tier.DEVICE, (1, 0), 0), ("remove", (1, 0), Tier.DEVICE, (1,), 0)),
        ("store", (2, 0), Tier.DEVICE, (1, 0), 0),
    ],
    [("store", (1, 0), Tier.DEVICE, (0,), 0)] * 6 + [("remove", (2, 0), Tier.DEVICE, (1,), 0)],
    [0, 3],
    [],
)
@settings(max_examples=200)
def test_a_copy_never_claims_what_is_gone(
    before: list[Event], after: list[Event], pauses: list[int], prompts: list[tuple[int, ...]]
) -> None:
    """It may know less: a dump leaves out what nothing leads to at the time."""
    index, copy = dump_with_events(before, after, pauses)
    for path in [*prompts, *(event[3] for event in before + after)]:
        truth = held(index, path)
        for rank, (device, _) in held(copy, path).items():
            assert device <= truth.get(rank, (0, 0))[0]


@pytest.mark.parametrize(("again", "told"), [(2, [(0, 0), (0, 0, 0)]), (1, [(0,)])])
def test_parents_come_before_children_that_were_stored_first(
    again: int, told: list[tuple[int, ...]]
) -> None:
    """As many blocks above the child come back as `again` says; 2 lead to it."""
    index = KvIndex(16)
    tell(index, ("store", RANKS[0], Tier.DEVICE, (0, 0, 1), 0))
    tell(index, ("store", RANKS[0], Tier.DEVICE, (0, 0, 0), 2))
    for blocks in (3, 2, 1):
        tell(index, ("remove", RANKS[0], Tier.DEVICE, (0, 0, 1)[:blocks], 0))
    tell(index, ("store", RANKS[0], Tier.DEVICE, (0, 0)[:again], 0))
    last = [run.block_hashes[-1] for runs in index.dump() for run in runs]
    assert last == [name_of(path) for path in told]


def test_a_rank_goes_on_only_if_the_dump_shows_all_that_it_holds() -> None:
    """Not with one hash for two blocks, or with blocks behind a missing one."""
    index, mark = KvIndex(16), Watermark(5, 5)

    def goes_on() -> bool:
        marks = {RANKS[0]: mark}
        assert list(index.dump(watermarks=marks, watermark=lambda key: mark))
        return bool(marks)

    store_blocks(index, RANKS[0], Tier.DEVICE, None, [1, 2, 3], pack([1, 2, 3]))
    assert goes_on()
    store_blocks(index, RANKS[0], Tier.DEVICE, None, [3], pack([4]))
    assert not goes_on()
    remove_blocks(index, RANKS[0], Tier.DEVICE, [3])
    assert goes_on()
    remove_blocks(index, RANKS[0], Tier.DEVICE, [2])
    assert not goes_on()
    remove_blocks(index, RANKS[0], Tier.DEVICE, [3])
    assert goes_on()


ONE, TWO = (0, 0), (0, 1)  # prompts that part after their first block, so it is a run of its own
CPU = Tier.HOST_PINNED


def told(kind: str, path: tuple[int, ...], tier: Tier = Tier.DEVICE, copies: int = 0) -> Told:
    """A change by an event: a block is stored once and `copies` times more, or removed."""

    def change(index: KvIndex) -> None:
        if kind == "clear":
            index.clear(*RANKS[0])
        elif kind == "remove":
            remove_blocks(index, RANKS[0], tier, [name_of(path)])
        for _ in range(1 + copies if kind == "store" else 0):
            parent = name_of(path[:-1]) if len(path) > 1 else None
            store_blocks(
                index, RANKS[0], tier, parent, [name_of(path)], pack(path[-1:]), counted=True
            )

    return change


@pytest.mark.parametrize(
    ("before", "meanwhile", "goes_on"),
    [
        ([], [], True),
        ([], [told("store", (1,))], True),
        ([], [told("remove", TWO)], True),
        ([], [told("store", (1,), CPU)], True),
        ([], [told("store", TWO)], False),  # a copy
        ([told("store", TWO)], [told("remove", TWO)], False),
        ([told("store", TWO, CPU)], [told("store", TWO, CPU)], False),
        ([told("store", TWO, CPU, 1)], [told("remove", TWO, CPU)], False),
        ([], [told("remove", (0,))], False),  # what it led to is out of reach now
        ([], [told("clear", ()), told("store", (0,))], False),
    ],
)
def test_a_rank_that_changes_meanwhile_goes_on_if_no_copy_came_or_went(
    before: list[Told], meanwhile: list[Told], goes_on: bool
) -> None:
    """Its events since the dump began may be in the dump or not, and are applied to it again."""
    index, seq = KvIndex(16), 5
    for change in (told("store", (0,)), told("store", ONE), told("store", TWO), *before):
        change(index)
    marks = {RANKS[0]: Watermark(seq, seq), RANKS[1]: Watermark(3, 3)}
    dump = index.dump(watermarks=marks, watermark=lambda key: Watermark(seq, seq, 2))
    assert next(dump)
    for change in meanwhile:
        change(index)
        seq += 1
    assert list(dump)
    expected = {RANKS[0]: Watermark(5, seq, 2)} if goes_on else {}
    assert marks == expected | {RANKS[1]: Watermark(3, 3)}  # which has no blocks


def test_what_was_learned_of_blocks_is_beside_them() -> None:
    index = KvIndex(16)
    for change in (told("store", (0,)), told("store", ONE, copies=2), told("store", TWO)):
        change(index)
    told("store", ONE, CPU, 2)(index)
    store_blocks(index, RANKS[0], Tier.DEVICE, name_of((0,)), [77], pack([1]))
    index.learn(RANKS[0]).salts = {CPU: OrderedDict(), Tier.DEVICE: OrderedDict({77: "s"})}
    store_blocks(index, RANKS[0], Tier.DEVICE, None, [77, 78], pack([5, 6]))
    runs = [run for runs in index.dump() for run in runs]
    one = name_of(ONE)
    assert [(run.block_hashes[0], run.salts, run.again) for run in runs] == [
        *((name_of((0,)), None, None), (one, None, ((one, one),)), (name_of(TWO), None, None)),
        *((77, ("s", None), None), (one, None, ((one, one),))),
    ]
    store_blocks(index, RANKS[0], Tier.DEVICE, name_of((0,)), [79], pack([1]), counted=True)
    (two,) = [run for runs in index.dump() for run in runs if run.block_hashes == (name_of(TWO),)]
    assert two.again == ((79,),)
    facts = index.learn(RANKS[0])
    index.clear(*RANKS[0])
    assert not any(facts.salts.values())
    assert index.learned(RANKS[0]) is None


def test_a_slice_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_dump, "_SLICE_BLOCKS", 100)
    index = KvIndex(16)
    for at in range(2000):
        store_blocks(index, (1, 0), Tier.DISK, None, [at + 1], pack((at,)))
        store_blocks(index, (1, 0), Tier.DEVICE, None, [at + 1], pack((at,)))
    slices = list(index.dump())
    assert max(map(len, slices)) == 100
    assert sum(map(len, slices)) == 4000


def test_a_rank_that_takes_the_place_of_one_that_is_gone_is_not_told_as_that() -> None:
    index = KvIndex(16)
    for token in range(3):
        tell(index, ("store", RANKS[0], Tier.DEVICE, (token,), 0))
    dump = index.dump()
    assert next(dump)
    index.clear(*RANKS[0])
    for token in range(3):
        tell(index, ("store", RANKS[1], Tier.DEVICE, (token,), 0))
    assert [run for runs in dump for run in runs] == []


def test_a_rank_that_goes_while_its_disk_is_told_is_told_no_further() -> None:
    """What it held is much: it is hidden at once, and still being given back."""
    index = KvIndex(16)
    for at in range(2_000):
        store_blocks(index, (1, 0), Tier.DISK, None, [at + 1], pack((at,)))
    dump = index.dump()
    assert len(next(dump)) == 1
    index.clear(1, 0)
    assert index.sweep(0), "there is more to give back"
    assert [run for runs in dump for run in runs] == []
