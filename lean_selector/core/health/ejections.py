"""Outlier detection: failing ranks are temporarily ejected, so that they get no requests.

Several consecutive failed requests eject a rank, for a time that grows with each ejection. Then the
rank is on probation: one failure ejects the rank again. A success ends the probation, and so does a
time without failures that is as long as the ejection was. Failed health polls eject all ranks of a
worker until a poll succeeds. Only a limited share of the ranks is ejected, but one worker can
always be ejected. While all ranks are ejected, any rank may get requests; a success then restores
the rank at once. While any rank is in service, successes of ejected ranks do not count.

Time is an argument, in monotonic seconds, and does not go backwards."""

import math
from collections.abc import Callable, Sequence
from typing import Final

from lean_selector.core.rank_bits import RankKey
from lean_selector.core.settings import EjectionSettings

IN_SERVICE, PROBATION, EJECTED = "in_service", "probation", "ejected"


class RankHealth:
    """Failures, ejection and probation of one rank. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.failures = 0  # consecutive, from reports
        self.failed_polls = 0  # consecutive
        self.was_refused = False  # the last failure was a refused connection
        self.is_out = False  # ejected: by reports until `returns_at`, by polls while `is_down`
        self.is_down = False
        self.on_probation = False  # back in service, but one failure ejects it again
        self.since = 0.0  # monotonic: when the ejection or the probation began
        self.returns_at = 0.0
        self.probation_ends_at = 0.0
        # ejections because of reports, less one per `base_s` in service after `healed_at`
        self.ejections = 0
        self.healed_at = 0.0
        self.reason = ""  # reason for the current or the last ejection

    @property
    def state(self) -> str:
        if self.is_out:
            return EJECTED
        return PROBATION if self.on_probation else IN_SERVICE


OK: Final = "ok"
FAILED: Final = "failed"
REFUSED: Final = "refused"
POLL: Final = "poll"  # cause of an ejection; the others are FAILED and REFUSED
_WORDS: Final = {FAILED: "it failed", REFUSED: "connection refused"}


class Ejections:
    """Ejects failing ranks. Methods return True if the set of ejected ranks may have changed."""

    def __init__(self, settings: EjectionSettings) -> None:
        self._settings = settings
        # When the next rank returns, or next recovers without a success.
        self._looks_at = math.inf
        self.ranks: dict[RankKey, RankHealth] = {}  # ranks with any failure state
        self.out: set[RankKey] = set()
        # When each rank that is back in service returned. Readers drop old entries.
        self.returned: dict[RankKey, float] = {}
        self.ejected = {REFUSED: 0, FAILED: 0, POLL: 0}  # total ejections of ranks, by cause
        self.spared = 0  # total ranks that were not ejected because too many already were

    # -- what is heard -----------------------------------------------------------------------------

    def record_outcome(
        self,
        keys: Sequence[RankKey],
        outcome: str,
        total: int,
        now: float,
        is_alike: Callable[[RankKey], bool] = lambda key: True,
    ) -> bool:
        """Record the outcome of a request to these ranks: one rank, or all ranks of a worker if the
        outcome concerns the whole worker. `total`: number of ranks with the same role, which
        `is_alike` tells from others."""
        if not self.ranks and outcome == OK:
            return False
        changed = self.settle(now)
        if outcome == OK:
            return self._succeeded(keys, total, now, is_alike) or changed
        due = []
        for key in keys:
            health = self._of(key)
            health.failures += 1
            health.was_refused = outcome == REFUSED
            if health.is_out:
                continue  # the request was sent before the ejection
            if health.on_probation or 0 < self._settings.failures <= health.failures:
                due.append(key)
        if not due or not self._may_go(due, total, is_alike):
            return changed
        for key in due:
            health = self.ranks[key]
            again = health.on_probation
            how = _WORDS[outcome]
            times = f"{health.failures} consecutive requests failed"
            reason = f"tried again: {how}" if again else f"{times}, the last: {how}"
            rested = 0 if again else int((now - health.healed_at) / self._settings.base_s)
            health.ejections = max(0, health.ejections - rested) + 1
            longest = self._settings.longest_s
            health.returns_at = now + min(longest, self._settings.base_s * health.ejections)
            self._eject(key, outcome, reason, now)
            self._looks_at = min(self._looks_at, health.returns_at)
        return True

    def poll(
        self,
        keys: Sequence[RankKey],
        fault: str | None,
        total: int,
        now: float,
        is_alike: Callable[[RankKey], bool] = lambda key: True,
    ) -> bool:
        """Record a health poll of the worker that has these ranks. `fault` is None if the poll
        succeeded.

        A success restores ranks that were ejected because of polls or refused connections."""
        if not self.ranks and fault is None:
            return False
        changed = self.settle(now)
        if fault is None:
            for key in keys:
                health = self.ranks.get(key)
                if health is None:
                    continue
                health.failed_polls = 0
                health.is_down = False
                if health.is_out and (health.was_refused or health.returns_at <= now):
                    self._return(key, now, now + self._settings.base_s)
                    changed = True
            return changed
        due = []
        for key in keys:
            health = self._of(key)
            health.failed_polls += 1
            if health.is_down or health.failed_polls < self._settings.failed_polls:
                continue
            if health.is_out:
                health.is_down = True  # only a successful poll restores it
            else:
                due.append(key)
        if not due or not self._may_go(due, total, is_alike):
            return changed
        for key in due:
            health = self.ranks[key]
            health.is_down = True
            self._eject(key, POLL, f"{health.failed_polls} consecutive polls failed: {fault}", now)
        return True

    def settle(self, now: float) -> bool:
        """End ejections and probations whose time is over. Call this about every second."""
        if now < self._looks_at:
            return False
        self._looks_at = math.inf
        changed = False
        for key, health in list(self.ranks.items()):
            if health.is_out and not health.is_down and health.returns_at <= now:
                took = health.returns_at - health.since
                self._return(key, health.returns_at, health.returns_at + took)
                changed = True
            if health.on_probation and health.probation_ends_at <= now:
                self._heal(key, health, health.probation_ends_at)
            if health.is_out and not health.is_down:
                self._looks_at = min(self._looks_at, health.returns_at)
            elif health.on_probation:
                self._looks_at = min(self._looks_at, health.probation_ends_at)
        return changed

    def forget(self, keys: Sequence[RankKey]) -> bool:
        """Forget the failures and ejections of ranks that were removed or replaced."""
        changed = False
        for key in keys:
            self.ranks.pop(key, None)
            self.returned.pop(key, None)
            if key in self.out:
                self.out.discard(key)
                changed = True
        return changed

    # -- steps -------------------------------------------------------------------------------------

    def _of(self, key: RankKey) -> RankHealth:
        health = self.ranks.get(key)
        if health is None:
            health = self.ranks[key] = RankHealth()
        return health

    def _may_go(self, due: list[RankKey], total: int, is_alike: Callable[[RankKey], bool]) -> bool:
        """Whether the limit (a share of the `total` ranks) allows ejecting the ranks `due`, too."""
        out = [key for key in self.out if is_alike(key)]
        count = len(out) + len(due)
        worker_id = due[0][0]
        alone = all(key[0] == worker_id for key in out)
        if alone or count * 100 <= self._settings.most_percent * total:
            return True
        self.spared += len(due)
        return False

    def _eject(self, key: RankKey, cause: str, reason: str, now: float) -> None:
        health = self.ranks[key]
        health.is_out, health.on_probation = True, False
        health.since, health.reason = now, reason
        self.out.add(key)
        self.returned.pop(key, None)
        self.ejected[cause] += 1

    def _return(self, key: RankKey, at: float, probation_ends_at: float) -> None:
        health = self.ranks[key]
        health.is_out, health.on_probation = False, True
        health.failures = 0
        health.since, health.probation_ends_at = at, probation_ends_at
        self.returned[key] = at
        self.out.discard(key)
        self._looks_at = min(self._looks_at, probation_ends_at)

    def _succeeded(
        self,
        keys: Sequence[RankKey],
        total: int,
        now: float,
        is_alike: Callable[[RankKey], bool],
    ) -> bool:
        all_are_out = len([key for key in self.out if is_alike(key)]) >= total
        changed = False
        for key in keys:
            health = self.ranks.get(key)
            if health is None or (health.is_out and not all_are_out):
                continue
            if health.is_out:
                changed = True
                health.is_out, health.is_down, health.failed_polls = False, False, 0
                health.on_probation = True
                self.out.discard(key)
            self._heal(key, health, now)
        return changed

    def _heal(self, key: RankKey, health: RankHealth, at: float) -> None:
        """End a rank's probation and reset its failed requests, but not its failed health polls."""
        if health.on_probation:
            health.on_probation, health.healed_at = False, at
        health.failures, health.was_refused = 0, False
        if not health.ejections and not health.failed_polls:
            del self.ranks[key]


# Answers of a worker that sheds load or is starting: neither a failure nor a success.
NOT_FREE: Final = frozenset({429, 503, 529})


def outcome_of_status(status: int) -> str | None:
    """Return the outcome of a request that a worker answered with this HTTP status (200 or above).
    None: the worker sheds load or is starting, which is neither success nor failure."""
    if status in NOT_FREE:
        return None
    return FAILED if status >= 500 else OK
