"""The interface through which the selector passes choices to the decision log."""

from typing import Protocol

from lean_selector.core.selection.overlap import MatchSets
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.shapes import Placement, SelectionRequest


class Decisions(Protocol):
    """Receives each booked choice, and later the time to first token and the cached tokens."""

    def chosen(
        self,
        partition: Partition,
        request: SelectionRequest,
        matches: MatchSets,
        placement: Placement,
    ) -> None: ...

    def reported(
        self, reservation_id: str, ttft_s: float | None, cached_tokens: int | None
    ) -> None: ...
