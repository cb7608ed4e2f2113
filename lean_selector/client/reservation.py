"""A client's record of a reservation: the request's progress, and what the service knows of it.

Reports of progress are sent to the service one at a time, in order. A report that the service has
not confirmed is sent again."""

import random
import uuid
from collections.abc import Awaitable, Callable

from lean_selector.client import calls
from lean_selector.client.calls import Call
from lean_selector.client.client_settings import Backoff
from lean_selector.client.errors import (
    ClientClosed,
    NotFound,
    ServiceRefused,
    ServiceUnreachable,
)


class Reservation:
    """A client's record of one reservation. Its id is random, unless the user gives an id."""

    def __init__(
        self,
        isl_tokens: int,
        *,
        reservation_id: str | None = None,
        expected_output_tokens: int | None = None,
    ) -> None:
        self.id = str(uuid.uuid4()) if reservation_id is None else reservation_id
        self.is_named = reservation_id is not None
        self.ambiguous = False  # the service may make it after it was freed
        self.ended = False  # no further reports
        self.outcome: str | None = None  # of its worker: refused, failed, ok; None: unknown
        self.cached_tokens: int | None = None  # of the prompt, as reported by the engine
        self.prefill_outcome: str | None = None  # of the other worker of a pair
        self._isl_tokens = isl_tokens
        self._expected_output_tokens = expected_output_tokens
        self._block_size: int | None = None
        self._output_tokens = 0
        self._has_output = False
        self._told_prefill = False
        self._told_blocks = 0  # output blocks reported

    def track_output(self, block_size: int) -> None:
        """Turns on the reports of full output blocks to the service."""
        self._block_size = block_size

    def output(self, tokens: int) -> None:
        """Records that the prefill is complete, and that `tokens` output tokens exist so far."""
        self._has_output = True
        self._output_tokens = max(tokens, self._output_tokens)

    def next_report(self) -> Call[None] | None:
        """Return the next progress report to send, or None if there is nothing to report."""
        if self.ended or not self._has_output:
            return None
        if not self._told_prefill:
            return calls.prefill_complete(self.id)
        size = self._block_size
        if size is None:
            return None
        # A block is full when prompt and output together reach its end, because the prompt's hashes
        # cover only its full blocks.
        filled = (self._isl_tokens + self._output_tokens) // size - self._isl_tokens // size
        if self._told_blocks >= filled:
            return None
        return calls.output_block(self.id, self._decay_fraction(size))

    def _decay_fraction(self, size: int) -> float | None:
        """Return what share of expected output is left after `size` more tokens. None: unknown."""
        if self._expected_output_tokens is None:
            return None
        done = (self._told_blocks + 1) * size
        return max(0.0, 1.0 - done / max(1, self._expected_output_tokens))

    def freeing(self) -> Call[None]:
        """Return the call that frees the reservation and reports the request's outcome."""
        return calls.free(self.id, self.outcome, self.cached_tokens, self.prefill_outcome)

    def reported(self) -> None:
        """Records that the service has received the report which next_report() returned."""
        if self._told_prefill:
            self._told_blocks += 1
        else:
            self._told_prefill = True


# -- telling the service ---------------------------------------------------------------------------

Ask = Callable[[Call[None]], Awaitable[None]]  # raises ClientError
Pause = Callable[[float], Awaitable[object]]
# Tries of a free, over some six seconds; after that the service expires the reservation.
RELEASE = Backoff(max_retries=6, first_s=0.1, longest_s=5.0)
REPORT = Backoff(max_retries=2, first_s=0.1, longest_s=1.0)
# If a free finds no reservation, the call that makes it may still arrive for this long.
AMBIGUOUS_S = 0.5


async def report(reservation: Reservation, ask: Ask, pause: Pause, rng: random.Random) -> None:
    """Sends all reports of progress that are due. The next call repeats a report that failed."""
    failures = 0
    while (call := reservation.next_report()) is not None:
        try:
            await ask(call)
        except ServiceUnreachable:
            wait_s = REPORT.wait_s(failures, rng)
            if wait_s is None:
                return
            failures += 1
            await pause(wait_s)
        except (ServiceRefused, ClientClosed):
            return  # it expired, or the service was restarted; the free will show
        else:
            reservation.reported()


async def release(reservation: Reservation, ask: Ask, pause: Pause, rng: random.Random) -> None:
    """Frees a reservation, with retries."""
    may_appear = reservation.ambiguous
    attempt = 0
    while True:
        try:
            return await ask(reservation.freeing())
        except ClientClosed:
            return None  # close() has waited as long as it could
        except NotFound:
            if not may_appear:
                return None
            may_appear = False
            await pause(AMBIGUOUS_S)
        except (ServiceUnreachable, ServiceRefused):
            wait_s = RELEASE.wait_s(attempt, rng)
            if wait_s is None:
                return None
            attempt += 1
            await pause(wait_s)
