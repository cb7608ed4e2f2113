"""Which bit stands for which rank: the lowest that is free, found without a look at the others."""

import hypothesis.strategies as st
from hypothesis import given

from lean_selector.core.rank_bits import RankBits
from tests.support.operations import lines_run


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_a_new_rank_has_the_lowest_bit_that_is_free(steps: list[tuple[bool, int]]) -> None:
    bits, held = RankBits(), dict[int, int]()
    for acquires, rank in steps:
        if acquires and rank not in held:
            lowest = min(set(range(11)) - set(held.values()))
            assert bits.acquire((rank, 0)) == lowest
            held[rank] = lowest
        elif not acquires and rank in held:
            bits.release((rank, 0))
            del held[rank]
    assert {bit: key for bit, key in enumerate(bits.keys) if key is not None} == {
        bit: (rank, 0) for rank, bit in held.items()
    }


def test_a_bit_is_found_at_the_same_cost_however_many_are_taken() -> None:
    def cost(ranks: int) -> int:
        bits = RankBits()
        for rank in range(ranks):
            bits.acquire((rank, 0))
        for rank in range(ranks - 20, ranks - 10):
            bits.release((rank, 0))
        return lines_run(lambda: [bits.acquire((rank, 1)) for rank in range(10)])

    assert cost(10_000) == cost(100)
