"""Chooses and books a worker for a request: calls of the selector in this process."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from lean_selector.core.errors import (
    AllWorkersBusy,
    NotFound,
    SelectorError,
)
from lean_selector.core.selection.partition import Parked, Partition
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import Placement, SelectionRequest
from lean_selector.gateway.lease import WorkerLease
from lean_selector.http.client import Upstream

if TYPE_CHECKING:
    from lean_selector.prompts.routed import Routed


class NobodyChose(Exception):
    """The selector has no worker for the request: it goes to the workers in turn.

    `why` is a word for the metrics."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Shed(Exception):
    """All workers are busy: the client is to come again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Chooser:
    """`clock` is monotonic seconds; `endpoint` gives the one of a base URL."""

    def __init__(
        self,
        selector: Selector,
        endpoint: Callable[[str], Upstream],
        clock: Callable[[], float],
        overload_status: int,
    ) -> None:
        self._selector = selector
        self._endpoint = endpoint
        self._clock = clock
        self._overload_status = overload_status

    async def choose(
        self, routed: "Routed", reservation_id: str, avoided: frozenset[int]
    ) -> WorkerLease:
        """Chooses a worker that is not in `avoided`, and books it. Raises NobodyChose and Shed.

        A caller that cancels it holds nothing.
        """
        selector = self._selector
        try:
            partition = selector.ready_partition(routed.model_name, routed.tenant_id)
            request = SelectionRequest(routed.prompt, selector.terms)
            request.books = True
            request.reservation_id = reservation_id
            request.allowed_worker_ids = _allowed(partition, routed.worker_ids, avoided)
            if selector.parks:
                placement = await self._parked(partition, request)
            else:
                placement = selector.select_now(partition, request, self._clock())
        except AllWorkersBusy as error:
            raise Shed(self._overload_status, error.message) from None
        except SelectorError as error:
            if error.status == 503:
                raise NobodyChose("no_worker") from None
            raise NobodyChose("refused") from None
        try:
            endpoint = self._endpoint(placement.endpoint)
        except ValueError:
            selector.free(reservation_id, self._clock())
            raise NobodyChose("no_url") from None
        worker = partition.workers.get(placement.worker_id)
        has_ranks = worker is not None and len(worker.loads) > 1
        return CoreLease(
            selector,
            self._clock,
            reservation_id,
            endpoint,
            placement.worker_id,
            placement.dp_rank if has_ranks else None,
            routed.prompt.isl_tokens - placement.effective_prefill_tokens,
        )

    async def _parked(self, partition: Partition, request: SelectionRequest) -> Placement:
        """Waits for room, if need be."""
        answer: asyncio.Future[Placement | Exception] = asyncio.get_running_loop().create_future()

        def on_answer(parked: Parked, outcome: Placement | Exception) -> None:
            if not answer.done():
                answer.set_result(outcome)
            elif isinstance(outcome, Placement):  # cancelled a moment ago
                self._selector.free(request.reservation_id, self._clock())

        selector = self._selector
        outcome = selector.select(partition, request, self._clock(), on_answer)
        if not isinstance(outcome, Parked):
            return outcome
        limit_s = selector.settings.queue_max_wait_s
        try:
            async with asyncio.timeout(limit_s):
                given = await answer
        except TimeoutError:
            self._leave(partition, outcome, request, answer)
            raise Shed(
                self._overload_status, f"no worker became free within {limit_s:g} seconds"
            ) from None
        except asyncio.CancelledError:
            self._leave(partition, outcome, request, answer)
            raise
        if isinstance(given, Exception):
            raise given
        return given

    def _leave(
        self,
        partition: Partition,
        parked: Parked,
        request: SelectionRequest,
        answer: "asyncio.Future[Placement | Exception]",
    ) -> None:
        """Nobody waits any more; what was booked in the same moment is freed."""
        now = self._clock()
        if answer.done() and not answer.cancelled() and isinstance(answer.result(), Placement):
            self._selector.free(request.reservation_id, now)
        else:
            self._selector.hung_up(partition, parked, now)


def _allowed(
    partition: Partition, allowed: frozenset[int] | None, avoided: frozenset[int]
) -> frozenset[int] | None:
    """Whom a request may go to; None: anybody."""
    if not avoided:
        return allowed
    left = (frozenset(partition.workers) if allowed is None else allowed) - avoided
    if not left & partition.workers.keys():
        raise NobodyChose("all_failed")
    return left


class CoreLease(WorkerLease):
    """A reservation in this process."""

    def __init__(
        self,
        selector: Selector,
        clock: Callable[[], float],
        reservation_id: str,
        endpoint: Upstream,
        worker_id: int,
        dp_rank: int | None,
        overlap_tokens: int,
    ) -> None:
        super().__init__(endpoint, worker_id, dp_rank, overlap_tokens)
        self._selector = selector
        self._clock = clock
        self._id = reservation_id

    def _begun(self) -> None:
        with contextlib.suppress(NotFound):  # it went with its worker's registration
            self._selector.prefill_complete(self._id, self._clock())

    def _touched(self) -> None:
        with contextlib.suppress(NotFound):
            self._selector.output_block(self._id, None, self._clock())

    def _freed(self, outcome: str | None, cached_tokens: int | None) -> None:
        now = self._clock()
        try:
            self._selector.end(self._id, outcome, cached_tokens, now)
        except NotFound:
            if outcome is not None and self.worker_id in self._selector.catalog.workers:
                self._selector.health.report(self.worker_id, None, outcome, now)
