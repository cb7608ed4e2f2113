"""POST /route/<original path>: reserves a worker for a raw OpenAI request.

The answer names the worker in headers; its body is the selection if the client accepts JSON. Errors
are in OpenAI's format, so that a gateway can relay them. The answer may have to wait for tokens
from an engine. If the client disconnects before the answer, nothing is reserved. If the gateway's
access log already reported the request's end, nothing stays reserved: status 409."""

import asyncio
import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

from msgspec import UnsetType

from lean_selector.api.access import WRITE, Refusal
from lean_selector.api.replies import Answer, LaterReply, Queued, is_json
from lean_selector.api.routes import Route
from lean_selector.api.selection import SelectionService
from lean_selector.core.errors import (
    AllWorkersBusy,
    BadRequest,
    Conflict,
    NoPrefillWorker,
    NotFound,
    SelectorError,
    Unavailable,
    WaitedTooLong,
)
from lean_selector.core.load.shapes import Reservation
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.reservations import check_own_id, leg_of
from lean_selector.core.selection.shapes import NEVER, Disaggregate, Selection
from lean_selector.gateway.access_logs import LogEnds
from lean_selector.gateway.headers import RETRY_AFTER, QueueHeaders, pair_line, refusal
from lean_selector.gateway.prompt_shapes import Unknown
from lean_selector.gateway.prompts import Prompts, Routed
from lean_selector.http.head import Request
from lean_selector.http.response import JSON, Response, encode_response
from lean_selector.http.urls import endpoint_url
from lean_selector.tasks import Steps, stepped
from lean_selector.wire.scalars import json_form
from lean_selector.wire.selection_bodies import SelectAndReserveRequest

SHED: Final = 429  # some gateways rewrite a 503, or take it for a failure of the selector
# No worker is known for the model; a gateway that balances load itself may know one.
UNKNOWN: Final = 503


def worker_headers(selection: Selection, why_not: Unknown | None, *, has_body: bool) -> bytes:
    """Return the response that names the worker in headers and, if `has_body`, in the body. One
    more header has `why_not`, if given. Raises Unavailable if the worker has no HTTP endpoint."""
    overlap = selection.overlap.longest_matched
    lines = (
        b"x-gateway-destination-endpoint: %b\r\nx-worker-id: %d\r\nx-data-parallel-rank: %d\r\n"
        b"x-reservation-id: %b\r\nx-overlap-tokens: %d\r\n"
    )
    assert isinstance(selection.reservation_id, str)
    reservation_id = selection.reservation_id.encode("ascii")
    where = _authority_of(selection.endpoint)
    extra = lines % (where, selection.worker_id, selection.dp_rank, reservation_id, overlap)
    if not isinstance(prefill := selection.prefill, UnsetType):
        named = prefill_headers(prefill.endpoint, prefill.worker_id, prefill.dp_rank)
        extra += b"".join([b"%b: %b\r\n" % each for each in named.items()])
    extra += pair_line(selection.disaggregation)
    if why_not is not None:
        extra += b"x-lean-prompt: %b\r\n" % why_not.why.encode("ascii")
    if has_body:
        return encode_response(200, json_form(selection), JSON, extra)
    return encode_response(200, b"", b"", extra)


OF_PREFILL: Final = (
    b"x-prefiller-host-port",
    b"x-prefill-worker-id",
    b"x-prefill-data-parallel-rank",
)


def prefill_headers(endpoint: str, worker_id: int, dp_rank: int | None) -> dict[bytes, bytes]:
    """Return the headers that name the prefill worker of a pair; without a rank if it has only one.
    llm-d's sidecar in front of the decode worker reads the first, and runs the prefill there.
    Raises Unavailable."""
    values = [_authority_of(endpoint), b"%d" % worker_id]
    if dp_rank is not None:
        values.append(b"%d" % dp_rank)
    return dict(zip(OF_PREFILL, values, strict=False))


def _authority_of(endpoint: str) -> bytes:
    try:
        return endpoint_url(endpoint).authority.encode("ascii")
    except ValueError as error:
        raise Unavailable(f"the chosen worker has no HTTP endpoint: {error}") from None


def refusal_fields(error: SelectorError) -> tuple[int, str, str | None]:
    """Return the status for an error of the selector, its text, and OpenAI's code."""
    if isinstance(error, NotFound):
        return UNKNOWN, error.message, "model_not_found"
    # Of a 503, gateways would take any worker, also one that only decodes.
    sheds = (AllWorkersBusy, WaitedTooLong, NoPrefillWorker)
    status = SHED if isinstance(error, sheds) else error.status
    return status, error.message, None


def error_of(error: SelectorError) -> bytes:
    """Return the response for an error of the selector."""
    status, message, code = refusal_fields(error)
    return refusal(status, message, code, RETRY_AFTER if status in (SHED, UNKNOWN) else b"")


def unauthorized(refused: Refusal) -> bytes:
    """Return the answer to a gateway whose token is missing or insufficient."""
    return refusal(refused.status, refused.text, refused.code, refused.line)


_ID: Final = re.compile(rb"[!#-~]{1,256}")  # characters that access logs write unchanged
TOO_LARGE: Final = "the request body is larger than 8 MiB"

_ASSUMED_TOKENS_PER_S: Final = 5_000.0  # of a prefill worker whose speed is not known

_log = logging.getLogger("lean_selector.route")


@dataclass(eq=False)
class RouteHandler:
    """Handles POST /route/<original path>. `ends`: what access logs report, if any are read."""

    prompts: Prompts
    service: SelectionService
    ends: LogEnds | None = None
    queue_headers: QueueHeaders | None = None  # None if requests are never queued
    clock: Callable[[], float] = monotonic

    def __post_init__(self) -> None:
        self._under_way: set[asyncio.Task[None]] = set()

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("POST", "/route/{path*}", WRITE, "gateways",
                "Choose and reserve a worker for a raw OpenAI request; headers name it",
                self._answer, is_raw=True, gives=Selection, refused=unauthorized),
        )  # fmt: skip

    def _answer(self, request: Request, param: bytes | None) -> Answer:
        assert param is not None
        if request.body_too_large:
            return refusal(413, TOO_LARGE)
        try:
            reservation_id = _reservation_id(request.headers.reservation_id)
        except BadRequest as error:
            return error_of(error)
        pending = LaterReply()
        path = "/" + param.decode("latin-1")
        task = stepped(self._route(path, request, reservation_id, pending))
        if task is not None:  # it waits for tokens
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            pending.on_disconnect = task.cancel
        return pending

    def _route(
        self,
        path: str,
        request: Request,
        reservation_id: str,
        pending: LaterReply,
    ) -> Steps[None]:
        body, request.body = bytes(request.body), b""
        has_body = is_json(request.headers.accept)

        def answer_with(found: object) -> None:
            if isinstance(found, Selection):
                response = self._reply_of(found, reservation_id, routed, has_body)
            elif isinstance(found, SelectorError):
                pending.fault = found
                response = error_of(found)
            else:
                assert isinstance(found, Exception)
                _log.error("a request could not be routed", exc_info=found, extra={"path": path})
                response = refusal(500, "internal error")
            pending.resolve(response)

        try:
            routed = yield from self.prompts.read(path, body, forwards=False)
            if self.queue_headers is not None:
                self.queue_headers.read(routed, request.section, request.credential)
            self._check_live(reservation_id)
            selection = self._selection_of(routed, reservation_id)
            found = self.service.select_and_reserve(selection, routed.deadline)
        except Exception as error:
            found = error
        if isinstance(found, Queued):
            found.wait_with(pending)
            found.on_answer(answer_with)
        else:
            answer_with(found)

    def _selection_of(self, routed: Routed, reservation_id: str) -> SelectAndReserveRequest:
        prompt = routed.prompt
        worker_ids = None if routed.worker_ids is None else sorted(routed.worker_ids)
        selector = self.service.selector
        partition = selector.catalog.partitions.get((routed.model_name, routed.tenant_id))
        asked: Disaggregate = NEVER
        if partition is not None and not routed.bars_pair:
            asked = selector.pairs_asked(partition)
        sequence = prompt.sequence_hashes()  # the unknown blocks are random
        return SelectAndReserveRequest(
            reservation_id=reservation_id,
            model_name=routed.model_name,
            tenant_id=routed.tenant_id,
            block_hashes=prompt.local_hashes or sequence,
            sequence_hashes=sequence,
            isl_tokens=prompt.isl_tokens,
            lora_name=prompt.lora_name,
            fairness_id=routed.fairness_id,
            strict_priority=routed.strict_priority,
            allowed_worker_ids=worker_ids,
            disaggregate=None if asked == NEVER else asked,
            prefill_allowed_worker_ids=worker_ids,
        )

    def _reply_of(
        self, selection: Selection, reservation_id: str, routed: Routed, has_body: bool
    ) -> Response:
        """Return the answer for a reservation. Frees the reservation if no answer can be made."""
        reservations = self.service.selector.reservations
        try:
            self._check_live(reservation_id)
            reservations.expect_output(reservation_id, routed.output_tokens, self.clock())
            if not isinstance(selection.prefill, UnsetType):
                self._end_leg_in_time(selection, reservation_id)
            return worker_headers(selection, routed.why_not, has_body=has_body)
        except SelectorError as error:
            response = error_of(error)
        except Exception:
            _log.exception("the chosen worker could not be reported")
            response = refusal(500, "internal error")
        reservations.free(reservation_id, self.clock(), was_served=False)
        return response

    def _end_leg_in_time(self, selection: Selection, reservation_id: str) -> None:
        """Ends the leg of a new reservation when its prefill should be over, because few gateways
        report the first byte. If some do, so that the speed of prefill workers is known, the leg
        may take twice as long as predicted."""
        catalog = self.service.selector.catalog
        partition = catalog.partitions[selection.model_name, selection.tenant_id]
        leg = partition.slots.reservations.get(leg_of(reservation_id))
        if leg is not None:
            predicted_s = partition.speeds.expected_s(leg)
            after_s = 2.0 * predicted_s or leg.ahead_tokens / _ASSUMED_TOKENS_PER_S
            asyncio.get_running_loop().call_later(after_s, self._end_leg, partition, leg)

    def _end_leg(self, partition: Partition, leg: Reservation) -> None:
        if partition.slots.reservations.get(leg.request_id) is leg:
            leg.ahead_tokens = 0  # its end tells nothing of the speed
            self.service.selector.reservations.free(leg.request_id, self.clock())

    def _check_live(self, reservation_id: str) -> None:
        if self.ends is not None and self.ends.has_ended(reservation_id):
            raise Conflict(f"reservation {reservation_id} has ended already")

    async def close(self) -> None:
        """Cancels the requests in progress."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)


def _reservation_id(given: bytes | None) -> str:
    """Return the id that the gateway gave, or else a generated id. A gateway that gives an id can
    log this id, even if our answer never arrives."""
    if given is None:
        return str(uuid.uuid4())
    if _ID.fullmatch(given) is None:
        raise BadRequest(
            "x-reservation-id must be 1 to 256 ASCII characters without blanks or quotes"
        )
    reservation_id = given.decode("ascii")
    check_own_id("x-reservation-id", reservation_id)
    return reservation_id
