"""The index against a naive model of its rules: a small tree of prompts, and few, clashing hashes.

The model keeps, per rank, the held paths with their names, and the lower tiers as dicts of edges.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from struct import unpack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.index import device_tier, holes, kv_index, sweeping
from lean_selector.core.index.engine_hashes import EngineHashes, HashesInDict, is_chain
from lean_selector.core.index.hashes_packed import HashesPacked
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Matched, StoreResult, Tier
from lean_selector.core.rank_bits import bits_of
from tests.support.blocks import matches, remove_blocks, store_blocks
from tests.support.driven_selector import pack

Path = tuple[int, ...]
# Both forms of a rank's names, whatever form of the package runs; one with segments that fill soon.
NEW_NAMES = st.sampled_from([HashesInDict, HashesPacked, partial(HashesPacked, 4)])
RANKS = [(1, 0), (1, 1), (2, 0), (2**64 - 1, 2**32 - 1)]


class RankModel:
    def __init__(self) -> None:
        self.name_of: dict[Path, int] = {}  # held path -> first name
        self.paths: dict[int, list[Path]] = {}  # name -> held paths, newest last
        self.alias: dict[int, Path] = {}  # further names, oldest first
        self.copies: dict[int, int] = {}  # names that must be removed more often, oldest first
        self.lower: list[dict[tuple[int | None, int], int]] = [{}, {}, {}]
        self.lower_copies: list[Counter[int]] = [Counter(), Counter(), Counter()]

    def find(self, name: int) -> Path | None:
        if name in self.alias:
            return self.alias[name]
        paths = self.paths.get(name)
        return paths[-1] if paths else None

    def store(
        self, parent: int | None, names: list[int], local: Path, counted: bool = False
    ) -> StoreResult:
        path: Path | None = ()
        if parent is not None:
            path = self.find(parent)
            if path is None:
                return StoreResult.UNKNOWN_PARENT
        assert path is not None
        for name, block in zip(names, local, strict=False):
            path = (*path, block)
            if path not in self.name_of:
                self.drop_alias(name)
                self.name_of[path] = name
                self.paths.setdefault(name, []).append(path)
            elif self.name_of[path] != name and self.alias.get(name) != path:
                self.drop_alias(name)
                self.alias[name] = path
            elif counted:
                self.copies[name] = self.copies.get(name, 0) + 1
        return StoreResult.STORED

    def drop_alias(self, name: int) -> None:
        if self.alias.pop(name, None) is not None:
            self.copies.pop(name, None)

    def others(self, path: Path) -> list[int]:
        return [name for name, at in self.alias.items() if at == path]

    def remove(self, name: int) -> int:
        path = self.find(name)
        if name in self.copies:
            self.copies[name] -= 1
            if not self.copies[name]:
                del self.copies[name]
            return 0
        if path is None:
            return 0
        if name in self.alias:
            del self.alias[name]
            return 0
        self.paths[self.name_of.pop(path)].remove(path)
        if others := self.others(path):
            del self.alias[others[0]]
            self.name_of[path] = others[0]
            self.paths.setdefault(others[0], []).append(path)
            return 0
        return 1

    def store_lower(
        self, tier: int, parent: int | None, names: list[int], local: Path, counted: bool = False
    ) -> None:
        edges = self.lower[tier]
        for name, block in zip(names, local, strict=False):
            edge = (parent, block)
            if edges.get(edge) == name:
                self.lower_copies[tier][name] += counted
            elif edges.get(edge, name) != name:
                return
            if edge not in edges and name in edges.values():
                return
            edges[edge] = name
            parent = name

    def remove_lower(self, tier: int, name: int) -> int:
        if self.lower_copies[tier][name]:
            self.lower_copies[tier][name] -= 1
            return 0
        for edge, child in self.lower[tier].items():
            if child == name:
                del self.lower[tier][edge]
                return 1
        return 0

    def match(self, prompt: Path) -> Matched | None:
        device = 0
        while device < len(prompt) and prompt[: device + 1] in self.name_of:
            device += 1
        name = self.name_of[prompt[:device]] if device else None
        ends, at = [], device
        for edges in self.lower:
            while at < len(prompt) and (name, prompt[at]) in edges:
                name = edges[name, prompt[at]]
                at += 1
            ends.append(at)
        return Matched(device, ends[0] - device, at - ends[0]) if at else None

    def blocks(self) -> int:
        return len(self.name_of) + sum(map(len, self.lower))

    def forget_all_but(self, held: set[Path]) -> None:
        """A bound took the others; which ones it takes first is not the model's concern."""
        for path in [path for path in self.name_of if path not in held]:
            for name in self.others(path):
                self.drop_alias(name)
            name = self.name_of.pop(path)
            self.paths[name].remove(path)
            self.copies.pop(name, None)

    def bound_names(self, bound: int) -> None:
        """An engine has no room for more blocks, whatever they are called."""
        surplus = len(self.name_of) + len(self.alias) + sum(self.copies.values()) - bound
        for name in list(self.copies):
            if surplus > 0:
                surplus -= self.copies.pop(name)
        for name in list(self.alias)[: max(0, surplus)]:
            self.drop_alias(name)

    def bound_lower(self, tier: int, bound: int) -> None:
        edges = self.lower[tier]
        for edge in list(edges)[: max(0, len(edges) - bound)]:
            self.lower_copies[tier].pop(edges.pop(edge), None)

    def has_clash(self) -> bool:
        return any(len(paths) > 1 for paths in self.paths.values()) or bool(self.alias)


RANK = st.sampled_from(RANKS[:2] * 3 + RANKS)  # mostly two, so that they share runs
TIER = st.sampled_from([Tier.DEVICE] * 4 + [Tier.HOST_PINNED, Tier.DISK, Tier.EXTERNAL])
# Names differ by rank and by tokens, as real ones do, or are drawn from a few that clash.
NAME = st.integers(0, 12)
NAMES = st.lists(NAME, max_size=5, unique=True)
LOCAL = st.lists(st.integers(1, 2), min_size=0, max_size=7).map(tuple)
# Prompts of 8 blocks that share beginnings; an event is about the blocks from `start` to `end`.
PROMPT = st.integers(0, 255).map(lambda bits: tuple(1 + (bits >> at & 1) for at in range(8)))
START = st.sampled_from([0, 0, 0, 1, 2, 4, 6])
END = st.sampled_from([1, 2, 3, 5, 7, 8, 8])
SEED = st.sampled_from([0, 0, 0, 0, 1])
COUNTED = st.booleans()
CHAIN = st.tuples(st.just("chain"), RANK, TIER, PROMPT, START, END, SEED, COUNTED)
EVICT = st.tuples(st.just("evict"), RANK, TIER, PROMPT, START, END, SEED)
OPERATION = st.one_of(
    *[CHAIN] * 3,
    *[EVICT] * 2,
    st.tuples(st.just("store"), RANK, TIER, st.none() | NAME, NAMES, LOCAL, COUNTED),
    st.tuples(st.just("remove"), RANK, TIER, st.lists(NAME, max_size=3)),
    *[st.tuples(st.just("clear"), RANK)] * 2,
    st.tuples(st.just("drop"), st.sampled_from([1, 2])),
    st.tuples(st.just("sweep"), st.integers(1, 5)),
    st.tuples(st.just("bound"), st.sampled_from([1, 2]), st.sampled_from([None, 0, 1, 4, 12])),
)


def chained_name(path: Path, seed: int) -> int | None:
    """A name that depends on the whole path, as engines make them; `seed` is the engine's own."""
    if not path:
        return None
    name = seed + 1
    for block in path:
        name = (name * 0x9E3779B97F4A7C15 + block) % 2**64
    return name


def held_paths(index: KvIndex, key: tuple[int, int]) -> set[Path]:
    """What a rank holds on the device, in reach or not, as the trie has it."""
    rank = index._ranks.get(key)
    paths: set[Path] = set()
    if rank is None:
        return paths
    for strand in rank.device.hashes.rows:
        for run in index._device.trie.pieces(strand):
            label, above = bytes(run.label), run.parent
            while above is not None:
                label, above = bytes(above.label) + label, above.parent
            whole = unpack(f"<{len(label) >> 3}Q", label)
            start = len(whole) - (len(run.label) >> 3)
            held = run.held_by(rank.device.bit)
            paths |= {whole[: start + at + 1] for at in range(len(whole)) if held >> at & 1}
    assert len(paths) == rank.device.blocks
    return paths


def check_matches(
    index: KvIndex, models: dict[tuple[int, int], RankModel], prompts: set[Path]
) -> None:
    for prompt in prompts:
        expected = {key: hit for key, model in models.items() if (hit := model.match(prompt))}
        assert matches(index, pack(prompt)) == expected, prompt
        sets, extended = index.match_sets(pack(prompt))
        keys = index.bits.keys
        going_on = [(keys[bit], hit) for hit, mask in extended for bit in bits_of(mask)]
        beyond = {key: hit for key, hit in expected.items() if hit.host or hit.disk}
        assert len(going_on) == len(beyond)
        assert dict(going_on) == beyond
        assert all(mask for _, mask in extended)
        assert len({hit for hit, _ in extended}) == len(extended)
        alike = {key: hit.device for key, hit in expected.items() if key not in beyond}
        assert all(mask for _, mask in sets)
        pairs = [(keys[bit], blocks) for blocks, mask in sets for bit in bits_of(mask)]
        assert len(pairs) == len(alike)
        assert dict(pairs) == alike


def check(index: KvIndex, models: dict[tuple[int, int], RankModel], prompts: set[Path]) -> None:
    check_matches(index, models, prompts)
    assert index.total_blocks == sum(model.blocks() for model in models.values())
    assert index.ranks() == sorted(key for key, model in models.items() if model.blocks())
    for key, model in models.items():
        assert index.blocks(*key, Tier.DEVICE) == len(model.name_of)
        assert held_paths(index, key) == set(model.name_of)


def is_pristine(index: KvIndex) -> bool:
    trie, lower = index._device.trie, index._lower_matches
    if any(lower._continuations._ranks) or lower._continuations._again:
        return False
    if any(any(held._edges) or held._odd or held._held or held.doubtful for held in lower._tiers):
        return False
    if lower._bits or lower._dismantled or len(index._device._odd):
        return False
    if index._device.ranks._swept or index._device.ranks.reborn or index._sweeps:
        return False
    return not (
        index._ranks
        or index._lower
        or index._device.ranks.in_use
        or trie.strands
        or trie.root.children
    ) and not any(index._device.ranks._by_bit)


# After so many operations all is compared, which is most of the work; and at the end.
PACE = st.sampled_from([2, 5, 99])


@settings(max_examples=250)
@given(
    st.lists(OPERATION, min_size=15, max_size=60),
    PACE,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    NEW_NAMES,
)
def test_the_index_does_what_the_model_does(
    operations: list[tuple[Any, ...]],
    pace: int,
    tight: bool,
    swept_later: bool,
    reviewed: bool,
    new_hashes: Callable[[], EngineHashes],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if tight:  # strands and dead ends so short that a few blocks fill them
            patch.setattr(device_tier, "STRAND_BLOCKS", 3)
            patch.setattr(device_tier, "_TRIM_BLOCKS", 1)
            patch.setattr(device_tier, "_MAX_OTHERS_TO_GROW", 1)
        if swept_later:  # what is dropped is taken apart only when somebody asks for it
            patch.setattr(sweeping, "_STEPS_AT_ONCE", 0)
            patch.setattr(kv_index, "_STEPS_PER_EVENT", 0)
        if reviewed:  # what lies behind holes is evicted, though not while an event is applied
            patch.setattr(kv_index, "_STEPS_PER_EVENT", 0)
            let_reviews_be_frequent(patch)
        run_against_model(operations, pace, new_hashes)


def let_reviews_be_frequent(patch: pytest.MonkeyPatch) -> None:
    for name, number in {"REVIEW_AFTER": 2, "SPARED_POSITIONS": 0}.items():
        patch.setattr(holes, name, number)
    for name in ("MOST_POSITIONS", "_BLOCKS_PER_STEP", "_RANKS_PER_STEP"):
        patch.setattr(holes, name, 2)


# Few prompts that part in the middle, so that what one rank lets go of others hold; a rank that
# clears its cache is back at once with another prompt, and little is swept in between.
FEW = st.sampled_from([(1,) * 8, (1,) * 4 + (2,) * 4, (2,) * 8])
SHARER = st.sampled_from(RANKS[:3])
ON_DEVICE, NONE = st.just(Tier.DEVICE), st.just(0)
OFTEN_WHOLE, FROM, TO = (st.sampled_from(each) for each in ([4, 8, 8], [1, 2, 4, 6], [7, 8, 8]))
STORED = st.tuples(st.just("chain"), SHARER, ON_DEVICE, FEW, NONE, OFTEN_WHOLE, SEED, COUNTED)
LET_GO = st.tuples(st.just("evict"), SHARER, ON_DEVICE, FEW, FROM, TO, NONE)
RETURN = st.tuples(st.just("return"), SHARER, FEW, END)
SWEEP = st.tuples(st.just("sweep"), st.just(1))
BACK_AGAIN = st.one_of(*[STORED] * 3, *[LET_GO] * 3, *[RETURN] * 2, SWEEP)


@settings(max_examples=200)
@given(st.lists(BACK_AGAIN, min_size=10, max_size=40), PACE, st.booleans(), NEW_NAMES)
def test_what_a_rank_held_before_it_came_back_is_not_taken_for_what_it_holds(
    operations: list[tuple[Any, ...]],
    pace: int,
    reviewed: bool,
    new_hashes: Callable[[], EngineHashes],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_tier, "_TRIM_BLOCKS", 1)
        patch.setattr(sweeping, "_STEPS_AT_ONCE", 0)
        patch.setattr(kv_index, "_STEPS_PER_EVENT", 0)
        if reviewed:
            let_reviews_be_frequent(patch)
        run_against_model(operations, pace, new_hashes)


def run_against_model(
    operations: list[tuple[Any, ...]], pace: int, new_hashes: Callable[[], EngineHashes]
) -> None:
    index = KvIndex(16, new_hashes=new_hashes)
    models = {key: RankModel() for key in RANKS}
    bounds: dict[int, int] = {}
    prompts: set[Path] = {()}
    for number, (kind, *arguments) in enumerate(apart(operations), 1):
        if kind in ("chain", "evict"):
            key, tier, path, start, end, seed, *counted = arguments
            prompts.update({path, (*path[:end], 1), (*path[:end], 2)})
            names = [chained_name(path[: at + 1], seed) for at in range(start, max(start, end))]
            arguments = [key, tier, names]
            if kind == "chain":
                arguments = [
                    key,
                    tier,
                    chained_name(path[:start], seed),
                    names,
                    path[start:end],
                    *counted,
                ]
            kind = "store" if kind == "chain" else "remove"
        if kind == "store":
            key, tier, parent, names, local, counted = arguments
            prompts.add(local)
            blocks = min(len(names), len(local))
            names, local = names[:blocks], local[:blocks]
            if not names or not is_chain(parent, names):
                continue  # which no decoder lets through
            got = store_blocks(index, key, tier, parent, names, pack(local), counted)
            if tier == Tier.DEVICE:
                before = models[key].find(parent) if parent is not None else ()
                if before is not None:
                    prompts.add((*before, *local))
                assert got is models[key].store(parent, names, local, counted)
                bound = bounds.get(key[0])
                if got is StoreResult.STORED and bound is not None:
                    models[key].bound_names(bound)
            else:
                assert got is StoreResult.STORED
                models[key].store_lower(tier - 1, parent, names, local, counted)
            keep_bound(index, key, models[key], bounds.get(key[0]))
        elif kind == "remove":
            key, tier, names = arguments
            model = models[key]
            if tier == Tier.DEVICE:
                expected = sum([model.remove(name) for name in names])
            else:
                expected = sum([model.remove_lower(tier - 1, name) for name in names])
            assert remove_blocks(index, key, tier, names) == expected
        elif kind == "sweep":
            index.sweep(arguments[0])
        elif kind == "clear":
            assert index.clear(*arguments[0]) == models[arguments[0]].blocks()
            models[arguments[0]] = RankModel()
        elif kind == "bound":
            worker_id, bound = arguments
            index.set_bound(worker_id, bound, bound)
            while index.sweep(10):  # whatever comes later, the bound is kept by then
                pass
            bounds[worker_id] = bound
            for key in RANKS:
                if key[0] == worker_id:
                    keep_bound(index, key, models[key], bound)
        else:
            bounds.pop(arguments[0], None)
            mine = [key for key in RANKS if key[0] == arguments[0]]
            assert index.drop_worker(arguments[0]) == sum(models[key].blocks() for key in mine)
            models.update({key: RankModel() for key in mine})
        forget_what_lay_behind_holes(index, models)
        if not number % pace:
            check(index, models, prompts)
    check(index, models, prompts)
    while index.sweep(100):  # and what is taken apart now is not what is held
        pass
    forget_what_lay_behind_holes(index, models)
    check(index, models, prompts)
    check_dump(index, models, prompts)
    for (worker_id, dp_rank), model in models.items():
        while model.name_of:
            name = next(reversed(model.name_of.values()))
            assert remove_blocks(index, (worker_id, dp_rank), Tier.DEVICE, [name]) == model.remove(
                name
            )
            forget_what_lay_behind_holes(index, models)
        for tier, edges in enumerate(model.lower, 1):
            copies = model.lower_copies[tier - 1].elements()
            remove_blocks(index, (worker_id, dp_rank), Tier(tier), [*edges.values(), *copies])
    while index.sweep(100):
        pass
    assert is_pristine(index)


def apart(operations: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """The same with each return of a rank as two operations."""
    for operation in operations:
        if operation[0] == "return":
            _, key, prompt, end = operation
            yield "clear", key
            yield "chain", key, Tier.DEVICE, prompt, 0, end, 0, False
        else:
            yield operation


def keep_bound(index: KvIndex, key: tuple[int, int], model: RankModel, bound: int | None) -> None:
    """The model after an event or a new bound; the index has kept to it already."""
    if bound is None:
        return
    if len(model.name_of) > bound:
        held = held_paths(index, key)
        assert len(held) == bound or (len(held) < bound and holes.REVIEW_AFTER == 2)
        assert held <= set(model.name_of)
        model.forget_all_but(held)
    for tier in range(3):
        model.bound_lower(tier, bound)


def forget_what_lay_behind_holes(index: KvIndex, models: dict[tuple[int, int], RankModel]) -> None:
    """The models after a review; which blocks it takes, of those out of reach, is its own."""
    for key, model in models.items() if holes.REVIEW_AFTER == 2 else ():
        held = held_paths(index, key)
        for path in set(model.name_of) - held:
            assert any(path[:at] not in model.name_of for at in range(1, len(path)))
        model.forget_all_but(held)


def check_dump(
    index: KvIndex, models: dict[tuple[int, int], RankModel], prompts: set[Path]
) -> None:
    """A dump applied elsewhere matches alike, for ranks whose hashes name one block each."""
    other = KvIndex(16)
    keys = {key for key, model in models.items() if not model.has_clash()}
    for runs in index.dump():
        for run in runs:
            where = (run.worker_id, run.dp_rank), run.tier, run.parent_hash
            result = store_blocks(other, *where, run.block_hashes, pack(run.tokens_hashes))
            assert (run.worker_id, run.dp_rank) not in keys or result is StoreResult.STORED
    for prompt in prompts:
        ours, theirs = matches(index, pack(prompt)), matches(other, pack(prompt))
        assert {key: ours.get(key) for key in keys} == {key: theirs.get(key) for key in keys}
