"""What a caller sees of a selection, and of the stream that follows it; without I/O.

The bases of streams and placements of both routers.
"""

from collections import deque

from lean_selector.client.completions import Chunk, CompletionStream, MalformedStream
from lean_selector.client.errors import WorkerStreamBroken
from lean_selector.client.exchanges import Selected
from lean_selector.client.reservation import Reservation


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


class ChunkIntake(Placed):
    """Bytes of the worker's answer in, chunks out, and what they mean for the reservation."""

    def __init__(self, selected: Selected, reservation: Reservation) -> None:
        super().__init__(selected, reservation)
        self._reservation = reservation
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
            return
        try:
            self._ready.extend(self._completion.feed(data))
        except MalformedStream as error:
            self._failure = self._broken(str(error))
        if self._completion.output_tokens:
            self._reservation.output(self._completion.output_tokens)

    def _broken(self, reason: str) -> WorkerStreamBroken:
        return WorkerStreamBroken(self.worker_id, self.endpoint, reason)
