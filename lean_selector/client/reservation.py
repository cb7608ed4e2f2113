"""One reservation, as its owner sees it: what has happened, and what the service knows of it.

The stream only says what happened; what is still to be told follows from the difference. So
reports never queue up, keep their order, and a lost one is made up for by the next. No I/O.
"""

import uuid

from lean_selector.client import service_calls
from lean_selector.client.exchanges import Call


class Reservation:
    """Ids are random, and never used again, unless the user gives one."""

    def __init__(
        self,
        isl_tokens: int,
        *,
        reservation_id: str | None = None,
        expected_output_tokens: int | None = None,
    ) -> None:
        self.id = str(uuid.uuid4()) if reservation_id is None else reservation_id
        self.is_named = reservation_id is not None
        self.ambiguous = False  # the service may book it after we ask to free it
        self.ended = False  # nothing is reported any more
        self.outcome: str | None = None  # how its worker did: refused, failed, ok; None: not told
        self.cached_tokens: int | None = None  # of the prompt, as the engine counted them
        self._isl_tokens = isl_tokens
        self._expected_output_tokens = expected_output_tokens
        self._block_size: int | None = None
        self._output_tokens = 0
        self._has_output = False
        self._told_prefill = False
        self._told_blocks = 0  # <= output blocks filled

    def track_output(self, block_size: int) -> None:
        """From here on output blocks are reported, too."""
        self._block_size = block_size

    def output(self, tokens: int) -> None:
        """The prompt is computed, and `tokens` have been generated up to now."""
        self._has_output = True
        self._output_tokens = max(tokens, self._output_tokens)

    def next_report(self) -> Call[None] | None:
        """The first thing that the service has not been told."""
        if self.ended or not self._has_output:
            return None
        if not self._told_prefill:
            return service_calls.prefill_complete(self.id)
        size = self._block_size
        if size is None:
            return None
        # A block fills when prompt and output together reach its end: the prompt's own hashes
        # stand for its full blocks only.
        filled = (self._isl_tokens + self._output_tokens) // size - self._isl_tokens // size
        if self._told_blocks >= filled:
            return None
        return service_calls.output_block(self.id, self._decay_fraction(size))

    def _decay_fraction(self, size: int) -> float | None:
        """How much of the expected output is still to come, as in the reference."""
        if self._expected_output_tokens is None:
            return None
        done = (self._told_blocks + 1) * size
        return max(0.0, 1.0 - done / max(1, self._expected_output_tokens))

    def freeing(self) -> Call[None]:
        """Its end, and how its worker did."""
        return service_calls.free(self.id, self.outcome, self.cached_tokens)

    def reported(self) -> None:
        """What next_report() returned has reached the service."""
        if self._told_prefill:
            self._told_blocks += 1
        else:
            self._told_prefill = True
