"""What was routed is believed cached: for its time, as far as its rank can hold it, and no longer.

Against a model that knows of each block only when it was booked last, and by which prompt.
"""

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lean_selector.core.hashing import sequence_hashes_bytes
from lean_selector.core.index import sweeping
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.routed import _RANKS_PER_STEP, RoutedPrompts
from lean_selector.core.index.shapes import Tier
from lean_selector.core.load.shapes import ActiveRun
from lean_selector.core.rank_bits import RankKey
from tests.support.blocks import matches, store_blocks
from tests.support.driven_selector import pack

A, B = (1, 0), (1, 1)
TTL_S = 10.0


def routed(until_events: bool = False) -> RoutedPrompts:
    return RoutedPrompts(KvIndex(16), TTL_S, until_events=until_events)


def add(prompts: RoutedPrompts, key: RankKey, path: list[int], now: float) -> None:
    local = pack(path)
    prompts.add(key, local, sequence_hashes_bytes(local), now)


def forget(prompts: RoutedPrompts, now: float) -> None:
    """All steps of it."""
    prompts.expire(now)
    while prompts.index.sweep(100):
        pass


def believed(prompts: RoutedPrompts, path: list[int]) -> dict[RankKey, int]:
    return {key: match.device for key, match in matches(prompts.index, pack(path)).items()}


def test_the_same_prompt_again_is_remembered_once() -> None:
    prompts = routed()
    for turn in range(1_000):
        add(prompts, A, [1, 2, 3], turn / 1_000)
    assert len(prompts._ranks[A].recent) == 1
    forget(prompts, 10.5)
    assert believed(prompts, [1, 2, 3]) == {A: 3}
    forget(prompts, 11.0)
    assert prompts.index.is_empty


def test_a_prompt_is_believed_again_where_the_index_holds_less_than_the_worker() -> None:
    prompts = RoutedPrompts(KvIndex(16, device_bound=4), TTL_S)
    prompts.set_bound(1, 100)
    add(prompts, A, [1, 2, 3], 0.0)
    add(prompts, A, [7, 8, 9], 1.0)
    add(prompts, A, [1, 2, 3], 2.0)
    assert believed(prompts, [1, 2, 3]) == {A: 3}
    assert prompts.index.evicted == 0


def test_a_booking_goes_where_the_index_holds_less_of_that_worker_alone() -> None:
    prompts = routed()
    prompts.index.set_bound(1, 4, None)
    for key in (B, (2, 1)):
        add(prompts, key, [1, 2, 3], 0.0)
        add(prompts, key, [7, 8, 9], 1.0)
        add(prompts, key, [1, 2, 3], 2.0)
    assert believed(prompts, [1, 2, 3]) == {B: 3, (2, 1): 3}
    assert believed(prompts, [7, 8, 9]) == {(2, 1): 3}
    assert prompts.index.evicted == 0


def test_lists_that_do_not_fit_and_empty_ones_tell_nothing() -> None:
    prompts = routed()
    prompts.add(A, pack([1, 2]), pack([1]), 0.0)
    prompts.add(A, b"", b"", 0.0)
    assert prompts.index.is_empty
    forget(prompts, 100.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(([1, 2], [5, 5]), ([1, 2], [5, 6]), id="a name twice in a prompt"),
        pytest.param(([1, 2], [5, 6]), ([1, 2], [7, 8]), id="two names for the same blocks"),
        pytest.param(([1, 2], [5, 6]), ([3, 4], [5, 6]), id="one name for different blocks"),
        pytest.param(([1, 2], [0, 0]), ([1, 3], [0, 0]), id="zeros"),
    ],
)
def test_hashes_of_a_client_that_make_no_sense_leave_nothing_behind(
    first: tuple[list[int], list[int]], second: tuple[list[int], list[int]]
) -> None:
    prompts = routed()
    for now, (local, names) in enumerate((first, second, first)):
        prompts.add(A, pack(local), pack(names), float(now))
    forget(prompts, 11.5)
    forget(prompts, 100.0)
    assert prompts.index.is_empty
    assert not prompts._ranks


def test_a_rank_that_goes_while_much_of_it_is_being_forgotten_is_no_harm() -> None:
    prompts = routed()
    for number in range(200):
        add(prompts, A, [number, 1, 2], 0.0)
        add(prompts, B, [number, 1], 0.0)
    prompts.expire(50.0)  # the first steps of it
    prompts.drop_rank(A)
    add(prompts, A, [7], 51.0)
    while prompts.index.sweep(3):
        pass
    assert believed(prompts, [7, 1]) == {A: 1}
    assert prompts.index.total_blocks == 1


def test_what_is_overdue_is_looked_for_once_at_a_time_and_with_rests() -> None:
    prompts = routed()
    ranks = 10 * _RANKS_PER_STEP
    for worker_id in range(ranks):
        add(prompts, (worker_id, 0), [1], 0.0)
    prompts.expire(1.0)  # nothing is
    prompts.expire(2.0)
    rests = 0
    while prompts.index.sweep(1):
        rests += 1
    assert rests == 10 - sweeping._STEPS_AT_ONCE
    add(prompts, A, [2], 3.0)
    forget(prompts, 10.0)
    assert prompts.index.ranks() == [A]


def test_an_abandoned_one_leaves_no_run_behind() -> None:
    """The collector does not see runs, so whoever drops them must take them apart."""
    prompts = routed()
    for number in range(50):
        add(prompts, A, [1, number, number], 0.0)
    count = count_runs(prompts)
    assert count > 50
    root = prompts._ranks[A].trie.root
    prompts.abandon()
    while prompts.index.sweep(100):
        pass
    assert not root.children


def count_runs(prompts: RoutedPrompts) -> int:
    gc.collect()
    return sum(1 for rank in prompts._ranks.values() for _ in runs_below(rank.trie.root))


def runs_below(run: ActiveRun) -> Iterator[ActiveRun]:
    for child in run.children.values():
        yield child
        yield from runs_below(child)


def test_what_no_event_can_report_of_a_prompt_is_not_waited_for() -> None:
    """Its last blocks have random hashes, where only the beginning of a prompt is known."""
    prompts = routed(until_events=True)
    local = pack([1, 2, 901, 902])
    names = sequence_hashes_bytes(local)
    prompts.add(A, local, names, 0.0, 2)
    prompts.stored(A, pack([1]))
    assert believed(prompts, [1, 2, 3]) == {A: 2}
    prompts.stored(A, pack([2]))
    assert prompts.index.is_empty
    prompts.add(A, local, names, 1.0, 2)
    prompts.take_back(A, names)
    assert prompts.index.is_empty


def test_an_index_beside_another_numbers_ranks_alike_and_holds_its_own() -> None:
    index = KvIndex(16)
    prompts = RoutedPrompts(index.empty_copy(), TTL_S)
    store_blocks(index, B, Tier.DEVICE, None, [5], pack([1]))
    add(prompts, A, [1, 2], 0.0)
    add(prompts, B, [1, 2], 0.0)
    (found,) = index.match_sets(pack([1, 2]))[0]
    (guessed,) = prompts.index.match_sets(pack([1, 2]))[0]
    assert found[1] & guessed[1] == found[1] != guessed[1]
    assert index.total_blocks == 1


# -- against the model -----------------------------------------------------------------------------

# Short paths of few blocks share prefixes in every way.
paths = st.lists(st.integers(1, 3), min_size=1, max_size=6)
keys = st.sampled_from([A, B, (2, 0)])


class RoutedMachine(RuleBasedStateMachine):
    @initialize(bound=st.sampled_from([None, 2, 3, 4, 5, 6, 8, 12]))
    def begin(self, bound: int | None) -> None:
        self.prompts, self.now, self.bound = routed(until_events=True), 0.0, bound
        for worker_id in (1, 2):
            self.prompts.set_bound(worker_id, bound)
        self.booked: dict[RankKey, dict[tuple[int, ...], float]] = {}  # in order of last booking
        self.times: Counter[tuple[RankKey, tuple[int, ...]]] = Counter()  # booked and not undone

    def held(self, key: RankKey) -> set[tuple[int, ...]]:
        """Every leading part of a prompt that is believed."""
        return {path[:end] for path in self.booked.get(key, {}) for end in range(1, len(path) + 1)}

    @rule(
        key=keys,
        several=st.lists(paths, min_size=1, max_size=4),
        wait=st.sampled_from([0.0, 1.0, 4.0]),
    )
    def book(self, key: RankKey, several: list[list[int]], wait: float) -> None:
        self.now += wait
        for path in several:
            self.book_one(key, path)

    def book_one(self, key: RankKey, path: list[int]) -> None:
        add(self.prompts, key, path, self.now)
        booked = self.booked.setdefault(key, {})
        before = len(self.held(key))
        if booked.pop(tuple(path), None) is None:
            self.times[key, tuple(path)] = 0
        self.times[key, tuple(path)] += 1
        booked[tuple(path)] = self.now
        grew = len(self.held(key)) > before
        while grew and self.bound is not None and len(self.held(key)) > self.bound:
            if len(booked) == 1:
                break
            del booked[next(iter(booked))]

    @rule(key=keys, at=st.integers(0, 50), other=paths)
    def take_one_back(self, key: RankKey, at: int, other: list[int]) -> None:
        """Of a prompt that is believed, and of any."""
        booked = self.booked.get(key, {})
        for path in (list(booked)[at % len(booked)] if booked else (), tuple(other)):
            self.prompts.take_back(key, sequence_hashes_bytes(pack(path)))
            self.times[key, path] -= 1
            if not self.times[key, path]:
                booked.pop(path, None)

    @rule(key=keys, stored=paths)
    def an_event_stores_blocks(self, key: RankKey, stored: list[int]) -> None:
        """Perhaps after a parent: a prompt goes if it may end with them."""
        self.prompts.stored(key, pack(stored))
        for path in list(self.booked.get(key, {})):
            for end in range(1, len(stored) + 1):
                known = min(end, len(path))
                if list(path[-known:]) == stored[end - known : end]:
                    self.booked[key].pop(path, None)

    @rule(wait=st.sampled_from([0.0, 3.0, 11.0]))
    def forget_what_is_overdue(self, wait: float) -> None:
        self.now += wait
        forget(self.prompts, self.now)
        for booked in self.booked.values():
            for path, since in list(booked.items()):
                if since + TTL_S <= self.now:
                    del booked[path]

    @rule(key=keys, is_all_of_it=st.booleans())
    def drop_a_rank_or_its_worker(self, key: RankKey, is_all_of_it: bool) -> None:
        if is_all_of_it:
            self.prompts.drop_worker(key[0])
            self.prompts.set_bound(key[0], self.bound)
            self.booked = {each: held for each, held in self.booked.items() if each[0] != key[0]}
        else:
            self.prompts.drop_rank(key)
            self.booked.pop(key, None)

    @invariant()
    def what_is_believed_is_what_the_model_says(self) -> None:
        assert self.prompts.index.evicted == 0, "the index never needs to evict by itself"
        for key in (A, B, (2, 0)):
            held = self.held(key)
            assert self.prompts.index.blocks(*key, Tier.DEVICE) == len(held)
            for path in self.booked.get(key, {}):
                for last in (1, 2, 3):
                    asked = [*path, last]
                    longest = max(
                        n for n in range(len(asked) + 1) if not n or tuple(asked[:n]) in held
                    )
                    assert believed(self.prompts, asked)[key] == longest


TestRoutedMachine = RoutedMachine.TestCase
TestRoutedMachine.settings = settings(max_examples=60, stateful_step_count=40)
