"""Interfaces through which the selector passes choices to the decision log and the web page."""

from typing import Protocol

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.overlap import MatchSets
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.shapes import Decision, Placement, SelectionRequest


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


class Watch(Protocol):
    """Receives choices to show them on the web page; implemented in `core.selection.watch`."""

    def sample(
        self,
        partition: Partition,
        request: SelectionRequest,
        ranks: int,
        matches: MatchSets,
        load: RankLoad,
        placement: Placement,
        now: float,
    ) -> Decision | None: ...

    def add(self, decision: Decision) -> None: ...
