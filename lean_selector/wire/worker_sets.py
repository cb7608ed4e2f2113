"""Sets of workers that requests name. They are remembered: who names many names the same again."""

import functools
from typing import Final

from lean_selector.core.numbers import MAX_RANKS
from lean_selector.wire.scalars import check_u64

# To look so few up costs as much as to check them. Sets of more workers than can have ranks are
# not kept: those that are take 6 MB at most.
_FEW_WORKERS: Final = 8
_KEPT_SETS: Final = 16


def allowed_workers(ids: list[int]) -> frozenset[int]:
    """The set of these ids. Raises msgspec.ValidationError for one beyond 2**64 - 1."""
    if _FEW_WORKERS < len(ids) <= MAX_RANKS:
        return _kept(tuple(ids))
    return _checked(ids)


@functools.lru_cache(maxsize=_KEPT_SETS)
def _kept(ids: tuple[int, ...]) -> frozenset[int]:
    """One and the same set each time, which knows its own hash."""
    return _checked(ids)


def _checked(ids: list[int] | tuple[int, ...]) -> frozenset[int]:
    if ids:
        check_u64("allowed_worker_ids[...]", max(ids))
    return frozenset(ids)
