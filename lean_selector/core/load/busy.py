"""Which ranks may get new work: busy thresholds, and the ranks with room for queued requests."""

import heapq
import math
from collections.abc import Iterable

from lean_selector.core.errors import NotFound
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.shapes import OFF, BusyThreshold, RankLimits
from lean_selector.core.rank_bits import RankKey

# --------------------------------------------------------------------------------------------------
# Busy thresholds: which ranks and workers may still get new work.
#
# Follows "Busy Detection Logic" of the load-shedding document and slot_tracker.md 4.3: a rank is
# busy above any limit that is set, not at it; a worker only when all of its ranks are. An unknown
# value (a capacity that the worker did not report) exceeds nothing. Does not know how loads are
# counted.

# Thresholds outlive their model's last worker, so that a restarted worker finds them again. For
# models without workers this many are kept; the oldest are dropped first.
MAX_REMEMBERED = 1024

Scope = tuple[str, str]


class BusyThresholds:
    """The thresholds of every model and tenant: its own, or else the defaults."""

    def __init__(self, defaults: BusyThreshold = OFF) -> None:
        self._defaults = defaults
        self._own: dict[Scope, BusyThreshold] = {}

    def own(self) -> list[tuple[Scope, BusyThreshold]]:
        """Thresholds set for a model and tenant, the oldest first."""
        return list(self._own.items())

    def restore(self, scope: Scope, threshold: BusyThreshold) -> None:
        """Restore what `own` returned in an earlier process. Raises BadRequest."""
        threshold.check()
        self._own[scope] = threshold

    def of(self, scope: Scope) -> BusyThreshold:
        return self._own.get(scope, self._defaults)

    def change(self, scope: Scope, given: BusyThreshold, known: Iterable[Scope]) -> BusyThreshold:
        """Set the given thresholds. Raises BadRequest, then NotFound; then nothing has changed."""
        given.check()
        return self._put(scope, self.of(scope).changed_by(given), set(known))

    def switch_off(self, scope: Scope, known: Iterable[Scope]) -> BusyThreshold:
        """Disable thresholds for the model, including the defaults. Raises NotFound."""
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


# --------------------------------------------------------------------------------------------------
# Ranks that may admit queued requests, updated as loads change (D11).
#
# A rank is `below` while its prefill tokens are at most the queue's threshold of its worker's batch
# size, and `idle` while it is within its busy limits. Both are sets of ranks as bits (`RankBits`),
# so that a request need not look at the ranks. `came_free` has the ranks that entered one of them
# since it was last emptied, so that an event looks only at requests that could use them.
#
# Decaying load falls without an event. The time when it will is computed, and `advance` looks at
# the ranks whose time has come. Exact for the latest time given.

Fall = tuple[float, int, RankLoad]  # (time to look, serial, rank)

# Looked at this much before the computed time, which is rounded, and then until it has fallen.
_MARGIN_S = 1e-6
_FEW_FALLS = 64


class Headroom:
    """Ranks with room, for one partition with a queue."""

    def __init__(self, threshold: float) -> None:
        """`threshold` is a fraction of a worker's batch size; infinity never queues."""
        self._threshold = threshold
        self.below = self.idle = 0
        self.avoided = 0  # the partition's ranks that only requests tied to them may use
        self.came_free = 0
        self.now = -math.inf  # the latest time given
        self._limits: dict[RankKey, tuple[float, RankLimits]] = {}
        self._falls: list[Fall] = []  # a heap, with outdated entries
        self._falling: dict[RankKey, Fall] = {}  # the current entries
        self._serial = 0

    @property
    def free(self) -> int:
        """The ranks that an unrestricted request may use."""
        return self.below & self.idle & ~self.avoided

    def put(
        self, load: RankLoad, max_num_batched_tokens: int, busy: RankLimits, now: float
    ) -> None:
        """Add a rank, or update one whose limits or eligibility changed."""
        self._limits[load.key] = self._threshold * max_num_batched_tokens, busy
        self.changed(load, now)
        self.came_free |= load.mask

    def drop(self, load: RankLoad) -> None:
        """A rank is gone."""
        del self._limits[load.key]
        self._falling.pop(load.key, None)
        others = ~load.mask
        self.below &= others
        self.idle &= others
        self.came_free &= others
        self.avoided &= others

    def changed(self, load: RankLoad, now: float) -> None:
        """A rank's load has changed; ranks that were not added are ignored."""
        limits = self._limits.get(load.key)
        if limits is None:
            return
        if now > self.now:
            self.now = now
        most, busy = limits
        mask, blocks = load.mask, load.active_decode_blocks
        wears_off = load.decay is not None
        tokens = load.prefill_tokens_at(self.now) if wears_off else load.active_prefill_tokens
        is_over = tokens > most
        if is_over is bool(self.below & mask):
            self.below ^= mask
            if not is_over:
                self.came_free |= mask
        is_busy = busy.exceeded_by(tokens, blocks)
        if is_busy is bool(self.idle & mask):
            self.idle ^= mask
            if not is_busy:
                self.came_free |= mask
        if wears_off or self._falling:
            self._falling.pop(load.key, None)
            if wears_off and (is_over or is_busy):
                self._await_fall(load, is_over, is_busy)

    def advance(self, now: float) -> None:
        """Look at the ranks whose load has decayed far enough by now."""
        falls = self._falls
        if now > self.now:
            self.now = now
        while falls and falls[0][0] <= self.now:
            fall = heapq.heappop(falls)
            load = fall[2]
            awaited = self._falling.get(load.key)
            if awaited is not None and awaited[1] == fall[1]:  # by serial: tuples may be copied
                self.changed(load, now)

    def _await_fall(self, load: RankLoad, is_over: bool, is_busy: bool) -> None:
        """Schedule a look at the rank for when it falls below the first of its limits."""
        assert load.decay is not None
        most, busy = self._limits[load.key]
        first = most if is_over else -math.inf
        if is_busy and load.active_decode_blocks <= busy.decode_blocks:
            first = max(first, busy.prefill_tokens)
        if first < 0.0:
            return  # it is busy with blocks, which do not decay
        when = load.decay.reaches_at(load.active_prefill_tokens, first) - _MARGIN_S
        if when == math.inf:
            return
        if when <= self.now:
            when = math.nextafter(self.now, math.inf)
        self._serial += 1
        fall = when, self._serial, load
        self._falling[load.key] = fall
        if len(self._falls) > _FEW_FALLS + 2 * len(self._falling):
            self._falls[:] = self._falling.values()
            heapq.heapify(self._falls)
        else:
            heapq.heappush(self._falls, fall)
