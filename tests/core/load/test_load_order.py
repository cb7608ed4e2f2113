"""The ranks in order of load against a model that holds what each rank has, and nothing else.

The order is told of loads as Slots tells it.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lean_selector.core.load.load_order import LoadOrder
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.rank_bits import bits_of

RANKS = 24

# Few of them, so that ranks meet in one set, and that different loads cost the same: 16 tokens of a
# block size of 16 cost what 1 block does.
buckets = st.tuples(
    st.sampled_from([0, 1, 16, 32, 48, 300]) | st.integers(0, 100_000),
    st.sampled_from([0, 1, 2, 3, 300]) | st.integers(0, 5_000),
    st.integers(0, 3),
)


class LoadOrderMachine(RuleBasedStateMachine):
    """Ranks come, go and change."""

    @initialize(
        block_size=st.sampled_from([1, 3, 16, 64, 100]),
        scale=st.sampled_from([0.0, 0.1, 1.0, 2.5]) | st.floats(0.0, 10.0),
        request_weight=st.sampled_from([0.0, 0.0, 0.3, 2.0]),
    )
    def begin(self, block_size: int, scale: float, request_weight: float) -> None:
        self.block_size, self.scale, self.request_weight = block_size, scale, request_weight
        self.order = LoadOrder(block_size, scale, request_weight)
        self.loads = [RankLoad(bit, 0, bit) for bit in range(RANKS)]
        self.held: set[int] = set()
        self.moved: set[int] = set()

    def _set(self, bit: int, bucket: tuple[int, int, int]) -> None:
        load = self.loads[bit]
        load.active_prefill_tokens, load.active_decode_blocks, requests = bucket
        load.reservations = dict.fromkeys(map(str, range(requests)))

    def _bucket(self, bit: int) -> tuple[int, float]:
        load = self.loads[bit]
        standing = load.active_decode_blocks + self.request_weight * load.active_requests
        return load.active_prefill_tokens, standing

    @rule(bits=st.sets(st.integers(0, RANKS - 1)), bucket=buckets)
    def add(self, bits: set[int], bucket: tuple[int, int, int]) -> None:
        for bit in bits - self.held:
            self._set(bit, bucket)
            self.order.add(self.loads[bit])
            self.held.add(bit)
            self.moved.add(bit)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        bit = data.draw(st.sampled_from(sorted(self.held)))
        self.order.remove(self.loads[bit])
        self.held.remove(bit)
        self.moved.discard(bit)
        assert self.loads[bit].bucket is None

    @rule(bit=st.integers(0, RANKS - 1), bucket=buckets)
    def change(self, bit: int, bucket: tuple[int, int, int]) -> None:
        """Also of a rank that was not added, or not any more: the order must not take it in."""
        before = self._bucket(bit)
        self._set(bit, bucket)
        self.order.changed(self.loads[bit])
        if bit in self.held and self._bucket(bit) != before:
            self.moved.add(bit)

    @rule()
    def read_what_moved(self) -> None:
        self.order.moved = 0
        self.moved.clear()
        for bit in self.held:
            self.order.changed(self.loads[bit])  # nothing changed, so nothing moves

    @rule(key=st.floats(0.0, 400.0), share=st.floats(0.0, 1.0))
    def find_a_place(self, key: float, share: float) -> None:
        keys = [bucket.key for bucket in self.order.loads]
        for sought in (key, *keys):
            first = int(share * len(keys))
            expected = (at for at in range(first, len(keys)) if keys[at] >= sought)
            assert self.order.position_of(sought, first) == next(expected, len(keys))

    @rule(among=st.sets(st.integers(0, RANKS - 1)))
    def ask_for_the_fewest_tokens(self, among: set[int]) -> None:
        held = among & self.held
        tokens = [self.loads[bit].active_prefill_tokens for bit in held]
        ranks = sum(1 << bit for bit in held)
        assert self.order.least_tokens(ranks) == min(tokens, default=0)

    @invariant()
    def everyone_is_who_was_added_and_not_removed(self) -> None:
        assert set(bits_of(self.order.everyone)) == self.held
        assert set(bits_of(self.order.moved)) == self.moved
        for bit in self.held:
            assert self.order.ranks[bit] is self.loads[bit]

    @invariant()
    def the_loads_are_those_of_the_ranks_and_in_order(self) -> None:
        steady: dict[tuple[int, float], int] = {}
        for bit in self.held:
            load = self.loads[bit]
            bucket = self._bucket(bit)
            assert load.standing == bucket[1]
            steady[bucket] = steady.get(bucket, 0) | load.mask
        assert [(b.key, b.tokens, b.standing, b.ranks) for b in self.order.loads] == sorted(
            (self.scale * tokens / self.block_size + standing, tokens, standing, ranks)
            for (tokens, standing), ranks in steady.items()
        )


TestLoadOrderMachine = LoadOrderMachine.TestCase
TestLoadOrderMachine.settings = settings(max_examples=70, stateful_step_count=30)
