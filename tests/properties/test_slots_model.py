"""Slots against a naive model that keeps every prompt as a list of path positions."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lean_selector.core.errors import BadRequest, DuplicateRequest, NotFound
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.shapes import ActiveRun, Reservation
from lean_selector.core.load.slots import Slots
from tests.support.driven_selector import pack
from tests.support.reservations import book

RankKey = tuple[int, int]
Position = tuple[int, ...]  # a block is the path that leads to it

RANKS: list[RankKey] = [(1, 0), (1, 1), (2, 0)]
IDS = [f"r{n}" for n in range(6)]
LOCAL_LIMIT_S, REPLICA_LIMIT_S = 30.0, 36.0
LONG = tuple(range(100, 140))

odd_prompts = st.lists(st.sampled_from([1, 2, 3, 2**64 - 1]), max_size=8).map(tuple)
long_prompts = st.builds(
    lambda shared, tail: LONG[:shared] + tail, st.integers(0, len(LONG)), odd_prompts
)
prompts = odd_prompts | long_prompts
fractions = st.sampled_from([0.0, 0.1, 0.5, 0.85, 1.0]) | st.floats(0.0, 1.0)


@dataclass
class ModelReservation:
    key: RankKey
    prompt: Position
    prefill_tokens: int
    touched_at: float
    is_replica: bool
    prefill_done: bool = False
    outputs: list[float] = field(default_factory=list)  # one weight per output block


class SlotsAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[RankKey, tuple[int, int]] = {}
        self.slots = Slots(self.on_load_change)
        self.now = 1000.0
        self.live: dict[str, ModelReservation] = {}  # in order of touch
        self.weights: dict[tuple[RankKey, Position], float] = {}
        self.counted: Counter[str] = Counter()  # what was admitted here, and how it ended
        self.revision = 0  # of the slots, when it was looked at last
        self.is_changed = False  # since then

    def on_load_change(self, rank: RankLoad) -> None:
        assert self.slots.ranks[rank.worker_id, rank.dp_rank] is rank
        self.heard[rank.key] = (rank.active_prefill_tokens, rank.active_decode_blocks)

    # -- the model ---------------------------------------------------------------------------------

    def holders(self, key: RankKey) -> dict[Position, int]:
        held: dict[Position, int] = {}
        for r in self.live.values():
            if r.key == key:
                for end in range(1, len(r.prompt) + 1):
                    held[r.prompt[:end]] = held.get(r.prompt[:end], 0) + 1
        return held

    def decode_blocks(self, key: RankKey) -> float:
        held = self.holders(key)
        outputs = [w for r in self.live.values() if r.key == key for w in r.outputs]
        fractional = [self.weights[key, p] for p in held if (key, p) in self.weights] + outputs
        return len(held) + len(outputs) - sum(1 - weight for weight in fractional)

    def forget(self, request_id: str, how: str) -> None:
        r = self.live.pop(request_id)
        self.counted[how] += not r.is_replica
        self.is_changed = True
        held = self.holders(r.key)
        for key, position in list(self.weights):
            if key == r.key and position not in held:
                del self.weights[key, position]

    def touch(self, request_id: str) -> ModelReservation:
        r = self.live[request_id] = self.live.pop(request_id)
        self.is_changed = True
        r.touched_at = self.now
        return r

    # -- what may happen ---------------------------------------------------------------------------

    @initialize()
    def start_with_ranks(self) -> None:
        for key in RANKS:
            self.slots.add_rank(*key)

    @rule(by=st.integers(1, 20))
    def let_time_pass(self, by: int) -> None:
        self.now += by / 4

    @rule(key=st.sampled_from(RANKS))
    def add_rank(self, key: RankKey) -> None:
        known = self.slots.ranks.get(key)
        rank = self.slots.add_rank(*key)
        assert rank is self.slots.ranks[key]
        assert known in (None, rank)

    @rule(key=st.sampled_from(RANKS))
    def remove_rank(self, key: RankKey) -> None:
        known = self.slots.ranks.get(key)
        lost = {i for i, r in self.live.items() if r.key == key}
        assert {r.request_id for r in self.slots.remove_rank(*key)} == lost
        for request_id in lost:
            self.forget(request_id, "dropped")
        self.heard.pop(key, None)
        if known is not None:
            assert (known.active_prefill_tokens, known.active_decode_blocks) == (0, 0)
            assert not known.active_requests
            assert not known.block_weights.counts

    @rule(
        request_id=st.sampled_from(IDS),
        key=st.sampled_from([*RANKS, (9, 9)]),
        prompt=prompts,
        tokens=st.sampled_from([0, 7, 1000, 999, 2**53]),
        router_id=st.sampled_from([None, None, 77]),
    )
    def book(
        self, request_id: str, key: RankKey, prompt: Position, tokens: int, router_id: int | None
    ) -> None:
        def call() -> Reservation:
            booked = self.slots, request_id, *key, pack(prompt), tokens, self.now
            return book(*booked, router_id=router_id)

        if key not in self.slots.ranks or request_id in self.live:
            before = self.dump()
            with pytest.raises(NotFound if key not in self.slots.ranks else DuplicateRequest):
                call()
            assert self.dump() == before
            return
        booked = call()
        self.counted["copied" if router_id is not None else "booked"] += 1
        self.is_changed = True
        assert booked is self.slots.reservations[request_id]
        self.live[request_id] = ModelReservation(
            key, prompt, tokens, self.now, router_id is not None
        )

    @rule(request_id=st.sampled_from(IDS))
    def prefill_complete(self, request_id: str) -> None:
        done = self.slots.prefill_complete(request_id, self.now)
        if request_id not in self.live:
            assert done is None
            return
        r = self.touch(request_id)
        assert done == (self.slots.reservations[request_id], not r.prefill_done)
        r.prefill_done = True
        r.prefill_tokens = 0

    @rule(request_id=st.sampled_from(IDS), fraction=st.none() | fractions)
    def output_block(self, request_id: str, fraction: float | None) -> None:
        got = self.slots.output_block(request_id, self.now, fraction)
        if request_id not in self.live:
            assert got is None
            return
        assert got is self.slots.reservations[request_id]
        r = self.touch(request_id)
        r.outputs.append(1.0)
        if fraction is not None:
            r.outputs = [fraction] * len(r.outputs)
            held = self.holders(r.key)
            for end in range(1, len(r.prompt) + 1):
                if held[r.prompt[:end]] == 1:
                    self.weights[r.key, r.prompt[:end]] = fraction

    @precondition(lambda self: self.live)
    @rule(data=st.data(), fraction=st.none() | fractions)
    def give_a_live_request_output(self, data: st.DataObject, fraction: float | None) -> None:
        self.output_block(data.draw(st.sampled_from(sorted(self.live))), fraction)

    @rule(request_id=st.sampled_from(IDS), fraction=st.sampled_from([-0.1, 1.1, float("nan")]))
    def refuse_a_fraction(self, request_id: str, fraction: float) -> None:
        before = self.dump()
        with pytest.raises(BadRequest):
            self.slots.output_block(request_id, self.now, fraction)
        assert self.dump() == before

    @rule(request_id=st.sampled_from(IDS))
    def touch_request(self, request_id: str) -> None:
        assert self.slots.touch(request_id, self.now) is self.slots.reservations.get(request_id)
        if request_id in self.live:
            self.touch(request_id)

    @rule(request_id=st.sampled_from(IDS))
    def free(self, request_id: str) -> None:
        expected = self.slots.reservations.get(request_id)
        assert self.slots.free(request_id, self.now) is expected
        if request_id in self.live:
            self.forget(request_id, "freed")

    @rule(max_steps=st.integers(0, 3))
    def expire(self, max_steps: int) -> None:
        due = [
            [
                i
                for i, r in self.live.items()
                if r.is_replica is copies and age < self.now - r.touched_at
            ]
            for copies, age in ((False, LOCAL_LIMIT_S), (True, REPLICA_LIMIT_S))
        ]
        limits = {False: LOCAL_LIMIT_S, True: REPLICA_LIMIT_S}

        def due_at(i: str) -> float:
            return self.live[i].touched_at + limits[self.live[i].is_replica]

        expected = sorted(due[0] + due[1], key=due_at)[:max_steps]  # the longest overdue first
        gone = self.slots.expire(self.now, LOCAL_LIMIT_S, REPLICA_LIMIT_S, max_steps)
        assert [r.request_id for r in gone] == expected
        for request_id in expected:
            self.forget(request_id, "expired")

    # -- what holds at every moment ----------------------------------------------------------------

    @invariant()
    def loads_are_the_models(self) -> None:
        for key, rank in self.slots.ranks.items():
            mine = [r for r in self.live.values() if r.key == key]
            assert rank.active_requests == len(mine)
            assert rank.active_prefill_tokens == sum(r.prefill_tokens for r in mine)
            above = rank.active_decode_blocks - self.decode_blocks(key)
            assert -0.5 - 1e-9 < above < 0.5 + 1e-9
            outputs = sum(len(r.outputs) for r in mine)
            assert rank.distinct_blocks == len(self.holders(key)) + outputs
            heard = self.heard.get(key, (0, 0))
            assert heard == (rank.active_prefill_tokens, rank.active_decode_blocks)

    @invariant()
    def what_happened_is_counted_and_the_revision_grows_with_it(self) -> None:
        for how in ("booked", "copied", "freed", "dropped", "expired"):
            assert getattr(self.slots, how) == self.counted[how]
        assert self.slots.arrived == self.counted["booked"] + self.counted["copied"]
        assert (self.slots.revision > self.revision) is self.is_changed
        self.revision, self.is_changed = self.slots.revision, False

    @invariant()
    def reservations_are_the_models(self) -> None:
        assert self.slots.reservations.keys() == self.live.keys()
        for request_id, r in self.live.items():
            got = self.slots.reservations[request_id]
            assert got.rank_load is self.slots.ranks[r.key]
            assert got.prefill_tokens == r.prefill_tokens
            assert got.touched_at == r.touched_at
            assert got.is_replica is r.is_replica
            assert got.block_count == len(r.prompt)
            assert self.slots.sequence_hashes_of(got) == pack(r.prompt)

    @invariant()
    def every_active_prompt_is_found(self) -> None:
        queries = {(*r.prompt, 4) for r in self.live.values()} | {(1, 2, 3, 1), LONG, (), (4,)}
        for query in queries:
            expected = {}
            for key in self.slots.ranks:
                held = self.holders(key)
                depth = 0
                while depth < len(query) and query[: depth + 1] in held:
                    depth += 1
                if depth:
                    expected[key] = depth
            assert self.slots.active_prefix(pack(query)) == expected
            if query:
                for first in (query[0], query[0] - 2**64, pack(query[:1]), pack(query)):
                    assert self.slots.starts_no_prompt(first) is (not expected)

    @invariant()
    def the_trie_is_as_small_as_can_be(self) -> None:
        root = self.slots._trie.root
        todo = list(root.children.values())
        ends = 0
        while todo:
            run = todo.pop()
            parent = run.parent
            assert parent is not None
            assert run.label
            assert len(run.label) % 8 == 0
            assert parent.children[run.label[:8]] is run
            assert run.refs
            assert min(run.refs.values()) >= 1
            assert run.weights is None or run.weights.keys() <= run.refs.keys()
            assert run.weights != {}
            assert 1.0 not in (run.weights or {}).values()
            assert sum(run.refs.values()) == run.ends + sum(
                sum(child.refs.values()) for child in run.children.values()
            )
            if not run.ends:
                (first, *others) = run.children.values()
                assert others or first.weights != run.weights
            ends += run.ends
            todo += run.children.values()
        assert ends + root.ends == len(self.live)

    def dump(self) -> object:
        def tree(run: ActiveRun) -> object:
            below = [tree(child) for child in run.children.values()]
            return run.label, dict(run.refs), run.ends, dict(run.weights or {}), below

        ranks = [
            (k, r.active_prefill_tokens, r.active_decode_blocks, list(r.reservations))
            for k, r in self.slots.ranks.items()
        ]
        reservations = [
            (i, r.touched_at, r.prefill_tokens, r.output_blocks)
            for i, r in self.slots.reservations.items()
        ]
        return tree(self.slots._trie.root), ranks, reservations, dict(self.heard)

    def teardown(self) -> None:
        for request_id in list(self.live):
            self.free(request_id)
        root = self.slots._trie.root
        assert not root.children
        assert not root.ends
        assert not self.slots.reservations
        for rank in self.slots.ranks.values():
            loads = rank.active_requests, rank.active_prefill_tokens, rank.active_decode_blocks
            assert loads == (0, 0, 0)
            assert rank.distinct_blocks == 0
            assert not rank.block_weights.counts
        assert self.slots.expire(self.now + 1e6, 0.0, 0.0, 1) == []


TestSlotsAgainstModel = SlotsAgainstModel.TestCase
TestSlotsAgainstModel.settings = settings(max_examples=60, stateful_step_count=40)
