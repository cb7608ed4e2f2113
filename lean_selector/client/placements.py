"""What a router's methods return: a rank that is reserved, and the stream of a worker's answer."""

from collections import deque
from typing import Literal, Self

from lean_selector.client import calls
from lean_selector.client.calls import Selected
from lean_selector.client.completions import Chunk, CompletionStream, MalformedStream
from lean_selector.client.drivers import Driver, Reservation
from lean_selector.client.errors import WorkerStreamBroken
from lean_selector.client.transport import Opened

Outcome = Literal["refused", "failed", "ok"]


class AsyncClosing:
    """Base class that adds `async with`, which calls aclose() at its end."""

    async def aclose(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Placed:
    """The rank chosen for a prompt, and how much of the prompt this rank has cached. With
    `prefill`, this rank only decodes, and that one does the prefill."""

    def __init__(self, selected: Selected, reservation: Reservation) -> None:
        self.worker_id = selected.worker_id
        self.dp_rank = selected.dp_rank
        self.endpoint = selected.endpoint
        self.block_size = selected.block_size
        self.overlap = selected.overlap
        self.overlap_blocks = selected.overlap_blocks
        self.effective_prefill_tokens = selected.effective_prefill_tokens
        self.prefill = selected.prefill
        self.disaggregation = selected.disaggregation
        self.reservation_id = reservation.id
        self._selected = selected
        self._reservation = reservation

    def went(
        self,
        outcome: Outcome | None,
        *,
        cached_tokens: int | None = None,
        prefill_outcome: Outcome | None = None,
    ) -> None:
        """Sets the request's outcome, which is reported to the service when the reservation is
        freed. cached_tokens: number of prompt tokens that the engine had cached; of a pair, the
        engine of `prefill`. prefill_outcome: that of this engine."""
        self._reservation.outcome = outcome
        self._reservation.prefill_outcome = prefill_outcome
        self._reservation.cached_tokens = cached_tokens


class Placement(Placed):
    """A rank that is reserved until the end of the `async with` block."""

    def __init__(self, driver: Driver, selected: Selected, reservation: Reservation) -> None:
        super().__init__(selected, reservation)
        self._driver = driver

    async def prefill_complete(self) -> None:
        """Reports that the first token has come. Raises NotFound if the reservation has expired."""
        await self._driver.ask(calls.prefill_complete(self.reservation_id))

    async def output_block(self, decay_fraction: float | None = None) -> None:
        """Reports one more full block of output to the service. With decay_fraction (0 to 1), each
        block that only this request uses counts as this fraction of a block in the rank's load."""
        await self._driver.ask(calls.output_block(self.reservation_id, decay_fraction))


class TokenStream(Placed, AsyncClosing):
    """The chunks of one generation, as dicts; see CompletionStream.

    The reservation is freed when the stream ends or fails, on aclose(), when the reading task is
    cancelled, and when this object is garbage-collected, even if no chunk was read."""

    def __init__(
        self, driver: Driver, selected: Selected, reservation: Reservation, opened: Opened
    ) -> None:
        super().__init__(selected, reservation)
        self._driver = driver
        self._opened = reservation.opened = opened
        self._completion = CompletionStream()
        self._ready: deque[Chunk] = deque()  # the chunks of one read
        self._failure: WorkerStreamBroken | None = None  # to be raised after those chunks

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while not self._ready:
                if self._failure is not None:
                    raise self._failure
                if self._is_over:
                    await self._driver.release_now(self._reservation)
                    raise StopAsyncIteration
                self._take(await self._opened.read())
                self._opened.is_done = self._is_over
                self._driver.report(self._reservation)
            return self._ready.popleft()
        except BaseException as error:
            if isinstance(error, WorkerStreamBroken):
                self.went("failed")
            self._driver.release(self._reservation)
            raise

    @property
    def _is_over(self) -> bool:
        return self._reservation.ended or self._completion.state == "done"

    def _take(self, data: bytes | None) -> None:
        """Parses the next bytes of the response (None: its end), and records progress."""
        completion = self._completion
        try:
            if data is not None:
                self._ready.extend(completion.feed(data))
            elif completion.state == "open":
                raise MalformedStream("the stream ended before it was finished")
            else:
                completion.state = "done"
        except MalformedStream as error:
            self._failure = WorkerStreamBroken(self.worker_id, self.endpoint, str(error))
        else:
            if completion.state != "open":
                self.went("ok", cached_tokens=completion.cached_tokens)
        self._reservation.output_tokens = completion.output_tokens

    async def aclose(self) -> None:
        """Stops the generation, and frees the reservation."""
        self._ready.clear()
        await self._driver.release_now(self._reservation)

    def __del__(self) -> None:
        self._driver.release_from_anywhere(self._reservation)
