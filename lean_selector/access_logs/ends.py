"""What a line ends: a reservation is freed, and the worker's health hears how it did.

Time is an argument: monotonic seconds. Nothing here waits.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol

from lean_selector.access_logs.lines import BadLine, OtherLine, ended_of
from lean_selector.core.errors import NotFound
from lean_selector.core.health.ejections import REFUSED

# How long an end is remembered that came before its beginning: when a client hangs up while its
# request waits for a worker, the line of the log may overtake the request.
EARLY_MEMORY_S: Final = 30.0
MAX_EARLY: Final = 10_000

# What became of a line, or of a datagram that was none.
FREED: Final = "freed"
EARLY: Final = "unknown"
REPORTED: Final = "reported"  # it names no reservation, only a worker
EMPTY: Final = "empty"  # it names neither: a request that nobody was asked about
OTHER: Final = "other"  # it has no word lean-end: a notice of the gateway's own
MALFORMED: Final = "malformed"
NOT_ALLOWED: Final = "not_allowed"
RESULTS: Final = (FREED, EARLY, REPORTED, EMPTY, OTHER, MALFORMED, NOT_ALLOWED)

_MOST_SHOWN: Final = 200  # characters of a line that is logged
_log = logging.getLogger("lean_selector.access_logs")


class Reports(Protocol):
    """Who hears how workers do."""

    def report(self, worker_id: int, dp_rank: int | None, outcome: str, now: float) -> None: ...


class LogEnds:
    """All lines of a process pass here."""

    def __init__(
        self,
        free: Callable[[str, float], None],
        health: Reports,
        clock: Callable[[], float],
    ) -> None:
        """`free` ends a reservation, and raises NotFound."""
        self._free = free
        self._health = health
        self._clock = clock
        self._early: dict[str, float] = {}  # when an end came, by reservation, the oldest first
        self.results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        self.unknown_workers = 0  # lines whose worker is not registered

    def take(self, line: bytes) -> None:
        """A datagram of somebody who may write; never raises."""
        now = self._clock()
        try:
            ended = ended_of(line)
        except OtherLine:
            self.results[OTHER] += 1
            return
        except BadLine as error:
            self.results[MALFORMED] += 1
            shown = line[:_MOST_SHOWN].decode("utf-8", "replace")
            _log.warning(
                "a line of an access log was not understood",
                extra={"reason": str(error), "line": shown},
            )
            return
        if ended.reservation_id is None:
            self.results[EMPTY if ended.worker_id is None else REPORTED] += 1
        else:
            self._end(ended.reservation_id, now)
        if ended.worker_id is not None and ended.outcome is not None:
            # A connection that nobody took tells of the whole worker.
            dp_rank = None if ended.outcome == REFUSED else ended.dp_rank
            try:
                self._health.report(ended.worker_id, dp_rank, ended.outcome, now)
            except NotFound:
                self.unknown_workers += 1

    def refuse(self, host: str) -> None:
        """A datagram of somebody who may not."""
        self.results[NOT_ALLOWED] += 1
        _log.warning(
            "a line of an access log came from an address that --lifecycle-allow does not name",
            extra={"address": host},
        )

    def has_ended(self, reservation_id: str) -> bool:
        """Whether the end of a reservation that is not booked yet has been heard; asked once."""
        at = self._early.pop(reservation_id, None)
        return at is not None and self._clock() - at <= EARLY_MEMORY_S

    def _end(self, reservation_id: str, now: float) -> None:
        try:
            self._free(reservation_id, now)
        except NotFound:
            self.results[EARLY] += 1
            self._remember(reservation_id, now)
        else:
            self.results[FREED] += 1

    def _remember(self, reservation_id: str, now: float) -> None:
        early = self._early
        early.pop(reservation_id, None)
        early[reservation_id] = now
        while len(early) > MAX_EARLY or now - next(iter(early.values())) > EARLY_MEMORY_S:
            del early[next(iter(early))]
