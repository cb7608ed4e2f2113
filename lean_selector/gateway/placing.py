"""Brings a request to a worker: reads the prompt, chooses a worker, and connects.

A request may wait only here: for tokens from an engine, for a free worker, or for a connection. A
request that does not have to wait has no task, and is sent at once. If a client disconnects while
its request waits, the task is cancelled, and the request's reservation ends."""

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Final

import msgspec

from lean_selector.api.gate import RouteMeter
from lean_selector.core.errors import (
    AllWorkersBusy,
    BadRequest,
    NoPrefillWorker,
    NotFound,
    SelectorError,
    TooLate,
    UnknownModel,
    WaitedTooLong,
)
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.reservations import leg_of
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import (
    GATEWAY,
    NEVER,
    PREFILL,
    Disaggregated,
    Placement,
    PrefillPlacement,
    SelectionRequest,
)
from lean_selector.gateway.fleet import GatewayFleet
from lean_selector.gateway.gateway_metrics import Counts
from lean_selector.gateway.headers import (
    RETRY_AFTER,
    QueueHeaders,
    pair_text,
    read_session,
    retry_after,
)
from lean_selector.gateway.prompt_shapes import NamesModel
from lean_selector.gateway.prompts import NO_PARAMS, Prompts, Routed
from lean_selector.gateway.proxied_request import ProxiedRequest
from lean_selector.gateway.upstreams import Rotation, WorkerUse
from lean_selector.http.allowed_endpoints import AllowedEndpoints
from lean_selector.http.client import ClientConnection, Upstream
from lean_selector.http.outbound import Resolve, connect, reason
from lean_selector.tasks import Steps, stepped

log = logging.getLogger("lean_selector.gateway")

CONNECT_S: Final = 5.0
MOST_ATTEMPTS: Final = 5
# If the index lacks more than this share of a worker's recently cached tokens, the worker is asked
# to announce its blocks again.
MOST_MISSED: Final = 0.01

_NOBODY: Final = frozenset[int]()
_OBJECT: Final = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*+\{")  # perhaps behind a BOM

_decode = msgspec.json.Decoder(NamesModel).decode


class NotChosen(Exception):
    """The selector chose no worker, so the request is sent round-robin. `why` is a metric label."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class NoPair(NotChosen):
    """No pair of workers can serve the request, and one worker alone must not. `message` is for the
    client."""

    def __init__(self, message: str) -> None:
        super().__init__("no_pair")
        self.message = message


class Shed(Exception):
    """All workers are busy. `line` is the header line `retry-after` for the client."""

    def __init__(self, message: str, line: bytes) -> None:
        super().__init__(message)
        self.line = line


@dataclass(eq=False)
class Chooser:
    """Chooses and reserves a worker for a completion, through the selector.

    `slow_start_s`: for this many seconds after an ejection, a worker gets fewer requests.
    `asked_at` names in metrics where requests come from."""

    selector: Selector
    rotation: Rotation
    overload_status: int = 503
    slow_start_s: float = 0.0
    asked_at: str = GATEWAY

    def __post_init__(self) -> None:
        self.meter = RouteMeter("POST", self.asked_at)

    def choose(
        self,
        routed: Routed,
        reservation_id: str,
        avoided: frozenset[int],
        doubted: frozenset[int] = _NOBODY,
        leg: WorkerUse | None = None,
    ) -> Steps[WorkerUse]:
        """Chooses and reserves a worker, or a pair, that is not in `avoided`, and in `doubted` only
        if there is no other. With `leg`, the use of a prefill worker that has answered, chooses
        only a decode worker. Raises NotChosen, NoPair, Shed and TooLate. A cancelled call reserves
        nothing."""
        started, status = perf_counter(), 499
        try:
            use = yield from self._choose(routed, reservation_id, avoided, doubted, leg)
            status = 200
            return use
        except NotChosen:
            status = 503
            raise
        except (AllWorkersBusy, WaitedTooLong) as busy:
            status = self.overload_status
            self.meter.refused(busy)
            waited_s = busy.limit_s if isinstance(busy, WaitedTooLong) else 0.0
            raise Shed(busy.message, retry_after(self._wait_s(routed, waited_s))) from None
        except TooLate as late:
            status = late.status
            raise
        except SelectorError as error:
            status = error.status
            self.meter.refused(error)
            if isinstance(error, NoPrefillWorker) or (status == 503 and self.needs_pair(routed)):
                raise NoPair(error.message) from None
            raise NotChosen("no_worker" if status == 503 else "refused") from None
        finally:
            self.meter.add(perf_counter() - started, b"%d" % status)

    def _wait_s(self, routed: Routed, waited_s: float) -> float:
        """Return how many seconds a client should wait before a retry: the longest time
        that the first request of a queue of this model has waited, but at least `waited_s`."""
        partition = self.selector.catalog.partitions.get((routed.model_name, routed.tenant_id))
        lines = () if partition is None else partition.queue.lines()
        now = monotonic()
        return max(
            waited_s, *(now - each.head().arrived_at for each in lines if each.has_any()), 0.0
        )

    def knows_no(self, error: UnknownModel) -> None:
        """Counts a request for a model that no worker serves."""
        self.meter.refused(error)
        self.meter.add(0.0, b"503")

    def needs_pair(self, routed: Routed | None) -> bool:
        """Whether a request must not be sent to just any worker; None: its model is unknown."""
        settings = self.selector.settings
        needs = settings.asks_pairs and settings.pd_fallback == "refuse"
        return needs and (routed is None or not routed.bars_pair)

    def _choose(
        self,
        routed: Routed,
        reservation_id: str,
        avoided: frozenset[int],
        doubted: frozenset[int],
        leg: WorkerUse | None,
    ) -> Steps[WorkerUse]:
        selector = self.selector
        partition = selector.catalog.ready_partition(routed.model_name, routed.tenant_id)
        request = SelectionRequest(routed.prompt, selector.terms_of(routed.model_name))
        request.books = True
        request.asked_at = self.asked_at
        request.reservation_id = reservation_id
        request.fairness_id = routed.fairness_id
        request.strict_priority = routed.strict_priority
        request.deadline = routed.deadline
        sessions = partition.sessions
        is_bound = sessions is not None and not sessions.is_soft and routed.session_id is not None
        warming = _NOBODY
        if partition.health.returned and not is_bound:
            warming = self._warming(partition, monotonic())
        disaggregate = selector.pairs_asked(partition)
        if disaggregate != NEVER:
            self._ask_for_pair(partition, routed, request, avoided, warming | doubted)
            request.disaggregate = disaggregate
            if leg is not None and leg.worker_id is not None:
                request.after_prefill, avoided = True, avoided | {leg.worker_id}
        request.allowed_worker_ids = _allowed(
            partition, routed.worker_ids, avoided, warming | doubted
        )
        if sessions is not None and (sessions.is_soft or not avoided):
            request.session_id = routed.session_id
        placement = yield from self._placed(partition, request)
        use: _Reservation | None = None
        try:
            use = self._use(partition, reservation_id, routed, placement)
            if disaggregate != NEVER:
                if isinstance(placement.prefill, PrefillPlacement):
                    leg_id = leg_of(reservation_id)
                    leg = use.leg = self._use(partition, leg_id, routed, placement.prefill)
                if leg is not None:  # it prefills nothing
                    use.overlap_tokens = placement.overlap.longest_matched
                if isinstance(placement.disaggregation, Disaggregated):
                    use.pair_reason = pair_text(placement.disaggregation)
        except ValueError:
            selector.reservations.free(reservation_id, monotonic(), was_served=False)
            if use is not None:  # of a decode worker, whose partner has no URL
                use.end(None)
            refuses = selector.settings.pd_fallback == "refuse" and not routed.bars_pair
            if disaggregate != NEVER and refuses:
                raise NoPair("a worker of the chosen pair has no HTTP URL") from None
            raise NotChosen("no_url") from None
        selector.reservations.expect_output(reservation_id, routed.output_tokens, monotonic())
        return use

    def _ask_for_pair(
        self,
        partition: Partition,
        routed: Routed,
        request: SelectionRequest,
        avoided: frozenset[int],
        doubted: frozenset[int],
    ) -> None:
        """Asks for a pair, if the request can have one. Raises NoPair."""
        if routed.bars_pair == NO_PARAMS and self.selector.settings.pd_fallback != "local":
            raise NoPair("the prefill worker's answer had no kv_transfer_params")
        request.bars_pair = routed.bars_pair
        allowed = routed.worker_ids
        if avoided or doubted:
            left = (frozenset(partition.workers) if allowed is None else allowed) - avoided
            usable = partition.ranks_of(left - doubted) & partition.usable(PREFILL)
            allowed = left - doubted if usable else left
        request.prefill_allowed_worker_ids = allowed

    def _use(
        self,
        partition: Partition,
        reservation_id: str,
        routed: Routed,
        placed: Placement | PrefillPlacement,
    ) -> "_Reservation":
        """Return the use of a rank that was reserved. Raises ValueError if it has no URL."""
        key = placed.worker_id, placed.dp_rank
        rank, worker = partition.slots.ranks.get(key), partition.workers.get(placed.worker_id)
        has_ranks = worker is not None and len(worker.loads) > 1
        use = _Reservation(
            self.selector,
            reservation_id,
            self.rotation.endpoint(placed.endpoint),
            placed.worker_id,
            placed.dp_rank if has_ranks else None,
            routed.prompt.isl_tokens - placed.effective_prefill_tokens,
            routed.prompt.known_blocks * partition.block_size,
        )
        if rank is not None:
            counts = rank.counts
            use.misses_blocks = counts.recent_missed > MOST_MISSED * counts.recent_tokens
        return use

    def _warming(self, partition: Partition, now: float) -> frozenset[int]:
        """Return the recently ejected workers that must get no more requests now, because a rank
        is at its limit. The limit rises from 1 active request to 1 + the other ranks' average."""
        returned, ranks = partition.health.returned, partition.slots.ranks
        total = sum(load.active_requests for load in ranks.values())
        full = set()
        for key, at in list(returned.items()):
            if now - at >= self.slow_start_s or key not in ranks:
                del returned[key]
                continue
            active = ranks[key].active_requests
            average = (total - active) / max(1, len(ranks) - 1)
            if active >= 1 + average * (now - at) / self.slow_start_s:
                full.add(key[0])
        return frozenset(full)

    def _placed(self, partition: Partition, request: SelectionRequest) -> Steps[Placement]:
        """Chooses a rank. If all ranks are busy, the request waits in the queue."""
        found = self.selector.select(partition, request, monotonic())
        if not isinstance(found, Waiting):
            return found
        answer: asyncio.Future[Placement | Exception] = asyncio.get_running_loop().create_future()
        # The future may be cancelled, and its waiter told of that later.
        found.on_answer = lambda told: None if answer.done() else answer.set_result(told)
        try:
            given: Placement | Exception = yield answer
        except (asyncio.CancelledError, GeneratorExit):
            found.cancel(monotonic())
            raise
        if isinstance(given, Exception):
            raise given
        return given


def _allowed(
    partition: Partition,
    allowed: frozenset[int] | None,
    avoided: frozenset[int],
    warming: frozenset[int],
) -> frozenset[int] | None:
    """Return the workers that a request may go to, or None for any. Recently ejected workers, in
    `warming`, are included only if no other worker is left."""
    if not (avoided or warming):
        return allowed
    left = (frozenset(partition.workers) if allowed is None else allowed) - avoided
    if left.isdisjoint(partition.workers):
        raise NotChosen("all_failed")
    others = left - warming
    return others if partition.ranks_of(others) & partition.candidates else left


class _Reservation(WorkerUse):
    """A use (claim on a worker until the request ends) with a reservation at the selector."""

    def __init__(
        self,
        selector: Selector,
        reservation_id: str,
        endpoint: Upstream,
        worker_id: int,
        dp_rank: int | None,
        overlap_tokens: int,
        known_tokens: int,
    ) -> None:
        """`known_tokens`: the number of prompt tokens in blocks with known hashes."""
        super().__init__(endpoint, worker_id, dp_rank, overlap_tokens)
        self._selector = selector
        self._id = reservation_id
        self._known_tokens = known_tokens

    def _begun(self, ttft_s: float | None) -> None:
        with contextlib.suppress(NotFound):  # removed with its worker
            self._selector.reservations.prefill_complete(self._id, monotonic(), ttft_s)

    def _touched(self) -> None:
        with contextlib.suppress(NotFound):
            self._selector.reservations.output_block(self._id, None, monotonic())

    def _freed(self, outcome: str | None, cached_tokens: int | None) -> None:
        now = monotonic()
        try:
            self._selector.reservations.end(
                self._id, outcome, cached_tokens, now, self._known_tokens, reports_prefill=True
            )
        except NotFound:
            if outcome is not None and self.worker_id in self._selector.catalog.workers:
                self._selector.health.record_outcome(self.worker_id, None, outcome, now)


def peeked_model(body: bytes | bytearray) -> str | None:
    """Return the model that a JSON body names, or None."""
    found = _OBJECT.match(body)
    if found is None:
        return None
    try:
        return _decode(memoryview(body)[found.end() - 1 :]).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


@dataclass(eq=False)
class Placing:
    """Finds a worker for each request. Used only on the loop's thread.

    `queue_headers`: None without a queue. `tls` is called when a worker's URL is https, and may
    raise OSError. Connections are made only to endpoints in `allowed`, if given."""

    prompts: Prompts
    chooser: Chooser
    rotation: Rotation
    fleet: GatewayFleet
    counts: Counts
    resolve: Resolve
    tls: Callable[[], ssl.SSLContext]
    allowed: AllowedEndpoints | None
    overload_status: int
    queue_headers: QueueHeaders | None = None

    def begin(self, proxied: ProxiedRequest, is_completion: bool) -> "asyncio.Task[None] | None":
        """Finds a worker and sends the request now, or returns a task that does so."""
        return stepped(self._place(proxied, is_completion))

    def _place(self, proxied: ProxiedRequest, is_completion: bool) -> Steps[None]:
        try:
            yield from self._try(proxied, is_completion)
        except Exception:
            log.exception("a request could not be placed")
            if not proxied.is_over:
                proxied.fail(500, "internal error")

    def _try(self, proxied: ProxiedRequest, is_completion: bool) -> Steps[None]:
        self.rotation.follow(self.fleet)
        if is_completion and proxied.routed is None and not proxied.tried:
            request = proxied.request
            body = request.body = bytes(request.body)  # copied once
            try:
                proxied.routed = yield from self.prompts.read(request.path.decode(), body)
                request.body = b""  # `routed.body` is forwarded instead
                if self.queue_headers is not None:
                    self.queue_headers.read(proxied.routed, request.section, request.credential)
                read_session(proxied.routed, request.section)
            except BadRequest as error:
                proxied.fail(400, error.message, "invalid_request")
                return
            except UnknownModel as unknown:
                self.chooser.knows_no(unknown)
                proxied.unknown = f"{unknown.message} {self.fleet.known_text()}"
                if self.fleet.is_complete:
                    proxied.fail(404, proxied.unknown, "model_not_found")
                    return
                self.counts.unrouted["not_known_yet"] += 1
        none_served = f"no worker served the request; the last: {proxied.why}"
        if proxied.attempts >= MOST_ATTEMPTS:
            proxied.fail(502, none_served, "bad_gateway")
            return
        use = proxied.use  # the same worker after a stale connection; or a pair's decode worker
        if use is None:
            try:
                use = yield from self._find_worker(proxied)
            except Shed as shed:
                proxied.fail(self.overload_status, str(shed), "overloaded", shed.line)
                return
            except TooLate as late:
                proxied.fail(late.status, late.message, "timeout")
                return
            except NoPair as unpaired:
                if proxied.why:
                    proxied.fail(502, f"{none_served}; {unpaired.message}", "bad_gateway")
                else:
                    proxied.fail(503, unpaired.message, "no_pair", RETRY_AFTER)
                return
            if use is None:
                if proxied.why and proxied.unknown:  # a worker that comes may serve it
                    proxied.fail(503, proxied.unknown, "model_not_known_yet", RETRY_AFTER)
                elif proxied.why:
                    proxied.fail(502, none_served, "bad_gateway")
                else:
                    proxied.fail(503, "no worker is available", "no_worker", RETRY_AFTER)
                return
            if use.leg is not None and proxied.attempts + 2 > MOST_ATTEMPTS:
                use.end(None)
                proxied.fail(502, none_served, "bad_gateway")
                return
            proxied.take_over(use)
            if use.misses_blocks:
                self._ask_for_report(proxied.routed, use)
            if use.leg is not None and use.leg.misses_blocks:
                self._ask_for_report(proxied.routed, use.leg)
        held = proxied.held
        if held is not None and held.are_old:  # it waited for a decode worker
            proxied.run_anew()
            return
        endpoint = use.endpoint if use.leg is None else proxied.asked.endpoint
        connection = None if proxied.is_stale else endpoint.kept()
        if connection is None:
            try:
                connection = yield from self._connected(endpoint)
            except (OSError, ValueError) as failure:
                proxied.refused(reason(failure))
                return
        proxied.sent(connection)

    def _ask_for_report(self, routed: Routed | None, use: WorkerUse) -> None:
        if routed is not None and routed.takes_reports:
            use.body = self.prompts.with_report(routed.body, use.endpoint.text)
            self.counts.full_reports += use.body is not None

    def _find_worker(self, proxied: ProxiedRequest) -> Steps[WorkerUse | None]:
        """Chooses a worker that has not failed this request. Return None if no worker is left."""
        routed, fleet = proxied.routed, self.fleet
        if routed is not None:
            tried, doubted, held = proxied.tried, proxied.doubted, proxied.held
            try:
                return (
                    yield from self.chooser.choose(
                        routed,
                        f"{proxied.lease_id}.{proxied.attempts}",
                        fleet.ids_of(tried) if tried else _NOBODY,
                        fleet.ids_of(doubted) if doubted else _NOBODY,
                        None if held is None else held.leg,
                    )
                )
            except NoPair:
                raise
            except NotChosen as error:
                self.counts.unrouted[error.why] += 1
            among = (
                fleet.may_serve(routed.model_name)
                if routed.worker_ids is None
                else fleet.bases_of(routed.worker_ids)  # workers that have the adapter
            )
        else:
            if proxied.unknown and self.chooser.needs_pair(None):
                raise NoPair(proxied.unknown)
            is_post = proxied.request.method == b"POST"
            among = fleet.may_serve(peeked_model(proxied.request.body) if is_post else None)
        endpoint = self.rotation.next(proxied.tried, among)
        return None if endpoint is None else WorkerUse(endpoint)

    def _connected(self, endpoint: Upstream) -> Steps[ClientConnection]:
        self.counts.connections_made += 1
        connection = ClientConnection(endpoint)
        context = self.tls() if endpoint.url.is_secure else None
        yield connect(connection, self.resolve, context, CONNECT_S, self.allowed)
        return connection
