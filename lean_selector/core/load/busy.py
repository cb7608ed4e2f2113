"""Busy thresholds: which ranks and workers may still be given new work.

Follows "Busy Detection Logic" of the load-shedding document and slot_tracker.md 4.3 and 4.6: a rank
is busy above any limit that is set, not at it; a worker only when all of its ranks are. What is not
known (a capacity that the worker did not report) exceeds nothing. Does not know how loads are
counted, nor who is asked for a worker.
"""

from collections.abc import Iterable

from lean_selector.core.errors import NotFound
from lean_selector.core.load.busy_limits import OFF, BusyThreshold

# Thresholds outlive their model's last worker, so that a worker that restarts finds them again. Of
# models that are gone this many are kept, the oldest go first.
MAX_REMEMBERED = 1024

Scope = tuple[str, str]


class BusyThresholds:
    """The thresholds of every model and tenant: those of its own, or else the defaults."""

    def __init__(self, defaults: BusyThreshold = OFF) -> None:
        self._defaults = defaults
        self._own: dict[Scope, BusyThreshold] = {}

    def own(self) -> list[tuple[Scope, BusyThreshold]]:
        """Those that were given to a model and tenant, the oldest first."""
        return list(self._own.items())

    def restore(self, scope: Scope, threshold: BusyThreshold) -> None:
        """What `own` said before this process began. Raises BadRequest."""
        threshold.check()
        self._own[scope] = threshold

    def of(self, scope: Scope) -> BusyThreshold:
        return self._own.get(scope, self._defaults)

    def change(self, scope: Scope, given: BusyThreshold, known: Iterable[Scope]) -> BusyThreshold:
        """Puts what `given` sets in force. Raises BadRequest, then NotFound; nothing changed."""
        given.check()
        return self._put(scope, self.of(scope).changed_by(given), set(known))

    def switch_off(self, scope: Scope, known: Iterable[Scope]) -> BusyThreshold:
        """Nothing is busy there any more, whatever the defaults. Raises NotFound."""
        return self._put(scope, OFF, set(known))

    def _put(self, scope: Scope, new: BusyThreshold, known: set[Scope]) -> BusyThreshold:
        if scope not in known:
            raise NotFound(
                f"Model '{scope[0]}' not found. Thresholds can only be set for discovered models."
            )
        self._own[scope] = new
        gone = [each for each in self._own if each not in known]
        for each in gone[: max(0, len(gone) - MAX_REMEMBERED)]:
            del self._own[each]
        return new
