"""Fair shares: random floods of several ids, and what each was served while two of them waited.

The bound is that of the issue of fairness itself: over any interval in which two ids wait, their
services divided by their weights differ by at most twice the largest request. What was served is
counted here from the answers, not from the shares."""

import random
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lean_selector.core.selection import fair_shares
from lean_selector.core.selection.fair_shares import MAX_IDS, FairLine, FairShares
from lean_selector.core.selection.queue import Queue, Waiting
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import (
    PinnedWorker,
    Placement,
    SelectionRequest,
    WorkerSpec,
)
from tests.support.driven_selector import Sources, prompt_of

BLOCK_SIZE = 4
KEY = ("default", "default")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 0.5}

Step = tuple[bool, str, int, int, int]
steps = st.lists(
    st.tuples(
        st.booleans(),  # requests come, or reservations end
        st.sampled_from("abcd"),
        st.integers(1, 40),  # prompt tokens
        st.integers(0, 10),  # expected output tokens
        st.integers(1, 12),  # how many
    ),
    max_size=40,
)


class Played:
    """A selector with engines that each prefill one request at a time."""

    def __init__(self, engines: int, is_fair: bool = True) -> None:
        self.selector = Selector(
            RouterSettings(
                queue_threshold=0.0,
                queue_fairness="on" if is_fair else "off",
                queue_weights=WEIGHTS,
                use_kv_events=False,
            ),
            Sources(),
            random.Random(1),
        )
        for worker_id in range(engines):
            self.selector.upsert_worker(
                WorkerSpec(
                    worker_id=worker_id,
                    endpoint="w",
                    block_size=BLOCK_SIZE,
                    max_num_batched_tokens=1,
                ),
                0.0,
            )
        self.partition = self.selector.catalog.partitions[KEY]
        self.waiting: dict[str, list[str]] = {name: [] for name in WEIGHTS}
        self.live: list[str] = []
        self.served = dict.fromkeys(WEIGHTS, 0.0)
        self.most = 0.0  # the largest request, by its weight
        self.order: list[str] = []
        # What all were served when the two began to wait together
        self.since: dict[tuple[str, str], dict[str, float]] = {}
        self.names = 0

    def ask(
        self, who: str, tokens: int, output: int = 0, pinned: int | None = None, strict: int = 0
    ) -> Waiting | None:
        self.names += 1
        name = f"r{self.names}"
        request = SelectionRequest(prompt_of([], tokens), self.selector.terms, books=True)
        request.reservation_id, request.fairness_id = name, who
        request.expected_output_tokens, request.strict_priority = output, strict
        if pinned is not None:
            request.pinned = PinnedWorker(pinned, 0)
        size = (tokens + 2 * output) / WEIGHTS[who]
        self.most = max(self.most, size)
        found = self.selector.select(self.partition, request, 0.0)
        if isinstance(found, Placement):
            self.go(who, name, size, found)
            return None
        self.waiting[who].append(name)
        found.on_answer = partial(self.go, who, name, size)
        return found

    def go(self, who: str, name: str, size: float, answer: Placement | Exception) -> None:
        assert isinstance(answer, Placement)
        if name in self.waiting[who]:
            self.waiting[who].remove(name)
        self.served[who] += size
        self.live.append(name)
        self.order.append(who)

    def end(self, pick: int = 0) -> None:
        if self.live:
            self.selector.reservations.free(self.live.pop(pick % len(self.live)), 0.0)

    def check_shares(self) -> None:
        for one in WEIGHTS:
            for other in WEIGHTS:
                if not (one < other and self.waiting[one] and self.waiting[other]):
                    self.since.pop((one, other), None)
                    continue
                before = self.since.setdefault((one, other), dict(self.served))
                gap = self.served[one] - before[one] - self.served[other] + before[other]
                assert abs(gap) <= 2 * self.most + 1e-9

    def check_no_idle(self) -> None:
        room = self.partition.queue.room
        assert room is not None
        assert not (any(self.waiting.values()) and room.free)


@settings(max_examples=150)
@given(steps=steps, engines=st.integers(1, 3))
def test_those_who_wait_together_are_served_alike(steps: list[Step], engines: int) -> None:
    played = Played(engines)
    for come, who, tokens, output, times in steps:
        for _ in range(times):
            if come:
                played.ask(who, tokens, output)
            else:
                played.end(tokens)
            played.check_shares()
            played.check_no_idle()
    while any(played.waiting.values()):  # whoever waits gets a turn
        played.end()
        played.check_shares()
    assert not len(played.partition.queue)


def test_a_flood_delays_another_by_one_request() -> None:
    for is_fair, ahead in ((True, 1), (False, 50)):
        played = Played(1, is_fair)
        for _ in range(51):
            played.ask("a", 10)
        played.ask("c", 10)
        while "c" not in played.order:
            played.end()
        assert played.order.index("c") - 1 == ahead


def test_twice_the_weight_is_twice_the_share() -> None:
    played = Played(1)
    for _ in range(40):
        played.ask("a", 10)
        played.ask("b", 10)
    while len(played.order) < 40:
        played.end()
    assert abs(played.order.count("b") - 2 * played.order.count("a")) <= 3


def test_a_higher_strict_priority_goes_first_whatever_was_served() -> None:
    played = Played(1)
    played.ask("a", 10)
    for priority in (-1, 0, 1):
        played.ask("c", 10, strict=priority)
        played.ask("a", 10, strict=priority)
    while any(played.waiting.values()):
        played.end()
    assert [set(played.order[at : at + 2]) for at in (1, 3, 5)] == [{"a", "c"}] * 3
    assert played.partition.queue.admitted == {"low": 2, "normal": 2, "high": 2}


def test_what_an_id_was_served_on_one_rank_counts_on_the_other() -> None:
    played = Played(2)
    for rank in (0, 1):
        played.ask("a", 10, pinned=rank)
    for who, rank in (("a", 1), ("c", 1), ("a", 0)):  # a came first
        played.ask(who, 10, pinned=rank)
    played.end(0)  # on rank 0, where only a waits
    assert played.order[2:] == ["a"]
    played.end(0)
    assert played.order[2:] == ["a", "c"]


def test_output_is_charged_as_it_was_reported() -> None:
    played = Played(1)
    played.ask("a", 10)
    played.ask("a", 10, output=3)
    played.end()
    shares = played.partition.shares
    assert shares is not None
    before = shares._shares["a"].service
    assert before == 10 + 2 * 3
    for _ in range(2):
        played.selector.reservations.output_block(played.live[0], None, 0.0)
    played.end()
    assert shares._shares["a"].service == 10 + 2 * 2 * BLOCK_SIZE


def test_who_was_charged_for_output_that_never_came_is_early_again() -> None:
    played = Played(1)
    played.ask("c", 10)
    for who, output in (("a", 1000), ("a", 0), ("c", 300), ("c", 0)):
        played.ask(who, 10, output=output)
    played.end()
    played.ask("d", 10)
    played.selector.reservations.output_block(played.live[0], None, 0.0)
    played.end()
    played.end()
    played.ask("b", 10)
    shares = played.partition.shares
    assert shares is not None
    assert shares._shares["b"].service == 10 + 2 * BLOCK_SIZE  # the least: that of a
    while any(played.waiting.values()):
        played.end()
    assert played.order == ["c", "a", "c", "d", "a", "b", "c"]


def test_an_id_saves_up_nothing_while_it_asks_for_nothing() -> None:
    played = Played(1)
    for _ in range(30):
        played.ask("a", 10)
    for _ in range(10):
        played.end()
    for _ in range(5):
        played.ask("c", 10)
    for _ in range(4):
        played.end()
    assert played.order[-4:].count("c") == 2


def test_an_id_that_comes_back_keeps_what_it_was_served() -> None:
    played = Played(1)
    for who, tokens in (("c", 10), ("a", 100), ("c", 10), ("c", 10), ("c", 10)):
        played.ask(who, tokens)
    played.end()
    played.ask("a", 10)
    while any(played.waiting.values()):
        played.end()
    assert played.order == ["c", "a", "c", "c", "c", "a"]


def test_after_a_halving_who_is_served_stands_where_the_others_do() -> None:
    played = Played(1)
    for who, tokens in (("c", 10), ("a", 100), ("c", 60), ("c", 50), ("a", 10), ("c", 10)):
        played.ask(who, tokens)
    for _ in range(2):
        played.end()  # a has 100, c has 60
    shares = played.partition.shares
    assert shares is not None
    for now in (1.0, 1.0 + fair_shares.HALF_LIFE_S):
        shares.settle(now)
    played.end()
    played.ask("b", 10)
    assert shares._shares["b"].service == 50  # the least: that of a
    while any(played.waiting.values()):
        played.end()
    assert played.order[3:] == ["c", "a", "b", "c"]


def test_the_least_service_is_found_after_a_halving() -> None:
    shares = FairShares({}, BLOCK_SIZE)
    line = FairLine((None, None, frozenset(), "both"), shares)
    one, other = shares.enter(line, "one").share, shares.enter(line, "other").share
    one.service, other.service = 100.0, 60.0
    shares.leave(shares.enter(line, "third"))
    for now in (1.0, 1.0 + fair_shares.HALF_LIFE_S):
        shares.settle(now)
    other.service += 50.0
    assert shares.enter(line, "fourth").share.service == one.service == 50.0


def test_what_leaves_takes_its_priority_along() -> None:
    played = Played(1)
    played.ask("c", 10)
    urgent = played.ask("a", 10, strict=1)
    played.ask("a", 10, strict=-1)
    played.ask("c", 10)
    assert urgent is not None
    played.waiting["a"].remove(urgent.request.reservation_id)
    urgent.cancel(0.0)
    while any(played.waiting.values()):
        played.end()
    assert played.order == ["c", "c", "a"]


def test_who_comes_and_goes_leaves_nothing_behind() -> None:
    shares = FairShares({}, BLOCK_SIZE)
    queue = Queue(new_line=shares.new_line)

    def ask(who: str, strict: int = 0) -> Waiting:
        request = SelectionRequest(prompt_of([], 1), Played(1).selector.terms)
        request.fairness_id, request.strict_priority = who, strict
        return queue.add(request, 0.0)

    ask("first", 2)
    ask("b")
    for _ in range(100):
        for who in ("a", "b"):
            queue.leave(ask(who, 1))
    (line,) = queue.lines()
    assert isinstance(line, FairLine)
    assert len(line._heap) < 50


def services(shares: FairShares) -> dict[str, float]:
    return {name: share.service for name, share in shares._shares.items()}


def test_service_is_halved_and_the_order_stays() -> None:
    played = Played(1)
    played.ask("a", 10)
    for _ in range(3):
        played.ask("a", 10)
        played.ask("c", 30)
    played.end()
    played.end()
    shares = played.partition.shares
    assert shares is not None
    before = services(shares)
    for now in (1.0, 1.0 + fair_shares.HALF_LIFE_S, 1.0 + 3 * fair_shares.HALF_LIFE_S):
        shares.settle(now)
    assert services(shares) == {name: service / 8 for name, service in before.items()}
    while any(played.waiting.values()):
        played.end()
    assert not len(played.partition.queue)


@pytest.mark.parametrize("waits", [False, True])
def test_ids_are_bounded_and_the_least_recent_go(waits: bool) -> None:
    shares = FairShares({}, BLOCK_SIZE)
    line = FairLine((None, None, frozenset(), "both"), shares)
    kept = shares.enter(line, "kept").share
    for number in range(2 * MAX_IDS):
        flow = shares.enter(line, f"{number}")
        if not waits:
            shares.leave(flow)
    assert len(shares._shares) == (2 * MAX_IDS + 1 if waits else MAX_IDS)
    assert shares.enter(line, "kept").share is kept
