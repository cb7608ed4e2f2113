"""Which ranks may get new requests: busy thresholds, and ranks with room for queued requests."""

import math
from collections.abc import Iterable

from lean_selector.core.errors import NotFound
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.shapes import OFF, BusyThreshold, RankLimits
from lean_selector.core.rank_bits import RankKey

# -- busy thresholds -------------------------------------------------------------------------------
# Busy thresholds: which ranks and workers may still get new work.
#
# Follows "Busy Detection Logic" of the load-shedding document and slot_tracker.md 4.3. A rank is
# busy if it is above any limit that is set, not if it is at the limit. A worker is busy only if all
# of its ranks are. An unknown value (a capacity that the worker did not report) is never above a
# limit. How loads are counted does not matter here.

# Thresholds outlive the last worker of a model, so that they apply again when it restarts. For
# models without workers this many are stored; the oldest are dropped first.
MAX_REMEMBERED = 1024

Scope = tuple[str, str]


class BusyThresholds:
    """The busy thresholds of each model and tenant. If none were set, the defaults apply."""

    def __init__(self, defaults: BusyThreshold = OFF) -> None:
        self._defaults = defaults
        self._own: dict[Scope, BusyThreshold] = {}

    def own(self) -> list[tuple[Scope, BusyThreshold]]:
        """Return each model and tenant that has thresholds of its own, with these thresholds."""
        return list(self._own.items())

    def restore(self, scope: Scope, threshold: BusyThreshold) -> None:
        """Set thresholds that were saved before a restart. Raises BadRequest."""
        threshold.check()
        self._own[scope] = threshold

    def of(self, scope: Scope) -> BusyThreshold:
        return self._own.get(scope, self._defaults)

    def change(self, scope: Scope, given: BusyThreshold, known: Iterable[Scope]) -> BusyThreshold:
        """Set the limits in `given`. Raises BadRequest; NotFound if `scope` is not in `known`."""
        given.check()
        return self._put(scope, self.of(scope).changed_by(given), set(known))

    def switch_off(self, scope: Scope, known: Iterable[Scope]) -> BusyThreshold:
        """Turn off all limits of `scope`, even the defaults. Raises NotFound if not in `known`."""
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


# -- ranks that may admit queued requests ----------------------------------------------------------
# Ranks that may admit queued requests, updated as loads change (D11).
#
# A rank is `below` if its prefill tokens are at most the queue's threshold times its worker's batch
# size, and `idle` if it is within its busy limits. Both are sets of ranks as bits (`RankBits`), so
# no request has to visit the ranks. `came_free` has the ranks that entered one of the sets since it
# was last emptied. So an event only visits requests that could use those ranks.


class Headroom:
    """The ranks of a partition that have room for queued requests. Used only if queueing is on."""

    def __init__(self, threshold: float) -> None:
        """A rank has room if at most `threshold` * max_num_batched_tokens prefill tokens wait."""
        self._threshold = threshold
        self.below = self.idle = 0
        self.avoided = 0  # draining ranks, and ejected ones while others serve
        self.avoided_by_role: dict[str, int] = {}  # the same for a part of a request
        self.came_free = 0
        self.now = -math.inf  # the latest time given
        self._limits: dict[RankKey, tuple[float, RankLimits]] = {}

    @property
    def free(self) -> int:
        """The ranks with room, not busy or draining. Includes ejected ranks if no others serve."""
        return self.below & self.idle & ~self.avoided

    def put(self, load: RankLoad, max_num_batched_tokens: int, busy: RankLimits) -> None:
        """Add a rank, or update a rank whose limits or eligibility changed."""
        self._limits[load.key] = self._threshold * max_num_batched_tokens, busy
        self.changed(load)
        self.came_free |= load.mask

    def drop(self, load: RankLoad) -> None:
        """Remove a rank that the partition no longer has."""
        del self._limits[load.key]
        others = ~load.mask
        self.below &= others
        self.idle &= others
        self.came_free &= others
        self.avoided &= others

    def changed(self, load: RankLoad) -> None:
        """Update a rank whose load changed. Ignores ranks that were not added with `put`."""
        limits = self._limits.get(load.key)
        if limits is None:
            return
        most, busy = limits
        mask, tokens = load.mask, load.active_prefill_tokens
        is_over = tokens > most
        if is_over is bool(self.below & mask):
            self.below ^= mask
            if not is_over:
                self.came_free |= mask
        is_busy = busy.exceeded_by(tokens, load.active_decode_blocks)
        if is_busy is bool(self.idle & mask):
            self.idle ^= mask
            if not is_busy:
                self.came_free |= mask

    def advance(self, now: float) -> None:
        if now > self.now:
            self.now = now
