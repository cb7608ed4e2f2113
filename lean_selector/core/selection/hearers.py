"""Interfaces of the observers of choices: the decision log and the page."""

from typing import Protocol

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.overlap import MatchSets
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.shapes import Decision, Placement, SelectionRequest


class Decisions(Protocol):
    """Hears of each choice that is booked, and of the outcome that is reported for its request."""

    def chosen(
        self,
        partition: Partition,
        request: SelectionRequest,
        ranks: int,
        matches: MatchSets,
        placement: Placement,
        now: float,
    ) -> None: ...

    def reported(
        self, reservation_id: str, ttft_s: float | None, cached_tokens: int | None
    ) -> None: ...


class Watch(Protocol):
    """Hears of choices, in order to display them; see `core.selection.watch`."""

    def look(
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
