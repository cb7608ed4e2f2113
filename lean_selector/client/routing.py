"""Decides what a router sends to the service and to workers, and when the router retries.

A `Driver` sends the requests. The errors are those of client/errors.py."""

import random
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import msgspec

from lean_selector.client import calls
from lean_selector.client.calls import Call, Scope, Selected, prompt_fields
from lean_selector.client.client_settings import Backoff, KvRouterConfig
from lean_selector.client.drivers import Driver
from lean_selector.client.errors import (
    ClientClosed,
    ClientError,
    ModelNotNamed,
    NoWorkerAvailable,
    OtherEventLoop,
    ServiceRefused,
    ServiceUnreachable,
    WorkerError,
    WorkerRefused,
    WorkerStreamBroken,
    WorkerUnreachable,
    WrongBlockSize,
)
from lean_selector.client.reservation import Reservation
from lean_selector.client.transport import Opened, OpenStream
from lean_selector.core.health.ejections import FAILED, NOT_FREE, REFUSED, outcome_of_status
from lean_selector.core.numbers import optional, whole

T = TypeVar("T")


class Prompt(msgspec.Struct, frozen=True):
    """A prompt, with the LoRA adapter and the cache salt, which change the prompt's hashes."""

    token_ids: Sequence[int]
    lora_name: str | None = None
    cache_salt: str | None = None


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """Options for choosing a worker; None leaves an option to the service."""

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


# Served models are looked up again after this time, and at once for an unknown model.
FRESH_S = 10.0

Reserved = tuple[Selected, Reservation]


class Routing:
    """Makes the requests of one router, according to the router's settings."""

    def __init__(
        self,
        driver: Driver,
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
        self.driver = driver
        self.config = config or KvRouterConfig()
        self._block_size = block_size
        self._model_name = model_name
        self._tenant_id = tenant_id
        self._is_eagle = is_eagle
        self._backoff = backoff
        self._rng = rng or random.Random()
        self._clock = clock
        self._served: dict[str, Scope] = {}  # by model; empty before the first look-up
        self._absent: set[str] = set()  # models that the last look-up did not find
        self._looked_at = 0.0

    # -- scope -------------------------------------------------------------------------------------

    async def scope(self, model: str | None = None) -> Scope:
        """Return model, tenant and block size for requests. What the router's settings leave open
        is looked up at the service.

        If the router has no model_name, uses the only served model, or `model` if none or several
        are served. Raises ModelNotNamed if several are served and `model` is not one of them."""
        name = self._model_name
        if name is None or self._block_size is None:
            served = await self._look(name or model)
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

    async def _look(self, model: str | None) -> dict[str, Scope]:
        """Return each model's Scope, cached for FRESH_S s. An uncached `model` is looked up."""
        now = self._clock()
        is_fresh = bool(self._served) and now - self._looked_at < FRESH_S
        if is_fresh and (model is None or model in self._served or model in self._absent):
            return self._served
        workers = await self.driver.ask(calls.workers(None, self._tenant_id))
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

    async def _again_if_changed(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Runs `attempt`. If the workers' block size has changed since it was looked up, looks the
        size up again and repeats the attempt once."""
        try:
            return await attempt()
        except WrongBlockSize:
            if self._block_size is not None:
                raise
            self._served = {}
            return await attempt()

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

    # -- selection ---------------------------------------------------------------------------------

    async def best_worker(
        self, prompt: Prompt, terms: Wishes, request_id: str | None
    ) -> tuple[int, int, int]:
        selected = await self._again_if_changed(
            lambda: self._best_worker(prompt, terms, request_id)
        )
        return selected.worker_id, selected.dp_rank, selected.overlap_blocks

    async def _best_worker(self, prompt: Prompt, terms: Wishes, request_id: str | None) -> Selected:
        scope = await self.scope()
        fields = self._fields(prompt, scope, terms)
        if request_id is None:
            selected = await self.driver.ask(calls.select(fields))
            if self._block_size is None and scope.block_size not in (None, selected.block_size):
                raise WrongBlockSize(scope.block_size or 0, selected.block_size)
            return selected
        expected = terms.expected_output_tokens
        reservation = Reservation(
            len(prompt.token_ids), reservation_id=request_id, expected_output_tokens=expected
        )
        selected = await self._book(reservation, fields, scope)
        self.driver.hand_over(reservation)
        return selected

    async def _book(
        self, reservation: Reservation, fields: Mapping[str, object], scope: Scope
    ) -> Selected:
        call = calls.select_and_reserve(reservation.id, fields)
        selected = await self._booked(call, reservation)
        if scope.block_size not in (None, selected.block_size):
            await self._give_back(reservation)
            raise WrongBlockSize(scope.block_size or 0, selected.block_size)
        return selected

    async def _booked(self, call: Call[Selected], reservation: Reservation) -> Selected:
        """Tries once to reserve. If the service does not respond, releases the reservation, which
        may exist nevertheless."""
        try:
            return await self.driver.book(call, reservation)
        except (ServiceRefused, ClientClosed, OtherEventLoop):
            raise  # no reservation exists, or the driver frees it
        except ServiceUnreachable as error:
            if not error.never_sent:
                reservation.ambiguous = True
                await self._give_back(reservation)
            raise
        except BaseException:
            reservation.ambiguous = True
            self.driver.release(reservation)
            raise

    async def _give_back(self, reservation: Reservation) -> None:
        """Releases a reservation. Waits for the release if a retry may use the same id again."""
        if reservation.is_named:
            await self.driver.release_now(reservation)
        else:
            self.driver.release(reservation)

    async def place(self, prompt: Prompt, terms: Wishes) -> Reserved:
        """Chooses and reserves a rank. Retries while none is free or the service is unreachable."""

        async def attempt() -> Reserved:
            scope = await self.scope()
            return await self._place_once(prompt, terms, scope, self._fields(prompt, scope, terms))

        return await self._again_if_changed(lambda: self._until_free(attempt))

    async def route(self, path: str, body: bytes | Mapping[str, object]) -> Reserved:
        """Chooses and reserves a rank for an OpenAI request, whose prompt the service reads."""

        async def attempt() -> Reserved:
            reservation = Reservation(0)
            call = calls.route(reservation.id, path, body)
            return await self._booked(call, reservation), reservation

        return await self._until_free(attempt)

    async def _until_free(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Runs `attempt`, and repeats it as the router's backoff says while no worker is free or
        the service is unreachable."""
        tries = 0
        while True:
            try:
                return await attempt()
            except (NoWorkerAvailable, ServiceUnreachable) as error:
                await self._pause(tries, error)
            tries += 1

    async def _place_once(
        self, prompt: Prompt, terms: Wishes, scope: Scope, fields: Mapping[str, object]
    ) -> Reserved:
        expected = terms.expected_output_tokens
        reservation = Reservation(len(prompt.token_ids), expected_output_tokens=expected)
        selected = await self._book(reservation, fields, scope)
        if self.config.track_output_blocks:
            reservation.track_output(selected.block_size)
        return selected, reservation

    async def _pause(self, attempt: int, error: ClientError) -> None:
        """Waits before the next attempt, or raises `error` if there is no next attempt."""
        asked = error.retry_after_s if isinstance(error, ServiceRefused) else None
        wait_s = self._backoff.wait_s(attempt, self._rng, asked)
        if wait_s is None:
            raise error
        await self.driver.pause(wait_s)

    # -- generation --------------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, terms: Wishes, model: str, body: bytes
    ) -> tuple[Selected, Reservation, Opened]:
        """Reserves a worker, sends it a request with this body, and returns the open stream.

        A worker that does not accept the request is avoided in later attempts, while any other
        worker is schedulable."""
        return await self._again_if_changed(lambda: self._generate(prompt, terms, model, body))

    async def _generate(
        self, prompt: Prompt, terms: Wishes, model: str, body: bytes
    ) -> tuple[Selected, Reservation, Opened]:
        scope: Scope | None = None
        avoided: dict[int, WorkerError] = {}  # worker_id -> error
        attempt = 0
        while True:
            try:
                scope = scope or await self.scope(model)
                fields = self._fields(prompt, scope, terms)
                if avoided:
                    alone = terms.worker_id is not None
                    others = [] if alone else await self._others(scope, avoided)
                    if others:
                        fields["allowed_worker_ids"] = others
                    else:
                        _, error = avoided.popitem()
                        avoided.clear()  # they may have recovered
                        await self._pause(attempt, error)
                        attempt += 1
                selected, reservation = await self._place_once(prompt, terms, scope, fields)
            except (NoWorkerAvailable, ServiceUnreachable) as error:
                await self._pause(attempt, error)
                attempt += 1
                continue
            try:
                stream = await self.driver.open(_stream(selected, body))
            except BaseException as error:
                reservation.outcome = outcome_of(error)
                self.driver.release(reservation)
                if not _is_passed_over(error):
                    raise
                avoided[selected.worker_id] = error
            else:
                return selected, reservation, stream

    async def _others(self, scope: Scope, avoided: Container[int]) -> list[int]:
        workers = await self.driver.ask(calls.workers(scope.model_name, self._tenant_id))
        return [
            worker.worker_id
            for worker in workers
            if worker.lifecycle == "schedulable" and worker.worker_id not in avoided
        ]

    # -- inspection --------------------------------------------------------------------------------

    async def potential_loads(self, prompt: Prompt) -> list[dict[str, int]]:
        scope = await self.scope()
        fields = prompt_fields(prompt.token_ids, scope, prompt.lora_name, prompt.cache_salt)
        return await self.driver.ask(calls.potential_loads(fields))

    async def overlap_scores(
        self, prompt: Prompt, override: Mapping[str, object] | None
    ) -> dict[str, Any]:
        scope = await self.scope()
        fields = self._fields(prompt, scope, Wishes(router_config_override=override))
        return await self.driver.ask(calls.overlap_scores(fields))

    async def dump_events(self) -> str:
        scope = await self.scope()
        dump = await self.driver.ask(calls.dump())
        events = dump.get(f"{scope.model_name}:{scope.tenant_id}", {}).get("events", [])
        return msgspec.json.encode(events).decode()


def _is_passed_over(error: BaseException) -> TypeGuard[WorkerError]:
    """Whether another worker should be tried because this one is unreachable, busy or starting."""
    if isinstance(error, WorkerRefused):
        return error.status in NOT_FREE
    return isinstance(error, WorkerUnreachable)


def outcome_of(error: BaseException) -> str | None:
    """Return the outcome to report for a worker after this error; None: nothing to report."""
    if isinstance(error, WorkerRefused):
        return outcome_of_status(error.status)
    if isinstance(error, WorkerUnreachable):
        return REFUSED if error.never_connected else FAILED
    return FAILED if isinstance(error, WorkerStreamBroken) else None


def _stream(selected: Selected, body: bytes) -> OpenStream:
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if len(selected.overlap.dp) > 1:
        # A vLLM server in front of several data-parallel ranks uses the rank given here.
        headers["x-data-parallel-rank"] = str(selected.dp_rank)
    return OpenStream(selected.worker_id, selected.endpoint, body, headers)
