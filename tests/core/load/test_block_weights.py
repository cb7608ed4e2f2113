from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st

from lean_selector.core.load.rank_load import BlockWeights

weights = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.85, 0.999]) | st.floats(0.0, 1.0)


@given(st.dictionaries(weights, st.integers(1, 300), max_size=6), st.integers(0, 300))
@example({0.5: 1}, 0)  # a half rounds away from zero
@example({0.5: 5}, 0)  # 2.5 to 3, not to the even 2
def test_a_total_is_rounded(counts: dict[float, int], others: int) -> None:
    counts.pop(1.0, None)
    block_weights = BlockWeights()
    for weight, blocks in counts.items():
        block_weights.move(1.0, weight, blocks)
    total = others + sum(blocks * Fraction(weight) for weight, blocks in counts.items())
    rounded = block_weights.rounded_total(others + sum(counts.values()))
    above = float(rounded - total)
    assert -0.5 - 1e-9 < above <= 0.5 + 1e-9
    if above in (0.5, -0.5) and not set(counts) - {0.0, 0.25, 0.5}:
        assert above == 0.5
