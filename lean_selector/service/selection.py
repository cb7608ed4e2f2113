"""The selection service as the source document has it (`--api 1.3`): its routes, and the handlers
that are its own.

API: the source document and spec selection.md. The others are in `selection_handlers`.
"""

import uuid
from collections.abc import Sequence
from typing import Any, Final

from msgspec import UNSET, UnsetType

from lean_selector.core.selection import inspection
from lean_selector.core.selection.catalog import Worker
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.settings import RouterOverride
from lean_selector.core.selection.shapes import (
    OUTLOOK,
    Booked,
    OverlapScores,
    PartitionLoads,
    Placement,
    RankLoadRow,
    Selection,
    SelectionRequest,
)
from lean_selector.service.bodies import Query
from lean_selector.service.gate import Endpoint, plain
from lean_selector.service.selection_handlers import SHUTDOWN as SHUTDOWN
from lean_selector.service.selection_handlers import SelectionHandlers
from lean_selector.service.worker_handlers import detail_of
from lean_selector.wire.prompt import prompt_to_book, prompt_to_select
from lean_selector.wire.selection import (
    ProjectionRequest,
    PromptFields,
    ReservationRequest,
    SelectAndReserveRequest,
    SelectRequest,
    SourceCondition,
    WorkerPatch,
    WorkerRequest,
)

BODIES: Final[dict[str, Any]] = {
    "/workers": WorkerRequest,
    "/workers/{worker_id}": WorkerPatch,
    "/select": SelectRequest,
    "/select_and_reserve": SelectAndReserveRequest,
    "/reservations": ReservationRequest,
    "/potential_loads": ProjectionRequest,
    "/overlap_scores": ProjectionRequest,
}


class SelectionService(SelectionHandlers):
    """The routes and handlers of the 1.3 dialect."""

    def bodies(self) -> dict[str, Any]:
        return BODIES

    def dump_endpoint(self) -> Endpoint:
        return plain(self.dump)

    def record(self, worker: Worker) -> object:
        return worker.record()

    def detail(self, worker: Worker, sources: Sequence[SourceCondition], now: float) -> object:
        return detail_of(worker, self.selector.catalog, now, sources)

    def prompt(
        self, body: PromptFields, partition: Partition, override: RouterOverride | None
    ) -> Prompt:
        return prompt_to_select(body, partition.block_size, partition.is_eagle)

    # -- selection -----------------------------------------------------------------------------

    def select(self, body: SelectRequest) -> object:
        partition = self.selector.ready_partition(body.model_name, body.group())
        request = self._request(partition, body)
        selection_id = body.selection_id
        if body.advisory:
            request.adds |= OUTLOOK
        elif self.selector.parks:
            return self._placed_or_parked(
                partition,
                request,
                lambda placement: self._selected(partition, request, selection_id, placement),
            )
        placement = self.selector.select_now(partition, request, self._clock())
        return self._selected(partition, request, selection_id, placement)

    def _selected(
        self,
        partition: Partition,
        request: SelectionRequest,
        selection_id: str | None,
        placement: Placement,
    ) -> Selection:
        if selection_id is not None:
            self._remember(partition, selection_id, request, placement)
        return self._answer(partition, selection_id, None, placement)

    def select_and_reserve(self, body: SelectAndReserveRequest) -> object:
        partition = self.selector.ready_partition(body.model_name, body.group())
        request = self._request(partition, body)
        selection_id, reservation_id = body.selection_id, body.reservation_id
        if reservation_id is None:
            reservation_id = str(uuid.uuid4())
        request.books = True
        request.reservation_id = reservation_id
        if self.selector.parks:
            return self._placed_or_parked(
                partition,
                request,
                lambda placement: self._answer(partition, selection_id, reservation_id, placement),
            )
        placement = self.selector.select_now(partition, request, self._clock())
        return self._answer(partition, selection_id, reservation_id, placement)

    def _answer(
        self,
        partition: Partition,
        selection_id: str | None,
        reservation_id: str | None,
        placement: Placement,
    ) -> Selection:
        outlook = placement.outlook
        return Selection(
            UNSET if selection_id is None else selection_id,
            UNSET if reservation_id is None else reservation_id,
            partition.model_name,
            partition.tenant_id,
            placement.worker_id,
            placement.dp_rank,
            placement.endpoint,
            placement.block_size,
            placement.overlap,
            placement.effective_prefill_tokens,
            UNSET if isinstance(outlook, UnsetType) else self._worker_load(outlook),
            placement.explain,
        )

    # -- reservations --------------------------------------------------------------------------

    def reserve(self, body: ReservationRequest) -> Booked:
        key, selection_id = (body.model_name, body.group()), body.selection_id
        worker_id, reservation_id = body.worker_id, body.reservation_id
        if selection_id is not None:
            if not isinstance(worker_id, int):
                if isinstance(reservation_id, UnsetType):
                    reservation_id = selection_id
                return self._replayed(key, selection_id, reservation_id)
            self.selector.selections.drop(key, selection_id)
        assert isinstance(worker_id, int)  # the body was checked
        assert isinstance(reservation_id, str)
        partition = self.selector.ready_partition(*key)
        is_learned = partition.routed is not None
        prompt = prompt_to_book(
            body, partition.block_size, partition.is_eagle, is_learned=is_learned
        )
        return self.selector.bookings.reserve(
            partition,
            reservation_id,
            worker_id,
            body.dp_rank or 0,
            prompt,
            body.effective_prefill_tokens,
            self._clock(),
            body.expected_output_tokens,
            self._terms(body.router_config_override).track_prefill,
        )

    # -- inspection ----------------------------------------------------------------------------

    def loads(self, query: Query) -> list[PartitionLoads]:
        model_name, tenant_id = query.get("model_name"), query.get("tenant_id")
        return inspection.loads(self.selector.catalog, model_name, tenant_id, self._clock())

    def potential_loads(self, body: ProjectionRequest) -> list[RankLoadRow]:
        return self.potential_rows(body, body.router_config_override)

    def overlap_scores(self, body: ProjectionRequest) -> OverlapScores:
        return self.overlap_rows(body, body.router_config_override)
