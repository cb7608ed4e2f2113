"""Sets of workers that requests name, and what is remembered of them."""

import msgspec
import pytest

from lean_selector.core.numbers import MAX_RANKS, U64_MAX
from lean_selector.wire.scalars import allowed_workers


def test_a_list_that_is_sent_again_is_the_same_set_and_not_only_an_equal_one() -> None:
    first = allowed_workers(list(range(1_000, 1_064)))
    assert first == frozenset(range(1_000, 1_064))
    assert allowed_workers(list(range(1_000, 1_064))) is first
    assert allowed_workers(list(range(1_063, 999, -1))) == first
    assert allowed_workers([*range(1_000, 1_063), 5]) == {*range(1_000, 1_063), 5}


@pytest.mark.parametrize("count", [0, 1, 8, 9, MAX_RANKS, MAX_RANKS + 1])
def test_sets_of_every_size_are_what_was_named(count: int) -> None:
    for _ in range(2):
        assert allowed_workers([*range(count), *range(count // 2)]) == frozenset(range(count))


def test_what_is_kept_is_bounded() -> None:
    many = list(range(MAX_RANKS + 1))
    assert allowed_workers(many) is not allowed_workers(many)
    first = allowed_workers(list(range(64)))
    for other in range(100):
        allowed_workers(list(range(other + 1, other + 65)))
    assert allowed_workers(list(range(64))) is not first


@pytest.mark.parametrize("count", [0, 100])
def test_an_id_beyond_64_bits_is_refused_each_time(count: int) -> None:
    for _ in range(2):
        with pytest.raises(msgspec.ValidationError, match=r"`\$\.allowed_worker_ids\[\.\.\.\]`"):
            allowed_workers([*range(count), U64_MAX + 1])
    assert U64_MAX in allowed_workers([*range(count), U64_MAX])
