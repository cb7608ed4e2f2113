"""The queue against a naive one: who is placed at once and where, who waits, who goes when.

The model keeps its own selector, without a queue, only to know loads and costs; whoever waits is in
a plain list, and after every event each of them is held against every rank. It knows the rules of
spec selection.md 3.4 and decision D11, and nothing of lines, sets of ranks or when load falls.
"""

import random
from functools import partial
from typing import Any, get_args

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lean_selector.core.errors import AllWorkersBusy, SelectorError, Unavailable
from lean_selector.core.health.ejections import FAILED, OK
from lean_selector.core.index.shapes import Matched, Tier
from lean_selector.core.load.shapes import OFF, BusyThreshold
from lean_selector.core.selection.cost import effective_prefill_tokens
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.queue import AGING_TOKENS_PER_S, Waiting
from lean_selector.core.selection.router_settings import QueuePolicy, RouterSettings
from lean_selector.core.selection.selector import RECHECK_AFTER_S, Selector
from lean_selector.core.selection.shapes import (
    PinnedWorker,
    Placement,
    SelectionRequest,
    WorkerSpec,
)
from lean_selector.core.settings import EjectionSettings
from tests.support.blocks import matches, store_blocks
from tests.support.driven_selector import Sources, pack, prompt_of
from tests.support.naive_choice import Candidate, Matches, candidates, not_busy, rank_costs
from tests.support.reservations import book

BLOCK_SIZE = 4
THRESHOLD = 1.0
EXPIRY_S = 20.0
KEY = ("default", "default")
PATH = [1, 2, 3]

worker_ids = st.integers(1, 4)
dp_ranks = st.integers(0, 1)
picks = st.integers(0, 50)  # of what there is, modulo


class Asked(msgspec.Struct):
    """What a client asks for."""

    books: bool
    hashes: int
    isl_tokens: int
    tie: str
    worker_ids: tuple[int, int]
    dp_rank: int
    taint: str
    priority: int
    jump: float
    adds: int

    def request(self, selector: Selector, name: str) -> SelectionRequest:
        request = SelectionRequest(prompt_of(PATH[: self.hashes], self.isl_tokens), selector.terms)
        request.books, request.reservation_id = self.books, name
        request.strict_priority, request.priority_jump = self.priority, self.jump
        request.adds = self.adds
        if self.tie == "pin":
            request.pinned = PinnedWorker(self.worker_ids[0], self.dp_rank)
        elif self.tie == "allowed":
            request.allowed_worker_ids = frozenset(self.worker_ids)
        elif self.tie == "taints":
            request.required_taints = frozenset(self.taint)
        return request


requests = st.builds(
    Asked,
    books=st.sampled_from([True, True, False]),
    hashes=st.integers(0, 3),
    isl_tokens=st.integers(1, 9),
    tie=st.sampled_from(["none", "none", "pin", "pin", "allowed", "taints"]),
    worker_ids=st.tuples(worker_ids, worker_ids),
    dp_rank=dp_ranks,
    taint=st.sampled_from("ab"),
    priority=st.integers(-1, 1),
    jump=st.sampled_from([-1.0, 0.0, 0.0, 2.0]),
    adds=st.integers(0, 7),  # EXPLANATION, OUTLOOK, HINT
)


class Waiter:
    def __init__(
        self, name: str, request: SelectionRequest, now: float, matches: Matches, score: float
    ) -> None:
        self.name, self.request, self.arrived_at = name, request, now
        self.matches = matches
        self.key = (-request.strict_priority, -score, int(name[1:]))


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.waiting: list[Waiter] = []
        self.parked: dict[str, Waiting] = {}
        self.placed: list[tuple[str, Placement]] = []  # answers that came late, in order
        self.refused: dict[str, SelectorError] = {}
        self.names = 0

    def begin_with(self, policy: QueuePolicy, *, is_fair: bool) -> None:
        self.policy = policy
        terms: dict[str, Any] = {"use_kv_events": False, "reservation_expiry_s": EXPIRY_S}
        terms["ejection"] = EjectionSettings(failures=1, base_s=2.0, most_percent=100.0)
        self.selector = Selector(
            RouterSettings(
                queue_threshold=THRESHOLD,
                queue_policy=policy,
                queue_fairness="on" if is_fair else "off",  # of one id: no difference
                overlap_refresh_after_s=None,
                **terms,
            ),
            Sources(),
            random.Random(1),
        )
        self.model = Selector(RouterSettings(**terms), Sources(), random.Random(1))

    # -- what the model says -----------------------------------------------------------------------

    def score(self, partition: Partition, request: SelectionRequest, matches: Matches) -> float:
        jump = max(request.priority_jump, 0.0)
        if self.policy in ("fcfs", "lcfs"):
            return jump - self.now if self.policy == "fcfs" else jump + self.now
        isl_tokens = request.prompt.isl_tokens
        left = [
            effective_prefill_tokens(request.terms, isl_tokens, matches[load.key], BLOCK_SIZE)
            for _, load in candidates(partition, request)
            if load.key in matches
        ]
        least = min(left, default=isl_tokens)
        if self.policy == "least-work":
            return jump - self.now - least / AGING_TOKENS_PER_S
        return (1.0 + jump) / max(1, least)

    @property
    def partition(self) -> Partition | None:
        return self.model.catalog.partitions.get(KEY)

    def is_below(self, rank: Candidate) -> bool:
        worker, load = rank
        return load.active_prefill_tokens <= THRESHOLD * worker.max_num_batched_tokens

    def open_to(self, request: SelectionRequest) -> list[Candidate]:
        """Raises AllWorkersBusy."""
        assert self.partition is not None
        return not_busy(self.partition, request, candidates(self.partition, request))

    def is_hopeless(self, waiter: Waiter) -> bool:
        return self.partition is None or not candidates(self.partition, waiter.request)

    def check_and_book(
        self,
        name: str,
        request: SelectionRequest,
        ranks: list[Candidate],
        matches: Matches,
        placement: Placement,
    ) -> None:
        """Was the choice one of the cheapest? Then it is the model's choice, too."""
        partition = self.partition
        assert partition is not None
        costs = rank_costs(partition, request, ranks, matches)
        cheapest = {
            load.key for (_, load), cost in zip(ranks, costs, strict=True) if cost == min(costs)
        }
        key = placement.worker_id, placement.dp_rank
        assert key in cheapest
        isl_tokens = request.prompt.isl_tokens
        prefill = effective_prefill_tokens(
            request.terms, isl_tokens, matches.get(key, Matched(0)), BLOCK_SIZE
        )
        assert placement.effective_prefill_tokens == prefill
        if request.books:
            self.model.reservations.reserve(
                partition, name, *key, request.prompt, prefill, self.now
            )

    def let_go(self) -> None:
        """Every one of those who wait, in order, against every rank."""
        for waiter in sorted(self.waiting, key=lambda each: each.key):
            if self.is_hopeless(waiter):
                continue
            try:
                ranks = self.open_to(waiter.request)
            except AllWorkersBusy:
                continue
            below = [rank for rank in ranks if self.is_below(rank)]
            if not below:
                continue
            ahead = [w for w in self.waiting if w.key < waiter.key and not self.is_hopeless(w)]
            assert self.placed, f"{waiter.name} may go"
            name, placement = self.placed.pop(0)
            assert name == waiter.name
            self.waiting.remove(waiter)
            self.check_and_book(
                name, waiter.request, below if ahead else ranks, waiter.matches, placement
            )
        assert not self.placed, "nobody else may go"

    def after_event(self, hopeless_after_s: float = 0.0) -> None:
        """Of something that may have let somebody go."""
        ranks = {} if self.partition is None else self.partition.slots.ranks
        for waiter in self.waiting:  # what a rank held goes with it, whatever comes by its name
            waiter.matches = {key: match for key, match in waiter.matches.items() if key in ranks}
        for waiter in self.waiting.copy():
            long_enough = self.now - waiter.arrived_at >= hopeless_after_s
            if long_enough and self.is_hopeless(waiter):
                assert isinstance(self.refused.pop(waiter.name), Unavailable)
                self.waiting.remove(waiter)
        assert not self.refused
        self.let_go()

    @invariant()
    def those_who_wait_are_those_of_the_model(self) -> None:
        waiting = sorted(self.waiting, key=lambda each: each.key)
        found: list[Waiting] = []
        if (partition := self.selector.catalog.partitions.get(KEY)) is not None:
            found = partition.queue.in_order()
            assert len(partition.queue) == len(found)
            assert partition.queue.isl_tokens == sum(
                each.request.prompt.isl_tokens for each in waiting
            )
        assert [parked.request.reservation_id for parked in found] == [w.name for w in waiting]

    @invariant()
    def loads_are_those_of_the_model(self) -> None:
        if self.partition is None:
            return
        real = self.selector.catalog.partitions[KEY]
        assert {key: self.figures(load) for key, load in real.slots.ranks.items()} == {
            key: self.figures(load) for key, load in self.partition.slots.ranks.items()
        }

    def figures(self, load: Any) -> tuple[int, int, int]:
        return load.active_prefill_tokens, load.active_decode_blocks, load.active_requests

    # -- workers and thresholds --------------------------------------------------------------------

    def both(self, call: Any) -> None:
        call(self.model)
        call(self.selector)

    @initialize(
        sizes=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
        copies=st.lists(st.booleans(), min_size=3, max_size=3),
        policy=st.sampled_from(get_args(QueuePolicy)),
        is_fair=st.booleans(),
    )
    def begin_with_a_fleet_that_is_full(
        self, sizes: tuple[int, int, int], copies: list[bool], policy: QueuePolicy, is_fair: bool
    ) -> None:
        self.begin_with(policy, is_fair=is_fair)
        for worker_id, size, is_copied in zip((1, 2, 3), sizes, copies, strict=True):
            self.register(worker_id, size, 4, frozenset("ab"[: worker_id - 1]), 4)
            for dp_rank in range(size):
                self.reserve(worker_id, dp_rank, 5, worker_id)
                if is_copied:
                    self.hear_of_a_copy(worker_id, dp_rank, 6)

    @rule(
        worker_id=worker_ids,
        size=st.integers(1, 2),
        batched=st.sampled_from([0, 4, 8]),
        taints=st.frozensets(st.sampled_from("ab")),
        blocks=st.sampled_from([None, 4, 8]),
    )
    def register(
        self, worker_id: int, size: int, batched: int, taints: frozenset[str], blocks: int | None
    ) -> None:
        spec = WorkerSpec(
            worker_id=worker_id,
            endpoint="w",
            block_size=BLOCK_SIZE,
            data_parallel_size=size,
            max_num_batched_tokens=batched,
            taints=taints,
            total_kv_blocks=blocks,
        )
        self.both(lambda each: each.upsert_worker(spec, self.now))
        if worker_id == 1:  # knows a prefix of what is asked for

            def store(each: Selector) -> None:
                index = each.catalog.partitions[KEY].index
                store_blocks(index, (1, 0), Tier.DEVICE, None, PATH[:2], pack(PATH[:2]))

            self.both(store)
        self.after_event()

    @rule(worker_id=worker_ids)
    def remove(self, worker_id: int) -> None:
        if worker_id in self.model.catalog.workers:
            self.both(lambda each: each.remove_worker(worker_id, self.now))
            self.after_event()

    @rule(tokens=st.none() | st.integers(0, 9), blocks=st.none() | st.sampled_from([0.0, 0.5]))
    def make_busy_at(self, tokens: int | None, blocks: float | None) -> None:
        if self.partition is None:
            return
        given = BusyThreshold(active_decode_blocks=blocks, active_prefill_tokens=tokens)
        if given == OFF:
            self.both(lambda each: each.switch_threshold_off(KEY, self.now))
        else:
            self.both(lambda each: each.change_threshold(KEY, given, self.now))
        self.after_event()

    @rule(
        worker_id=worker_ids,
        dp_rank=st.none() | dp_ranks,
        outcome=st.sampled_from([OK, FAILED, FAILED]),
    )
    def record_outcome(self, worker_id: int, dp_rank: int | None, outcome: str) -> None:
        worker = self.model.catalog.workers.get(worker_id)
        if worker is not None and (dp_rank is None or dp_rank in worker.spec.ranks):
            before = self.selector.catalog.partitions[KEY].candidates
            self.both(
                lambda each: each.health.record_outcome(worker_id, dp_rank, outcome, self.now)
            )
            if self.selector.catalog.partitions[KEY].candidates != before:
                self.after_event()

    @invariant()
    def candidates_are_those_that_are_not_ejected_or_all(self) -> None:
        for selector in (self.model, self.selector):
            partition = selector.catalog.partitions.get(KEY)
            if partition is not None:
                ranks = partition.slots.ranks
                expected = (ranks.keys() - partition.health.out) or ranks.keys()
                found = {key for key, load in ranks.items() if load.mask & partition.candidates}
                assert found == expected

    # -- requests ----------------------------------------------------------------------------------

    @rule(asked=st.lists(requests, min_size=1, max_size=4))
    def select(self, asked: list[Asked]) -> None:
        for each in asked:
            if self.partition is not None:
                self.names += 1
                self.select_one(self.partition, each.request(self.selector, f"r{self.names}"))

    def select_one(self, partition: Partition, request: SelectionRequest) -> None:
        name = request.reservation_id
        outcome: Placement | Waiting | SelectorError
        try:
            outcome = self.selector.select(self.selector.catalog.partitions[KEY], request, self.now)
        except SelectorError as error:
            outcome = error
        self.let_go()  # what wore off meanwhile goes to those who waited for it
        matched = matches(partition.index, request.prompt.local_hashes)
        try:
            ranks = self.open_to(request)
        except AllWorkersBusy:
            assert isinstance(outcome, AllWorkersBusy)
            return
        below = [rank for rank in ranks if self.is_below(rank)]
        if below:
            assert isinstance(outcome, Placement)
            among = below if self.waiting else ranks
            self.check_and_book(name, request, among, matched, outcome)
        elif ranks or self.waiting:
            assert isinstance(outcome, Waiting)
            outcome.on_answer = partial(self.on_answer, name)
            score = self.score(partition, request, matched)
            self.waiting.append(Waiter(name, request, self.now, matched, score))
            self.parked[name] = outcome
        else:
            assert isinstance(outcome, Unavailable)

    def on_answer(self, name: str, outcome: Placement | Exception) -> None:
        if isinstance(outcome, Placement):
            self.placed.append((name, outcome))
        else:
            assert isinstance(outcome, SelectorError)
            self.refused[name] = outcome

    @precondition(lambda self: self.waiting)
    @rule(pick=picks)
    def hang_up(self, pick: int) -> None:
        waiter = self.waiting.pop(pick % len(self.waiting))
        for _ in range(2):  # the second time changes nothing
            self.parked[waiter.name].cancel(self.now)
        self.after_event()

    # -- bookings ----------------------------------------------------------------------------------

    def live(self) -> list[str]:
        return [] if self.partition is None else list(self.partition.slots.reservations)

    @rule(worker_id=worker_ids, dp_rank=dp_ranks, tokens=st.integers(0, 12), hashes=picks)
    def reserve(self, worker_id: int, dp_rank: int, tokens: int, hashes: int) -> None:
        """Booked by a client that chose for itself: nobody can go for that."""
        partition = self.partition
        if partition is None or (worker_id, dp_rank) not in partition.slots.ranks:
            return
        self.names += 1
        prompt = prompt_of(PATH[: hashes % 4], 12)
        booked = f"r{self.names}", worker_id, dp_rank, prompt, tokens, self.now
        self.both(lambda each: each.reservations.reserve(each.catalog.partitions[KEY], *booked))

    @rule(worker_id=worker_ids, dp_rank=dp_ranks, tokens=st.integers(1, 12))
    def hear_of_a_copy(self, worker_id: int, dp_rank: int, tokens: int) -> None:
        partition = self.partition
        if partition is None or (worker_id, dp_rank) not in partition.slots.ranks:
            return
        self.names += 1
        name = f"r{self.names}"
        told = name, worker_id, dp_rank, b"", tokens, self.now
        self.both(lambda each: book(each.catalog.partitions[KEY].slots, *told, router_id=7))
        self.selector.load_changed(*KEY, name, self.now)
        self.after_event()

    @precondition(lambda self: self.live())
    @rule(pick=picks)
    def complete_prefill(self, pick: int) -> None:
        name = self.live()[pick % len(self.live())]
        self.both(lambda each: each.reservations.prefill_complete(name, self.now))
        self.after_event()

    @precondition(lambda self: self.live())
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        name = self.live()[pick % len(self.live())]
        self.both(lambda each: each.reservations.free(name, self.now))
        self.after_event()

    @precondition(lambda self: self.live())
    @rule(pick=picks, fraction=st.sampled_from([None, 0.0, 0.5]))
    def grow(self, pick: int, fraction: float | None) -> None:
        name = self.live()[pick % len(self.live())]
        self.both(lambda each: each.reservations.output_block(name, fraction, self.now))
        if fraction is not None:
            self.after_event()

    # -- time --------------------------------------------------------------------------------------

    @rule(quarters=st.integers(1, 8))
    def let_time_pass(self, quarters: int) -> None:
        self.now += quarters / 4

    @rule()
    def tick(self) -> None:
        self.both(lambda each: each.admit_waiting(self.now))
        self.after_event(RECHECK_AFTER_S)

    @rule(max_steps=st.integers(1, 3))
    def expire(self, max_steps: int) -> None:
        gone, same = (
            [held.request_id for _, held in each.reservations.expire(self.now, max_steps)]
            for each in (self.model, self.selector)
        )
        assert gone == same
        if gone:
            self.after_event()


TestQueueModel = QueueMachine.TestCase
TestQueueModel.settings = settings(max_examples=120, stateful_step_count=50)
