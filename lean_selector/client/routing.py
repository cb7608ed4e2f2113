"""The flows of a router: logic shared by the asynchronous and the synchronous router.

A flow is a generator that yields steps and is sent their outcomes, so that it can run with or
without an event loop; it never waits itself. It raises the errors of `errors`, and the driver knows
every reservation it makes. Independent of httpx.
"""

import random
import time
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from typing import Any, Generic, TypeGuard, TypeVar

import msgspec

from lean_selector.client import calls
from lean_selector.client.calls import Call, Scope, Selected, prompt_fields
from lean_selector.client.client_settings import Backoff, KvRouterConfig
from lean_selector.client.completions import Option, completion_body
from lean_selector.client.errors import (
    ClientClosed,
    ClientError,
    ModelNotNamed,
    NotFound,
    NoWorkerAvailable,
    ServiceRefused,
    ServiceUnreachable,
    WorkerError,
    WorkerRefused,
    WorkerStreamBroken,
    WorkerUnreachable,
    WrongBlockSize,
)
from lean_selector.client.reservation import Reservation
from lean_selector.core.health.ejections import FAILED, NOT_FREE, REFUSED, outcome_of_status
from lean_selector.core.numbers import optional, whole

T = TypeVar("T")


class Ask(msgspec.Struct, Generic[T], frozen=True):
    """Do the exchange. Outcome: the parsed response. `books`: the reservation that it creates."""

    call: Call[T]
    books: Reservation | None = None


class Pause(msgspec.Struct, frozen=True):
    seconds: float


class Release(msgspec.Struct, frozen=True):
    """Free this reservation; the flow need not wait for it.

    `first`: the flow is about to end, and should wait for the free, for a limited time.
    """

    reservation: Reservation
    first: bool = False


class HandOver(msgspec.Struct, frozen=True):
    """From here on the caller owns the reservation, and frees it."""

    reservation: Reservation


class OpenStream(msgspec.Struct, frozen=True):
    """POST to a worker. Outcome: the open stream, in the driver's own type, its status 200."""

    worker_id: int
    endpoint: str
    body: bytes
    headers: dict[str, str]

    @property
    def url(self) -> str:
        """The URL for completions; the registered endpoint may lack its scheme or version."""
        scheme, found, rest = self.endpoint.rstrip("/").rpartition("://")
        version = "" if rest.endswith("/v1") else "/v1"
        return f"{scheme if found else 'http'}://{rest}{version}/completions"


Step = Ask[Any] | Pause | Release | HandOver | OpenStream
Flow = Generator[Step, Any, T]


class Prompt(msgspec.Struct, frozen=True):
    """The prompt to place."""

    token_ids: Sequence[int]
    lora_name: str | None = None
    cache_salt: str | None = None


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the placement; None leaves all to the service."""

    router_config_override: Mapping[str, object] | None = None
    worker_id: int | None = None
    dp_rank: int | None = None
    expected_output_tokens: int | None = None
    priority_jump: float | None = None
    strict_priority: int | None = None
    routing_constraints: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.dp_rank is not None and self.worker_id is None:
            raise ValueError("dp_rank needs worker_id")


class Generation(msgspec.Struct, frozen=True):
    """The request to the worker, once one is chosen."""

    model: str
    options: Sequence[Option]
    return_token_ids: bool


# Tries of a free, over some six seconds; after that the service expires the reservation.
RELEASE = Backoff(max_retries=6, first_s=0.1, longest_s=5.0)
REPORT = Backoff(max_retries=2, first_s=0.1, longest_s=1.0)
# Served models are looked up again after this time, and at once for an unknown model.
FRESH_S = 10.0
# If a free finds no reservation, its booking may still arrive for this long.
AMBIGUOUS_S = 0.5


def ask(call: Call[T]) -> Flow[T]:
    outcome: T = yield Ask(call)
    return outcome


def book(call: Call[T], reservation: Reservation) -> Flow[T]:
    """One try. Without a response a reservation may exist all the same, so it is released.

    It is released before this raises, so that the user's id can be reserved again.
    """
    try:
        booked: T = yield Ask(call, reservation)
    except (ServiceRefused, ClientClosed):
        raise  # no reservation exists, or the driver frees it
    except ServiceUnreachable as error:
        if not error.never_sent:
            reservation.ambiguous = True
            yield Release(reservation, first=reservation.is_named)
        raise
    except BaseException:
        reservation.ambiguous = True
        yield Release(reservation)
        raise
    return booked


class Routing:
    """One router's settings, and the flows that follow from them."""

    def __init__(
        self,
        config: KvRouterConfig | None = None,
        block_size: int | None = None,
        model_name: str | None = None,
        tenant_id: str = "default",
        is_eagle: bool | None = None,
        backoff: Backoff = Backoff(),  # noqa: B008 - frozen
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        block_size = optional(whole, "block_size", block_size)
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.config = config or KvRouterConfig()
        self._block_size = block_size
        self._model_name = model_name
        self._tenant_id = tenant_id
        self._is_eagle = is_eagle
        self._backoff = backoff
        self._rng = rng or random.Random()
        self._clock = clock
        self._served: dict[str, Scope] = {}  # by model; empty: not looked up yet
        self._absent: set[str] = set()  # models that were not among them
        self._looked_at = 0.0

    # -- scope -------------------------------------------------------------------------

    def scope(self, model: str | None = None) -> Flow[Scope]:
        """The workers that requests go to; looks up at the selector what is not set.

        The model is the one given to the router, else the only one that is served, else `model`.
        Raises ModelNotNamed when that is not enough.
        """
        name = self._model_name
        if name is None or self._block_size is None:
            served = yield from self._look(name or model)
            if name is None and len(served) == 1:
                (name,) = served
            elif name is None and (not served or model in served):
                name = model or "default"
            elif name is None:
                raise ModelNotNamed(served)
            found = served.get(name)
        else:
            found = None
        size = found.block_size if found is not None else self._block_size
        if size is not None and self._block_size is not None and size != self._block_size:
            raise WrongBlockSize(self._block_size, size)
        eagle = self._is_eagle
        if eagle is None:
            eagle = found is not None and found.is_eagle
        return Scope(name, self._tenant_id, size, eagle)

    def _look(self, model: str | None) -> Flow[dict[str, Scope]]:
        """Scopes of the served models, looked up again when stale."""
        now = self._clock()
        is_fresh = bool(self._served) and now - self._looked_at < FRESH_S
        if is_fresh and (model is None or model in self._served or model in self._absent):
            return self._served
        workers = yield from ask(calls.workers(None, self._tenant_id))
        self._served = {
            worker.model_name: Scope(
                worker.model_name, self._tenant_id, worker.block_size, bool(worker.is_eagle)
            )
            for worker in workers
            if worker.block_size
        }
        self._absent = self._absent if is_fresh else set()
        if model is not None and model not in self._served:
            self._absent.add(model)
        self._looked_at = now
        return self._served

    def _again_if_changed(self, attempt: Callable[[], Flow[T]]) -> Flow[T]:
        """If the workers' block size has changed since the look-up, look it up again, once."""
        try:
            return (yield from attempt())
        except WrongBlockSize:
            if self._block_size is not None:
                raise
            self._served = {}
            return (yield from attempt())

    def _fields(self, prompt: Prompt, scope: Scope, terms: Wishes) -> dict[str, object]:
        fields = prompt_fields(prompt.token_ids, scope, prompt.lora_name, prompt.cache_salt)
        wanted: dict[str, object] = {
            "router_config_override": self.config.override(terms.router_config_override),
            "expected_output_tokens": terms.expected_output_tokens,
            "priority_jump": terms.priority_jump,
            "strict_priority": terms.strict_priority,
            "routing_constraints": terms.routing_constraints,
        }
        if terms.worker_id is not None and terms.dp_rank is not None:
            wanted["pinned_worker"] = {"worker_id": terms.worker_id, "dp_rank": terms.dp_rank}
        elif terms.worker_id is not None:
            wanted["allowed_worker_ids"] = [terms.worker_id]
        fields.update((name, value) for name, value in wanted.items() if value is not None)
        return fields

    # -- selection -----------------------------------------------------------------------------

    def best_worker(
        self, prompt: Prompt, terms: Wishes, request_id: str | None
    ) -> Flow[tuple[int, int, int]]:
        return self._again_if_changed(lambda: self._best_worker(prompt, terms, request_id))

    def _best_worker(
        self, prompt: Prompt, terms: Wishes, request_id: str | None
    ) -> Flow[tuple[int, int, int]]:
        scope = yield from self.scope()
        fields = self._fields(prompt, scope, terms)
        if request_id is None:
            selected = yield from ask(calls.select(fields))
            if self._block_size is None and scope.block_size not in (None, selected.block_size):
                raise WrongBlockSize(scope.block_size or 0, selected.block_size)
        else:
            expected = terms.expected_output_tokens
            reservation = Reservation(
                len(prompt.token_ids), reservation_id=request_id, expected_output_tokens=expected
            )
            selected = yield from self._book(reservation, fields, scope)
            yield HandOver(reservation)
        return selected.worker_id, selected.dp_rank, selected.overlap_blocks

    def _book(
        self, reservation: Reservation, fields: Mapping[str, object], scope: Scope
    ) -> Flow[Selected]:
        selected = yield from book(calls.select_and_reserve(reservation.id, fields), reservation)
        if scope.block_size not in (None, selected.block_size):
            yield Release(reservation, first=reservation.is_named)
            raise WrongBlockSize(scope.block_size or 0, selected.block_size)
        return selected

    def place(self, prompt: Prompt, terms: Wishes) -> Flow[tuple[Selected, Reservation]]:
        """Select and reserve; retry while no worker is free or the service is absent."""
        return self._again_if_changed(lambda: self._until_free(lambda: self._place(prompt, terms)))

    def _place(self, prompt: Prompt, terms: Wishes) -> Flow[tuple[Selected, Reservation]]:
        scope = yield from self.scope()
        fields = self._fields(prompt, scope, terms)
        return (yield from self._place_once(prompt, terms, scope, fields))

    def route(
        self, path: str, body: bytes | Mapping[str, object]
    ) -> Flow[tuple[Selected, Reservation]]:
        """Place a raw request; the service reads its prompt."""
        return self._until_free(lambda: self._route(path, body))

    def _route(
        self, path: str, body: bytes | Mapping[str, object]
    ) -> Flow[tuple[Selected, Reservation]]:
        reservation = Reservation(0)
        selected = yield from book(calls.route(reservation.id, path, body), reservation)
        return selected, reservation

    def _until_free(self, attempt: Callable[[], Flow[T]]) -> Flow[T]:
        """Retry, as set by the backoff, while no worker is free or the service is absent."""
        tries = 0
        while True:
            try:
                return (yield from attempt())
            except (NoWorkerAvailable, ServiceUnreachable) as error:
                yield from self._pause(tries, error)
            tries += 1

    def _place_once(
        self, prompt: Prompt, terms: Wishes, scope: Scope, fields: Mapping[str, object]
    ) -> Flow[tuple[Selected, Reservation]]:
        expected = terms.expected_output_tokens
        reservation = Reservation(len(prompt.token_ids), expected_output_tokens=expected)
        selected = yield from self._book(reservation, fields, scope)
        if self.config.track_output_blocks:
            reservation.track_output(selected.block_size)
        return selected, reservation

    def _pause(self, attempt: int, error: ClientError) -> Flow[None]:
        """Wait before the next try, or raise `error` if there is none."""
        asked = error.retry_after_s if isinstance(error, ServiceRefused) else None
        wait_s = self._backoff.wait_s(attempt, self._rng, asked)
        if wait_s is None:
            raise error
        yield Pause(wait_s)

    # -- generation ----------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, terms: Wishes, wanted: Generation
    ) -> Flow[tuple[Selected, Reservation, Any]]:
        """Place the prompt and open the worker's stream.

        A worker that refuses it is avoided in later tries, while there are others.
        """
        return self._again_if_changed(lambda: self._generate(prompt, terms, wanted))

    def _generate(
        self, prompt: Prompt, terms: Wishes, wanted: Generation
    ) -> Flow[tuple[Selected, Reservation, Any]]:
        body = completion_body(
            prompt.token_ids,
            wanted.model,
            wanted.options,
            return_token_ids=wanted.return_token_ids,
            cache_salt=prompt.cache_salt,
        )
        scope: Scope | None = None
        avoided: dict[int, WorkerError] = {}  # worker_id -> why
        attempt = 0
        while True:
            try:
                scope = scope or (yield from self.scope(wanted.model))
                fields = self._fields(prompt, scope, terms)
                if avoided:
                    alone = terms.worker_id is not None
                    others = [] if alone else (yield from self._others(scope, avoided))
                    if others:
                        fields["allowed_worker_ids"] = others
                    else:
                        _, error = avoided.popitem()
                        avoided.clear()  # they may have recovered
                        yield from self._pause(attempt, error)
                        attempt += 1
                selected, reservation = yield from self._place_once(prompt, terms, scope, fields)
            except (NoWorkerAvailable, ServiceUnreachable) as error:
                yield from self._pause(attempt, error)
                attempt += 1
                continue
            try:
                stream = yield _open_stream(selected, body)
            except BaseException as error:
                reservation.outcome = outcome_of(error)
                yield Release(reservation)
                if not _is_passed_over(error):
                    raise
                avoided[selected.worker_id] = error
            else:
                return selected, reservation, stream

    def _others(self, scope: Scope, avoided: Container[int]) -> Flow[list[int]]:
        workers = yield from ask(calls.workers(scope.model_name, self._tenant_id))
        return [
            worker.worker_id
            for worker in workers
            if worker.lifecycle == "schedulable" and worker.worker_id not in avoided
        ]

    # -- inspection ----------------------------------------------------------------------------

    def potential_loads(self, prompt: Prompt) -> Flow[list[dict[str, int]]]:
        scope = yield from self.scope()
        fields = prompt_fields(prompt.token_ids, scope, prompt.lora_name, prompt.cache_salt)
        return (yield from ask(calls.potential_loads(fields)))

    def overlap_scores(
        self, prompt: Prompt, override: Mapping[str, object] | None
    ) -> Flow[dict[str, Any]]:
        scope = yield from self.scope()
        fields = self._fields(prompt, scope, Wishes(router_config_override=override))
        return (yield from ask(calls.overlap_scores(fields)))

    def dump_events(self) -> Flow[str]:
        scope = yield from self.scope()
        dump = yield from ask(calls.dump())
        events = dump.get(f"{scope.model_name}:{scope.tenant_id}", {}).get("events", [])
        return msgspec.json.encode(events).decode()

    # -- after the placement -------------------------------------------------------------------

    def report(self, reservation: Reservation) -> Flow[None]:
        """Send the due reports; failed ones are left to the next call."""
        failures = 0
        while (call := reservation.next_report()) is not None:
            try:
                yield Ask(call)
            except ServiceUnreachable:
                wait_s = REPORT.wait_s(failures, self._rng)
                if wait_s is None:
                    return
                failures += 1
                yield Pause(wait_s)
            except (ServiceRefused, ClientClosed):
                return  # it expired, or the service was restarted; the free will show
            else:
                reservation.reported()

    def release(self, reservation: Reservation) -> Flow[None]:
        """Free it, with retries."""
        reservation.ended = True
        may_appear = reservation.ambiguous
        attempt = 0
        while True:
            try:
                yield Ask(reservation.freeing())
                return
            except ClientClosed:
                return  # close() has waited as long as it could
            except NotFound:
                if not may_appear:
                    return
                may_appear = False
                yield Pause(AMBIGUOUS_S)
            except (ServiceUnreachable, ServiceRefused):
                wait_s = RELEASE.wait_s(attempt, self._rng)
                if wait_s is None:
                    return
                attempt += 1
                yield Pause(wait_s)


def _is_passed_over(error: BaseException) -> TypeGuard[WorkerError]:
    """True if a worker did not accept the request, such as one that sheds load or is starting up:
    another may."""
    if isinstance(error, WorkerRefused):
        return error.status in NOT_FREE
    return isinstance(error, WorkerUnreachable)


def outcome_of(error: BaseException) -> str | None:
    """The worker's outcome that an error implies; None: none."""
    if isinstance(error, WorkerRefused):
        return outcome_of_status(error.status)
    if isinstance(error, WorkerUnreachable):
        return REFUSED if error.never_connected else FAILED
    return FAILED if isinstance(error, WorkerStreamBroken) else None


def _open_stream(selected: Selected, body: bytes) -> OpenStream:
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if len(selected.overlap.dp) > 1:
        # One vLLM server in front of several data-parallel ranks takes the choice from here.
        headers["x-data-parallel-rank"] = str(selected.dp_rank)
    return OpenStream(selected.worker_id, selected.endpoint, body, headers)
