"""How many seconds each rank takes per prompt token, learned from requests that were placed on it.

A sample is the time from a reservation to the first token, divided by the prefill tokens of this
request and of all requests that waited on the rank before it. A rank's speed is the median of its
last samples, once it has enough samples. A rank's factor is this speed divided by the median speed
of all ranks. A request that ends late and without a first token is also a sample, so ten such
requests make a hanging rank count as slow.

Factors are rounded to steps. A rank gets another step only if its median is well outside its
present step. So ranks of about equal speed form one set, and the chooser visits sets instead of
ranks. A slow rank without recent samples is treated as average until its next sample. Then half of
its earlier samples are dropped. Speeds are dropped with the rank. Callers pass the time."""

import bisect
import math
from collections import deque
from typing import Final

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.shapes import Reservation
from lean_selector.core.rank_bits import bits_of

WINDOW: Final = 20  # samples kept per rank; a rank's speed is unknown until it has this many
# With less prefill before a first token, too much of the time is network and engine overhead: with
# 256, a delay of 30 ms made ranks with cached prompts look slow, and cost a sixth of the hits.
LEAST_TOKENS: Final = 1_024
STEPS: Final = 4  # per doubling of the factor
MOST_STEPS: Final = 2 * STEPS  # a quarter of the fleet's speed to four times it
_HOLD: Final = 1.5  # in steps: a rank keeps its step while its median is within this distance
_FLEET_MOVES: Final = 1.1  # if the fleet's median changes by this factor, judge all ranks
_NOTHING_NEW: Final = 0.03  # if a median changes relatively by less, nothing is done
TRIED_AFTER_S: Final = 60.0

ONE_SPEED: Final = [(1.0, -1)]  # a single set: all ranks


class RankSpeed:
    def __init__(self) -> None:
        self.recent: deque[float] = deque()  # seconds per token, oldest first
        self.sorted: list[float] = []  # the same, sorted
        self.median = 0.0  # 0: unknown
        self.judged = 0.0  # the median from which the rank's step was computed
        self.last_at = -math.inf
        self.step = 0
        self.on_trial = False

    def add(self, seconds: float) -> None:
        recent, in_order = self.recent, self.sorted
        bisect.insort(in_order, seconds)
        recent.append(seconds)
        if len(recent) > WINDOW:
            self._drop_oldest()
        if self.median or len(recent) == WINDOW:
            self.median = in_order[len(in_order) >> 1]

    def forget_half(self) -> None:
        for _ in range(len(self.recent) >> 1):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = self.recent.popleft()
        del self.sorted[bisect.bisect_left(self.sorted, oldest)]


class Speeds:
    """The ranks of a partition by speed.

    Read only: `sets` has pairs (time per token relative to the median rank, set of ranks). The sets
    are disjoint. The last set has all ranks that are in no other set."""

    def __init__(self) -> None:
        self.sets: list[tuple[float, int]] = ONE_SPEED
        self._by_bit: dict[int, RankSpeed] = {}
        self.prefill_only = 0  # ranks; a rank that enters or leaves this set must be forgotten
        # By role: the known medians of ranks, sorted; and their median when steps were computed.
        self._medians: tuple[list[float], list[float]] = ([], [])
        self._reference = [0.0, 0.0]
        self._steps: dict[int, int] = {}  # step -> its ranks, without step 0
        self._slow = 0  # the ranks with a step above 0

    def completed(
        self,
        reservation: Reservation,
        ttft_s: float | None,
        now: float,
        *,
        is_first_token: bool = True,
    ) -> None:
        """Learn from the time to first token, `ttft_s`. If it is None, the token came `now`.
        Without `is_first_token`, only the prefill has ended."""
        tokens = reservation.ahead_tokens
        if tokens < LEAST_TOKENS:
            return
        seconds = now - reservation.booked_at if ttft_s is None else ttft_s
        if seconds <= 0.0:
            return
        load = reservation.rank_load
        speed = self._by_bit.get(load.bit)
        if is_first_token and speed is not None and speed.median:
            load.counts.predict(speed.median * tokens, seconds)
        self._sample(load, seconds / tokens, now)

    def ended(self, reservation: Reservation, now: float) -> None:
        """Learn from a request that ended without a first token, if it took longer than usual."""
        tokens = reservation.ahead_tokens
        known = self.seconds_per_token(reservation.rank_load)
        if tokens >= LEAST_TOKENS and known is not None:
            seconds = (now - reservation.booked_at) / tokens
            if seconds > known:
                self._sample(reservation.rank_load, seconds, now)

    def expected_s(self, reservation: Reservation) -> float:
        """Return how long the prefill of a new reservation will take; 0 if unknown."""
        tokens = reservation.ahead_tokens
        seconds = self.seconds_per_token(reservation.rank_load)
        return 0.0 if seconds is None or tokens < LEAST_TOKENS else seconds * tokens

    def seconds_per_token(self, load: RankLoad) -> float | None:
        """Return the rank's time per prompt token in seconds; None if unknown."""
        speed = self._by_bit.get(load.bit)
        return None if speed is None else speed.median or None

    def factor(self, load: RankLoad) -> float:
        """Return the rank's time per token relative to the median rank, rounded; 1.0 if unknown."""
        speed = self._by_bit.get(load.bit)
        return 1.0 if speed is None else _factor(speed.step)

    def forget(self, load: RankLoad) -> None:
        """Drop the speed of a rank that was removed, or whose worker was replaced."""
        speed = self._by_bit.pop(load.bit, None)
        if speed is None:
            return
        if speed.judged:
            self._take_median(load.bit, speed.judged)
        self._move(load.bit, speed, 0)

    def settle(self, now: float) -> None:
        """Treat slow ranks without a recent sample as of average speed, until the next sample."""
        for bit in bits_of(self._slow):
            speed = self._by_bit[bit]
            if now - speed.last_at >= TRIED_AFTER_S:
                speed.on_trial = True
                self._move(bit, speed, 0)

    def _sample(self, load: RankLoad, seconds: float, now: float) -> None:
        bit = load.bit
        speed = self._by_bit.get(bit)
        if speed is None:
            speed = self._by_bit[bit] = RankSpeed()
        was_on_trial = speed.on_trial
        if was_on_trial:
            speed.on_trial = False
            speed.forget_half()
        speed.last_at = now
        speed.add(seconds)
        median, judged = speed.median, speed.judged
        if not was_on_trial and abs(median - judged) <= _NOTHING_NEW * judged:
            return
        if judged:
            self._take_median(bit, judged)
        role = self._role(bit)
        medians = self._medians[role]
        bisect.insort(medians, median)
        speed.judged = median
        fleet = medians[(len(medians) - 1) >> 1]
        reference = self._reference[role]
        if reference <= 0.0 or not 1 / _FLEET_MOVES < fleet / reference < _FLEET_MOVES:
            self._reference[role] = fleet
            for other, known in self._by_bit.items():
                if known.judged and not known.on_trial and self._role(other) == role:
                    self._judge(other, known)
        else:
            self._judge(bit, speed)

    def _role(self, bit: int) -> int:
        """Return 1 for a rank that only prefills, else 0: the former are compared among each other
        alone, since their samples end with the prefill."""
        return self.prefill_only >> bit & 1

    def _take_median(self, bit: int, median: float) -> None:
        medians = self._medians[self._role(bit)]
        del medians[bisect.bisect_left(medians, median)]

    def _judge(self, bit: int, speed: RankSpeed) -> None:
        """Change a rank's step (rounded factor) if the rank's median is well outside the step."""
        steps = STEPS * math.log2(speed.judged / self._reference[self._role(bit)])
        steps = max(-MOST_STEPS, min(MOST_STEPS, steps))
        if abs(steps - speed.step) > _HOLD:
            self._move(bit, speed, round(steps))

    def _move(self, bit: int, speed: RankSpeed, step: int) -> None:
        mask, old = 1 << bit, speed.step
        if step == old:
            return
        speed.step = step
        by_step = self._steps
        if old:
            by_step[old] ^= mask
            if not by_step[old]:
                del by_step[old]
        if step:
            by_step[step] = by_step.get(step, 0) | mask
        self._slow = self._slow & ~mask | (mask if step > 0 else 0)
        if not by_step:
            self.sets = ONE_SPEED
            return
        rest = -1
        sets = []
        for each, ranks in by_step.items():
            sets.append((_factor(each), ranks))
            rest &= ~ranks
        sets.append((1.0, rest))
        self.sets = sets


def _factor(step: int) -> float:
    return math.exp2(step / STEPS)
