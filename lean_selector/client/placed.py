"""What a caller sees of a selection, and of the stream that follows it; without I/O.

The bases of streams and placements of both routers.
"""

from collections import deque
from typing import Literal

from lean_selector.client.completions import Chunk, CompletionStream, MalformedStream
from lean_selector.client.errors import WorkerStreamBroken
from lean_selector.client.exchanges import Selected
from lean_selector.client.reservation import Reservation

Outcome = Literal["refused", "failed", "ok"]


class Placed:
    """Where a prompt was placed. Tokens and blocks are those of the chosen rank."""

    def __init__(self, selected: Selected, reservation: Reservation) -> None:
        self.worker_id = selected.worker_id
        self.dp_rank = selected.dp_rank
        self.endpoint = selected.endpoint
        self.block_size = selected.block_size
        self.overlap = selected.overlap
        self.overlap_blocks = selected.overlap_blocks
        self.effective_prefill_tokens = selected.effective_prefill_tokens
        self.reservation_id = reservation.id
        self._reservation = reservation

    def went(self, outcome: Outcome | None, *, cached_tokens: int | None = None) -> None:
        """How the worker did, told with the end of the reservation: a worker that fails is given
        no requests for a while. cached_tokens: of the prompt, as the engine counted them."""
        self._reservation.outcome = outcome
        self._reservation.cached_tokens = cached_tokens


class ChunkIntake(Placed):
    """Bytes of the worker's answer in, chunks out, and what they mean for the reservation."""

    def __init__(self, selected: Selected, reservation: Reservation) -> None:
        super().__init__(selected, reservation)
        self._completion = CompletionStream()
        self._ready: deque[Chunk] = deque()  # the chunks of one read
        self._failure: WorkerStreamBroken | None = None  # reported after those

    @property
    def _is_over(self) -> bool:
        return self._reservation.ended or self._completion.state == "done"

    def _take(self, data: bytes | None) -> None:
        """Take what was read; None is the end of the answer. Raises WorkerStreamBroken."""
        if data is None:
            if self._completion.state == "open":
                raise self._broken("the stream ended before it was finished")
            self._completion.state = "done"
            self._tell_outcome()
            return
        try:
            self._ready.extend(self._completion.feed(data))
        except MalformedStream as error:
            self._failure = self._broken(str(error))
        self._tell_outcome()
        if self._completion.output_tokens:
            self._reservation.output(self._completion.output_tokens)

    def _note(self, error: BaseException) -> None:
        """What ended the stream, told or not."""
        if isinstance(error, WorkerStreamBroken):
            self.went("failed")

    def _tell_outcome(self) -> None:
        if self._failure is not None:
            self.went("failed")
        elif self._completion.state != "open":
            self.went("ok", cached_tokens=self._completion.cached_tokens)

    def _broken(self, reason: str) -> WorkerStreamBroken:
        return WorkerStreamBroken(self.worker_id, self.endpoint, reason)
