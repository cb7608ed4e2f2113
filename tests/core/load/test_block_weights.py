from math import floor

from hypothesis import example, given
from hypothesis import strategies as st

from lean_selector.core.load.rank_load import BlockWeights, _weigh_one_by_one

weights = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.85, 0.999]) | st.floats(0.0, 1.0)


def one_by_one(total: float, weight: float, blocks: int) -> float:
    for _ in range(blocks):
        total = total - 1.0 + weight
    return total


def tally(counts: dict[float, int]) -> BlockWeights:
    block_weights = BlockWeights()
    for weight, blocks in counts.items():
        block_weights.move(1.0, weight, blocks)
    return block_weights


@given(st.dictionaries(weights, st.integers(1, 300), max_size=6), st.integers(0, 300))
@example({}, 7)
@example({0.0: 5}, 0)
@example({0.85: 10}, 0)  # 8, as recorded: they add up to less than 8.5
@example({0.34: 25}, 0)  # 8.499999999999996, where one product gives 8.500000000000004
@example({0.42: 25}, 3)  # 13.500000000000034, where it gives 13.499999999999998
@example({0.5: 1}, 0)  # a half rounds away from zero
@example({0.5: 5}, 0)  # 2.5 to 3, not to the even 2
@example({0.1: 5, 0.25: 8}, 0)  # 2.5, where each alone is far from a half
def test_a_total_is_rounded_as_if_weights_were_added_one_block_after_another(
    counts: dict[float, int], others: int
) -> None:
    """As the reference does."""
    counts.pop(1.0, None)
    distinct = others + sum(counts.values())
    total = float(distinct)
    for weight in sorted(counts):
        total = one_by_one(total, weight, counts[weight])
    rounded = floor(total) + (total - floor(total) >= 0.5)
    assert tally(counts).rounded_total(distinct) == rounded


@given(st.integers(0, 5000), weights, st.integers(0, 5000))
@example(0, 0.1, 3000)
@example(0, 1 - 2**-53, 3000)
@example(1, 2**-60, 3000)
@example(0, 2**-60, 1)  # minus 1 first, then plus the weight: the other way it is lost
@example(2000, 0.5 + 2**-42, 1000)
def test_repeated_steps_are_those_of_a_loop_to_the_last_bit(
    others: int, weight: float, blocks: int
) -> None:
    total = float(others + blocks)
    assert _weigh_one_by_one(total, weight, blocks) == one_by_one(total, weight, blocks)
