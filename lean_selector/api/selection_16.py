"""The selection service for clients of Dynamo 1.6 (`--api 1.6`): routes and handlers that differ.

A reservation's id is called `selection_id`. While a request is queued, no other request can use its
id. A prompt may be empty. `potential_decode_blocks` counts the prompt's incomplete last block.
Answers have more fields. Spec: selection_16.md. Other handlers: `selection`."""

import secrets
import uuid
from typing import Any, ClassVar, Final

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from lean_selector.api.bodies import DETAIL, Query, wants_detail
from lean_selector.api.replies import Answer
from lean_selector.api.selection import SelectionService, outlook_of
from lean_selector.core.hashing import unpack_signed
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.reservations import check_own_id
from lean_selector.core.selection.router_settings import RouterOverride
from lean_selector.core.selection.shapes import (
    HINT,
    LOAD,
    OUTLOOK,
    SELECT_AND_RESERVE,
    Booked,
    OverlapScores,
    PartitionLoads,
    Placement,
    RankOutlook,
    Selection,
    SelectionRequest,
)
from lean_selector.wire.prompt_forms import prompt_to_select
from lean_selector.wire.selection_16_bodies import (
    Booked16,
    KvHint,
    PartitionLoads16,
    ReservationRequest16,
    SelectAndReserveRequest16,
    Selection16,
)
from lean_selector.wire.selection_bodies import (
    ProjectionRequest,
    PromptFields,
    ReservationFields,
    ReservationRequest,
    SelectAndReserveRequest,
)

REPLACES: Final[dict[Any, Any]] = {
    SelectAndReserveRequest: SelectAndReserveRequest16,
    ReservationRequest: ReservationRequest16,
    Selection: Selection16,
    Booked: Booked16,
    list[PartitionLoads]: list[PartitionLoads16],
}


class SelectionService16(SelectionService):
    """The handlers of the API of Dynamo 1.6 (`--api 1.6`)."""

    replaces: ClassVar[dict[Any, Any]] = REPLACES
    dump_query: ClassVar[frozenset[str]] = DETAIL
    adds_to_select: ClassVar[int] = OUTLOOK

    def dump_of(self, query: Query | None = None) -> Answer:
        return self.dump(as_1_6=not wants_detail(query or {}))

    def prompt(
        self, body: PromptFields, partition: Partition, override: RouterOverride | None
    ) -> Prompt:
        prompt = prompt_to_select(body, partition.block_size, partition.is_eagle, may_be_empty=True)
        return self._reused_or_not(prompt, override)

    def prompt_to_book(self, body: ReservationFields, partition: Partition) -> Prompt:
        prompt = super().prompt_to_book(body, partition)
        return self._reused_or_not(prompt, body.router_config_override)

    def _reused_or_not(self, prompt: Prompt, override: RouterOverride | None) -> Prompt:
        """Return `prompt`, with random sequence hashes if KV reuse is off and none were sent."""
        reuses = None if override is None else override.assume_kv_reuse
        if reuses is None:
            reuses = self.selector.settings.assume_kv_reuse
        if not reuses:
            prompt.forget_likeness(secrets.token_bytes)
        return prompt

    # -- selection ---------------------------------------------------------------------------------

    def select_and_reserve(self, body: Any, deadline: float | None = None) -> object:
        assert isinstance(body, SelectAndReserveRequest16)
        selection_id = str(uuid.uuid4()) if body.selection_id is None else body.selection_id
        partition = self.selector.catalog.ready_partition(body.model_name, body.group())
        self.selector.reservations.check_unclaimed(selection_id, partition)
        request = self._request(partition, body)
        check_own_id("selection_id", selection_id, has_leg=request.asks_pair)
        request.adds |= OUTLOOK | HINT
        request.books = True
        request.asked_at = SELECT_AND_RESERVE
        request.reservation_id = selection_id

        def shape(placement: Placement) -> Selection16:
            key = partition.model_name, partition.tenant_id
            self.selector.selections.drop(key, selection_id)
            return self._answer(partition, request, selection_id, placement)

        found = self.selector.select(partition, request, self._clock())
        return self._queued(found, shape) if isinstance(found, Waiting) else shape(found)

    def _answer(
        self,
        partition: Partition,
        request: SelectionRequest,
        selection_id: str | None,
        placement: Placement,
    ) -> Selection16:
        outlook = outlook_of(placement)
        hashes: tuple[int, ...] | UnsetType = UNSET
        isl_tokens: int | UnsetType = UNSET
        tracks: bool | UnsetType = UNSET
        hint: KvHint | UnsetType = UNSET
        if request.books:
            hashes = unpack_signed(request.prompt.sequence_hashes())
            isl_tokens, tracks = request.prompt.isl_tokens, request.terms.track_prefill
            if not isinstance(placement.prefill, UnsetType):
                tracks = False
            if outlook.hint is not None:
                hint = KvHint.of(outlook.hint, request.reservation_id)
        return Selection16(
            UNSET if selection_id is None else selection_id,
            hashes,
            isl_tokens,
            tracks,
            partition.model_name,
            partition.tenant_id,
            placement.worker_id,
            placement.dp_rank,
            placement.endpoint,
            placement.block_size,
            placement.overlap,
            placement.effective_prefill_tokens,
            outlook.potential_decode_blocks,
            self._is_busy(outlook),
            self._worker_load(placement) if request.adds & LOAD else UNSET,
            hint,
            placement.explain,
            placement.prefill,
            placement.disaggregation,
        )

    def _is_busy(self, outlook: RankOutlook) -> bool | UnsetType:
        """Whether the rank's active blocks, with this prompt, would exceed the decode busy
        threshold. UNSET without this threshold, or if the rank's total_kv_blocks is unknown."""
        threshold, blocks = self.selector.settings.decode_busy_threshold, outlook.total_kv_blocks
        if threshold is None or blocks is None:
            return UNSET
        return outlook.potential_decode_blocks > threshold * blocks

    # -- reservations ------------------------------------------------------------------------------

    def reserve(self, body: Any) -> Booked16:
        assert isinstance(body, ReservationRequest16)
        key, selection_id = (body.model_name, body.group()), body.selection_id
        worker_id = body.worker_id
        check_own_id("selection_id", selection_id, has_leg=body.prefill is not None)
        if worker_id is None:
            return Booked16.of(self._replayed(key, selection_id, selection_id))
        self.selector.selections.drop(key, selection_id)
        books_prefill = body.track_prefill_tokens is not False
        return Booked16.of(
            self._booked(key, body, worker_id, selection_id, books_prefill=books_prefill)
        )

    # -- inspection --------------------------------------------------------------------------------

    def loads(self, query: Query) -> list[PartitionLoads16]:
        return [PartitionLoads16.of(row) for row in super().loads(query)]

    def overlap_scores(self, body: ProjectionRequest) -> OverlapScores:
        scores: OverlapScores = super().overlap_scores(body)
        rows = [replace(row, router_credit_blocks=UNSET) for row in scores.workers]
        return replace(scores, workers=rows)
