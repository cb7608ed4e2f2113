"""KvRouter: Dynamo's Python router API, on top of a selection service.

The API is specified in Dynamo's document "Using KvPushRouter Python API". KvPushRouter in that
document is KvRouter here. It decides what is sent to the service and to workers, and when to retry;
a `Driver` sends the requests."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec

from lean_selector.client import calls
from lean_selector.client.calls import Scope, Selected, Worker, prompt_fields
from lean_selector.client.client_settings import Backoff, KvRouterConfig, Timeouts
from lean_selector.client.completions import Option, completion_body
from lean_selector.client.drivers import Driver, Reservation
from lean_selector.client.errors import (
    ClientError,
    ModelNotNamed,
    NoWorkerAvailable,
    ServiceUnreachable,
    WorkerError,
    WorkerRefused,
    WorkerStreamBroken,
    WorkerUnreachable,
    WrongBlockSize,
)
from lean_selector.client.placements import AsyncClosing, Outcome, Placement, TokenStream
from lean_selector.client.transport import Cert, OpenStream, ServiceConnection, Token, Verify
from lean_selector.core.health.ejections import FAILED, NOT_FREE, REFUSED, outcome_of_status
from lean_selector.core.numbers import optional, whole
from lean_selector.core.selection.shapes import Disaggregate

T = TypeVar("T")
Override = Mapping[str, object] | None

# Served models are looked up again after this time, and at once for an unknown model.
FRESH_S = 10.0
ONCE = Backoff(max_retries=0)


class RoutingOptions(TypedDict, total=False):
    """Options of a request to choose a rank. None leaves an option to the service."""

    lora_name: str | None
    cache_salt: str | None
    expected_output_tokens: int | None  # the request's load decreases as its output grows
    priority_jump: float | None
    strict_priority: int | None
    fairness_id: str | None
    routing_constraints: Mapping[str, object] | None


class Wanted(msgspec.Struct, frozen=True):
    """A prompt, and the other fields of a request to choose a rank for it."""

    token_ids: Sequence[int]
    options: RoutingOptions
    terms: dict[str, object]

    def fields(self, scope: Scope) -> dict[str, object]:
        """Return the fields of a request to the service. Raises ValueError for bad token ids."""
        salt = self.options.get("cache_salt")
        prompt = prompt_fields(self.token_ids, scope, self.options.get("lora_name"), salt)
        return {**prompt, **self.terms}


class KvRouter(AsyncClosing):
    """A client of the selection service: chooses and reserves workers, and streams from them. Use
    `async with`, or call aclose()."""

    def __init__(
        self,
        endpoint: str,
        block_size: int | None = None,
        kv_router_config: KvRouterConfig | None = None,
        *,
        model_name: str | None = None,
        tenant_id: str = "default",
        is_eagle: bool | None = None,
        return_token_ids: bool = True,
        timeouts: Timeouts | None = None,
        backoff: Backoff | None = None,
        verify: Verify = True,
        cert: Cert | None = None,
        token: Token | None = None,
    ) -> None:
        """
        endpoint: URL of the selection service, or unix:PATH.
        block_size: the workers' number of tokens per KV block. None: ask the service.
        model_name: the model's name at the service. None: the only model that is served.
        is_eagle: True if the workers use EAGLE, so that a block's hash also covers the next token.
            None: False if block_size and model_name are both given; otherwise ask the service.
        return_token_ids: whether to ask engines for token ids in the stream, a vLLM extension.
        verify, cert, token: for requests to the service, not to workers. verify: True for the
            system's CA certificates, the path of a PEM file with other CA certificates, False for
            no verification, or an SSLContext. cert: the path of our certificate with its key, or
            two paths. token: a bearer token, or a function that returns the current token.

        Raises ValueError for an invalid endpoint, block size or token, and OSError for unusable
        certificate or key files.
        """
        block_size = optional(whole, "block_size", block_size)
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        timeouts = timeouts or Timeouts()
        self._driver = Driver(ServiceConnection(endpoint, timeouts, verify, cert, token), timeouts)
        self._config = kv_router_config or KvRouterConfig()
        self._block_size = block_size
        self._model_name = model_name
        self._tenant_id = tenant_id
        self._is_eagle = is_eagle
        self._return_token_ids = return_token_ids
        self._backoff = backoff or Backoff()
        self._served: dict[str, Worker] = {}  # by model; empty before the first look-up
        self._sought: set[str | None] = set()  # models that were looked up since then
        self._looked_at = 0.0

    async def generate(
        self,
        token_ids: Sequence[int],
        model: str,
        stop_conditions: Option = None,
        sampling_options: Option = None,
        output_options: Option = None,
        router_config_override: Override = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        extra_args: Option = None,
        **options: Unpack[RoutingOptions],
    ) -> TokenStream:
        """Reserves a worker, sends it the request, and returns the stream of output chunks.

        stop_conditions, sampling_options, output_options, extra_args: fields for the worker's
            /v1/completions. If several of these set the same field, the last one counts.
        worker_id: choose only this worker; with dp_rank, only this rank of the worker.
        options: see RoutingOptions.

        Retries with the router's `backoff` while workers are busy or the service is unreachable.
        If a worker does not accept the request, another worker is tried if there is one. Raises
        ClientError and ValueError.
        """
        wanted = self._wanted(token_ids, router_config_override, options, worker_id, dp_rank)
        body = completion_body(
            token_ids,
            model,
            (stop_conditions, sampling_options, output_options, extra_args),
            return_token_ids=self._return_token_ids,
            cache_salt=options.get("cache_salt"),
        )
        avoided: dict[int, WorkerError] = {}  # worker_id -> error

        async def attempt() -> TokenStream:
            """Tries each worker once. Raises the last error when no other worker is left."""
            scope = await self._scope(model)
            fields = wanted.fields(scope)
            while True:
                if avoided:
                    others = await self._others(scope, avoided) if worker_id is None else []
                    if not others:
                        _, error = avoided.popitem()
                        avoided.clear()  # they may have recovered
                        raise error
                    fields["allowed_worker_ids"] = others
                selected, reservation = await self._placed(wanted, scope, fields)
                try:
                    opened = await self._driver.open(_stream(selected, body))
                except BaseException as failure:
                    reservation.outcome = outcome_of(failure)
                    self._driver.release(reservation)
                    if not isinstance(failure, WorkerError) or not _is_temporary(failure):
                        raise
                    avoided[selected.worker_id] = failure
                else:
                    return TokenStream(self._driver, selected, reservation, opened)

        return await self._retried(attempt)

    async def _others(self, scope: Scope, avoided: dict[int, WorkerError]) -> list[int]:
        workers = await self._driver.ask(calls.workers(self._tenant_id, scope.model_name))
        return [
            worker.worker_id
            for worker in workers
            if worker.lifecycle == "schedulable" and worker.worker_id not in avoided
        ]

    async def best_worker(
        self,
        token_ids: Sequence[int],
        router_config_override: Override = None,
        request_id: str | None = None,
        **options: Unpack[RoutingOptions],
    ) -> tuple[int, int, int]:
        """Return (worker_id, dp_rank, overlap_blocks). The overlap counts only device memory.

        If request_id is given, the rank is reserved under this id. The caller must later call
        mark_prefill_complete() and free(), on this router or another; aclose() does not free the
        rank. options: see RoutingOptions. Raises NoWorkerAvailable at once, without retries, if
        all workers are busy.
        """
        wanted = self._wanted(token_ids, router_config_override, options)

        async def attempt() -> Selected:
            scope = await self._scope()
            fields = wanted.fields(scope)
            if request_id is None:
                selected = await self._driver.ask(calls.select(fields))
                _check_size(scope.block_size, selected.block_size)
                return selected
            reservation = Reservation(len(token_ids), reservation_id=request_id)
            selected = await self._booked(reservation, fields, scope)
            self._driver.hand_over(reservation)
            return selected

        selected = await self._retried(attempt, ONCE)
        return selected.worker_id, selected.dp_rank, selected.overlap_blocks

    async def get_potential_loads(
        self,
        token_ids: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[dict[str, int]]:
        """Return the load that each rank would have with this prompt: worker_id, dp_rank,
        potential_prefill_tokens, potential_decode_blocks, active_requests."""
        fields = prompt_fields(token_ids, await self._scope(), lora_name, cache_salt)
        return await self._driver.ask(calls.potential_loads(fields))

    async def get_overlap_scores(
        self,
        token_ids: Sequence[int],
        router_config_override: Override = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """Return the answer of /overlap_scores: how much of the prompt each rank has cached."""
        fields = prompt_fields(token_ids, await self._scope(), lora_name, cache_salt)
        if (override := self._config.override(router_config_override)) is not None:
            fields["router_config_override"] = override
        return await self._driver.ask(calls.overlap_scores(fields))

    async def mark_prefill_complete(self, request_id: str) -> None:
        """Reports that a request's first token has come. Raises NotFound for an unknown id."""
        await self._driver.ask(calls.prefill_complete(request_id))

    async def free(
        self,
        request_id: str,
        outcome: Outcome | None = None,
        *,
        cached_tokens: int | None = None,
    ) -> None:
        """Frees a reservation. Raises NotFound for an unknown id. Other arguments: see report()."""
        call = calls.free(request_id, outcome=outcome, cached_tokens=cached_tokens)
        await self._driver.ask(call)

    async def report(
        self,
        worker_id: int,
        outcome: Outcome,
        dp_rank: int | None = None,
        *,
        ttft_ms: float | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """Reports the outcome of a request that was sent to a worker without a reservation.

        outcome: "ok", "failed" or "refused" (no connection). dp_rank: None for all ranks of the
        worker. cached_tokens: prompt tokens that the engine had cached. Several consecutive
        failures eject the worker temporarily. Raises NotFound for an unknown worker or rank.
        """
        call = calls.report(
            worker_id,
            outcome=outcome,
            dp_rank=dp_rank,
            ttft_ms=ttft_ms,
            cached_tokens=cached_tokens,
        )
        await self._driver.ask(call)

    async def dump_events(self) -> str:
        """Return a JSON list of KV events that rebuild the service's index of this model."""
        scope = await self._scope()
        dump = await self._driver.ask(calls.dump())
        events = dump.get(f"{scope.model_name}:{scope.tenant_id}", {}).get("events", [])
        return msgspec.json.encode(events).decode()

    # -- for callers that send the request to the worker themselves --------------------------------

    @asynccontextmanager
    async def reserve(
        self,
        token_ids: Sequence[int],
        *,
        router_config_override: Override = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        disaggregate: Disaggregate | None = None,
        prefill_allowed_worker_ids: Sequence[int] | None = None,
        **options: Unpack[RoutingOptions],
    ) -> AsyncIterator[Placement]:
        """`async with router.reserve(token_ids) as placement:` reserves a rank until the end of the
        block. With a SyncKvRouter, use `with`.

        disaggregate: "auto" or "always" asks for a pair of workers. `placement.prefill` is then the
            one for the prefill, and the placement itself the one for the decode.
        prefill_allowed_worker_ids: choose only these for the prefill.
        options: see RoutingOptions.

        Retries with the router's `backoff` while workers are busy or the service is unreachable."""
        wanted = self._wanted(
            token_ids,
            router_config_override,
            options,
            worker_id,
            dp_rank,
            disaggregate=disaggregate,
            prefill_allowed_worker_ids=prefill_allowed_worker_ids,
        )

        async def attempt() -> tuple[Selected, Reservation]:
            scope = await self._scope()
            return await self._placed(wanted, scope, wanted.fields(scope))

        async with self._freed(*await self._retried(attempt)) as placement:
            yield placement

    @asynccontextmanager
    async def route(
        self, body: bytes | Mapping[str, object], path: str = "/v1/chat/completions"
    ) -> AsyncIterator[Placement]:
        """`async with router.route(body) as placement:` reserves a rank until the end of the block,
        for an OpenAI request with this body. The service reads the prompt; it needs --prompts.

        Retries with the router's `backoff` while workers are busy or the service is unreachable."""

        async def attempt() -> tuple[Selected, Reservation]:
            reservation = Reservation(0)
            call = calls.route(reservation.id, path, body)
            return await self._driver.book(call, reservation), reservation

        async with self._freed(*await self._retried(attempt)) as placement:
            yield placement

    @asynccontextmanager
    async def _freed(
        self, selected: Selected, reservation: Reservation
    ) -> AsyncIterator[Placement]:
        try:
            yield Placement(self._driver, selected, reservation)
        finally:
            await self._driver.release_now(reservation)

    async def aclose(self) -> None:
        """Frees the reservations that generate(), reserve() and route() have made or are making,
        then closes all connections.

        A call that is still waiting for a worker raises ClientClosed."""
        await self._driver.close()

    # -- which model, which blocks -----------------------------------------------------------------

    async def _scope(self, model: str | None = None) -> Scope:
        """Return model, tenant and block size for requests. What the router's settings leave open
        is looked up at the service.

        If the router has no model_name, uses the only served model, or `model` if none or several
        are served. Raises ModelNotNamed if several are served and `model` is not one of them."""
        name, size, is_eagle = self._model_name, self._block_size, self._is_eagle
        if name is None or size is None:
            served = await self._served_models(name or model)
            if name is None and len(served) == 1:
                (name,) = served
            elif name is None:
                if served and model not in served:
                    raise ModelNotNamed(served)
                name = model or "default"
            if (found := served.get(name)) is not None:
                _check_size(size, found.block_size)
                size = found.block_size
                is_eagle = found.is_eagle if is_eagle is None else is_eagle
        return Scope(name, self._tenant_id, size, bool(is_eagle))

    async def _served_models(self, model: str | None) -> dict[str, Worker]:
        """Return a worker of each model, cached for FRESH_S s. An uncached `model` is looked up."""
        now = time.monotonic()
        is_fresh = bool(self._served) and now - self._looked_at < FRESH_S
        if is_fresh and (model is None or model in self._served or model in self._sought):
            return self._served
        workers = await self._driver.ask(calls.workers(self._tenant_id))
        self._served = {worker.model_name: worker for worker in workers if worker.block_size}
        self._sought = {model, *(self._sought if is_fresh else ())}
        self._looked_at = now
        return self._served

    # -- tries -------------------------------------------------------------------------------------

    def _wanted(
        self,
        token_ids: Sequence[int],
        override: Override,
        options: RoutingOptions,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        **more: object,
    ) -> Wanted:
        """Return what a request asks for. `more`: fields of the request that have no option."""
        if unknown := options.keys() - RoutingOptions.__annotations__:
            raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
        terms: dict[str, object] = {**options, **more}
        terms["router_config_override"] = self._config.override(override)
        if dp_rank is not None:
            if worker_id is None:
                raise ValueError("dp_rank needs worker_id")
            terms["pinned_worker"] = {"worker_id": worker_id, "dp_rank": dp_rank}
        elif worker_id is not None:
            terms["allowed_worker_ids"] = [worker_id]
        for name in ("lora_name", "cache_salt"):  # those of the prompt
            terms.pop(name, None)
        given = {name: value for name, value in terms.items() if value is not None}
        return Wanted(token_ids, options, given)

    async def _retried(
        self, attempt: Callable[[], Awaitable[T]], backoff: Backoff | None = None
    ) -> T:
        """Runs `attempt`, and repeats it as `backoff` (by default, the router's) says while no
        worker is free or the service is unreachable. If the workers' block size has changed since
        it was looked up, looks the size up again and starts over once."""
        backoff = backoff or self._backoff
        try:
            return await self._driver.retried(attempt, backoff, _is_temporary)
        except WrongBlockSize:
            if self._block_size is not None:
                raise
            self._served = {}
            return await self._driver.retried(attempt, backoff, _is_temporary)

    async def _placed(
        self, wanted: Wanted, scope: Scope, fields: Mapping[str, object]
    ) -> tuple[Selected, Reservation]:
        expected = wanted.options.get("expected_output_tokens")
        reservation = Reservation(len(wanted.token_ids), expected_output_tokens=expected)
        selected = await self._booked(reservation, fields, scope)
        if self._config.track_output_blocks:
            reservation.block_size = selected.block_size
        return selected, reservation

    async def _booked(
        self, reservation: Reservation, fields: Mapping[str, object], scope: Scope
    ) -> Selected:
        """Tries once to reserve. Frees the reservation if the worker's block size is another."""
        call = calls.select_and_reserve(reservation.id, fields)
        selected = await self._driver.book(call, reservation)
        try:
            _check_size(scope.block_size, selected.block_size)
        except WrongBlockSize:
            await self._driver.release_now(reservation)
            raise
        return selected


def _check_size(ours: int | None, theirs: int | None) -> None:
    if ours is not None and theirs is not None and ours != theirs:
        raise WrongBlockSize(ours, theirs)


def _is_temporary(error: ClientError) -> bool:
    """Return whether another try, or another worker, may take the request."""
    if isinstance(error, WorkerRefused):
        return error.status in NOT_FREE
    return isinstance(error, NoWorkerAvailable | ServiceUnreachable | WorkerUnreachable)


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


KvPushRouter = KvRouter
