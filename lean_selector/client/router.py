"""KvRouter and SyncKvRouter: the document's router API, in front of a selection service.

Section "Using KvPushRouter Python API" of the router examples; KvPushRouter is the document's name.
Each method is written once, in RouterCalls, and returns a flow of `routing`; a router's own method
has the same arguments and runs that flow with its driver.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from lean_selector.client import calls
from lean_selector.client.calls import Selected
from lean_selector.client.client_settings import (
    Access,
    Backoff,
    Cert,
    KvRouterConfig,
    Timeouts,
    Token,
    Verify,
)
from lean_selector.client.completions import Chunk, Option
from lean_selector.client.drivers import Driver, SyncDriver, awaited, described_by, done
from lean_selector.client.errors import ClientClosed
from lean_selector.client.reservation import ChunkIntake, Outcome, Placed, Reservation
from lean_selector.client.routing import Flow, Generation, Prompt, Routing, Wishes, ask
from lean_selector.client.transport import AsyncClosing, Closing, Opened

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", Driver, SyncDriver)


class RouterCalls:
    """The methods of both routers, as flows; a router's method returns the flow's result."""

    def __init__(self, routing: Routing, return_token_ids: bool) -> None:
        self._routing = routing
        self._return_token_ids = return_token_ids

    def generate(
        self,
        token_ids: Sequence[int],
        model: str,
        stop_conditions: Option = None,
        sampling_options: Option = None,
        output_options: Option = None,
        router_config_override: Mapping[str, object] | None = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        extra_args: Option = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        expected_output_tokens: int | None = None,
        priority_jump: float | None = None,
        strict_priority: int | None = None,
        routing_constraints: Mapping[str, object] | None = None,
    ) -> Flow[tuple[Selected, Reservation, Any]]:
        """Choose and book a worker, and open its stream: a TokenStream, or a SyncTokenStream.

        stop_conditions, sampling_options, output_options, extra_args: fields of the worker's
            /v1/completions, later ones winning; the router document's names are understood.
        worker_id: only this worker; with dp_rank, only that rank of it.
        expected_output_tokens: lets the load of a request decrease as it nears its end.

        Retries as set by `backoff` while workers are busy or the service is absent; a worker that
        does not accept the request is avoided while there are others. Raises ClientError and
        ValueError.
        """
        terms = Wishes(
            router_config_override=router_config_override,
            worker_id=worker_id,
            dp_rank=dp_rank,
            expected_output_tokens=expected_output_tokens,
            priority_jump=priority_jump,
            strict_priority=strict_priority,
            routing_constraints=routing_constraints,
        )
        options = (stop_conditions, sampling_options, output_options, extra_args)
        wanted = Generation(model, options, self._return_token_ids)
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return self._routing.generate(prompt, terms, wanted)

    def best_worker(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, object] | None = None,
        request_id: str | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        routing_constraints: Mapping[str, object] | None = None,
        strict_priority: int | None = None,
    ) -> Flow[tuple[int, int, int]]:
        """(worker_id, dp_rank, overlap_blocks): device blocks of the prompt on that rank.

        With request_id the placement is reserved under that id, and belongs to the caller, who must
        call mark_prefill_complete() and free(), on this router or another; aclose() frees only
        reservations of streams and placements. Raises NoWorkerAvailable at once, without retries.
        When
        it raises, the id is free again.
        """
        terms = Wishes(
            router_config_override=router_config_override,
            routing_constraints=routing_constraints,
            strict_priority=strict_priority,
        )
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return self._routing.best_worker(prompt, terms, request_id)

    def get_potential_loads(
        self,
        token_ids: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> Flow[list[dict[str, int]]]:
        """A row for each rank, as it would be with this prompt: worker_id, dp_rank,
        potential_prefill_tokens, potential_decode_blocks, active_requests."""
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return self._routing.potential_loads(prompt)

    def get_overlap_scores(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, object] | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> Flow[dict[str, Any]]:
        """Cached blocks of the prompt by rank and tier, as the service's /overlap_scores."""
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return self._routing.overlap_scores(prompt, router_config_override)

    def mark_prefill_complete(self, request_id: str) -> Flow[None]:
        """Raises NotFound for an unknown id."""
        return ask(calls.prefill_complete(request_id))

    def free(
        self,
        request_id: str,
        outcome: Outcome | None = None,
        *,
        cached_tokens: int | None = None,
    ) -> Flow[None]:
        """outcome, cached_tokens: as in report(). Raises NotFound for an unknown id."""
        return ask(calls.free(request_id, outcome, cached_tokens))

    def report(
        self,
        worker_id: int,
        outcome: Outcome,
        dp_rank: int | None = None,
        *,
        ttft_ms: float | None = None,
        cached_tokens: int | None = None,
    ) -> Flow[None]:
        """Report the outcome of a request that you sent to a worker yourself, without a
        reservation.

        refused: the connection was refused; failed; or ok. Without dp_rank the whole worker counts.
        A worker is temporarily ejected after several consecutive failures. Raises NotFound.
        """
        call = calls.report(worker_id, outcome, dp_rank, ttft_ms, cached_tokens)
        return ask(call)

    def dump_events(self) -> Flow[str]:
        """All KV events that rebuild the service's index of this model, as a JSON list."""
        return self._routing.dump_events()

    # -- for callers that send the request to the worker themselves -----------------------------

    def reserve(
        self,
        token_ids: Sequence[int],
        *,
        router_config_override: Mapping[str, object] | None = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        expected_output_tokens: int | None = None,
        priority_jump: float | None = None,
        strict_priority: int | None = None,
        routing_constraints: Mapping[str, object] | None = None,
    ) -> Flow[tuple[Selected, Reservation]]:
        """`with router.reserve(token_ids) as placement:` books, and frees at the end; `async with`
        on an event loop.

        Retries as set by `backoff` while workers are busy or the service is absent.
        """
        terms = Wishes(
            router_config_override=router_config_override,
            worker_id=worker_id,
            dp_rank=dp_rank,
            expected_output_tokens=expected_output_tokens,
            priority_jump=priority_jump,
            strict_priority=strict_priority,
            routing_constraints=routing_constraints,
        )
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return self._routing.place(prompt, terms)

    def route(
        self, body: bytes | Mapping[str, object], path: str = "/v1/chat/completions"
    ) -> Flow[tuple[Selected, Reservation]]:
        """`async with router.route(body) as placement:` books as reserve() does, for a raw OpenAI
        request, and frees at the end.

        The service must run with --prompts. Retries as set by `backoff` while workers are busy.
        """
        return self._routing.route(path, body)


class _Router(Generic[D]):
    _kind: type[D]

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
        rng: random.Random | None = None,
        verify: Verify = True,
        cert: Cert | None = None,
        token: Token | None = None,
        sleep: Callable[[float], Any] | None = None,
    ) -> None:
        """
        endpoint: URL of the selection service, or unix:PATH.
        block_size: tokens per KV block, which must be the workers'. None: as reported by the
        service.
        model_name: under which the workers are registered. None: the only one there is.
        is_eagle: None: as reported by the service.
        return_token_ids: ask engines for token ids in the stream (a vLLM extension; switch it off
            for an engine that refuses unknown fields).
        verify, cert, token: for the service, not for workers. verify is True for the system's
            authorities, the path of a PEM file with others, False for no verification, or an
            SSLContext; cert the path of our certificate with its key, or a pair of paths; token a
            bearer token, or a function that returns the current one.
        sleep: waits that many seconds.

        Raises ValueError for an invalid endpoint, block size or token, and OSError for unusable
        files.
        """
        self._routing = Routing(
            kv_router_config, block_size, model_name, tenant_id, is_eagle, backoff or Backoff(), rng
        )
        self._calls = RouterCalls(self._routing, return_token_ids)
        self._driver: D = self._kind(
            endpoint, self._routing, timeouts or Timeouts(), sleep, Access(verify, cert, token)
        )


# -- on an event loop -----------------------------------------------------------------------------


class TokenStream(ChunkIntake, AsyncClosing):
    """The chunks of one generation, as dicts: see CompletionStream.

    Its reservation is freed when the stream ends or fails, when the task that reads it is
    cancelled, on aclose(), and when the object is dropped, read or not.
    """

    def __init__(
        self, driver: Driver, selected: Selected, reservation: Reservation, opened: Opened
    ) -> None:
        super().__init__(selected, reservation)
        self._driver = driver
        self._opened = opened
        self._loop = asyncio.get_running_loop()
        driver.hold(reservation, opened)

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
            self._note(error)
            self._driver.release(self._reservation)
            raise

    def taken(self) -> Chunk | None:
        """The next buffered chunk, if any."""
        return self._ready.popleft() if self._ready else None

    def forget(self) -> None:
        """Drop the remaining chunks."""
        self._ready.clear()

    async def aclose(self) -> None:
        """Stop the generation and free its reservation."""
        self.forget()
        await self._driver.release_now(self._reservation)

    def __del__(self) -> None:
        # May run in any thread at any moment: only schedule the release.
        if not self._reservation.ended:
            with suppress(RuntimeError):  # the loop has ended, and its driver with it
                self._loop.call_soon_threadsafe(self._driver.release, self._reservation)


class Placement(Placed):
    """A reserved rank, for the duration of the `async with`."""

    def __init__(self, driver: Driver, selected: Selected, reservation: Reservation) -> None:
        super().__init__(selected, reservation)
        self._driver = driver

    async def prefill_complete(self) -> None:
        """Report the first token. Raises NotFound if the reservation has expired."""
        await self._driver.drive(ask(calls.prefill_complete(self.reservation_id)))

    async def output_block(self, decay_fraction: float | None = None) -> None:
        """Report one more full block of output; decay_fraction (0 to 1) scales the request's
        blocks."""
        call = calls.output_block(self.reservation_id, decay_fraction)
        await self._driver.drive(ask(call))


Flows = Callable[Concatenate[RouterCalls, P], Flow[T]]
Generated = tuple[Selected, Reservation, Any]
Reserved = tuple[Selected, Reservation]


def _streamed(
    flow: Flows[P, Generated],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, TokenStream]]:
    @described_by(flow)
    async def method(router: "KvRouter", /, *args: P.args, **kwargs: P.kwargs) -> TokenStream:
        placed = await router._driver.drive(flow(router._calls, *args, **kwargs))
        return TokenStream(router._driver, *placed)

    return method


def _reserved(
    flow: Flows[P, Reserved],
) -> Callable[Concatenate[Any, P], AbstractAsyncContextManager[Placement]]:
    @described_by(flow)
    @asynccontextmanager
    async def method(
        router: "KvRouter", /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncIterator[Placement]:
        driver = router._driver
        selected, reservation = await driver.drive(flow(router._calls, *args, **kwargs))
        try:
            yield Placement(driver, selected, reservation)
        finally:
            await driver.release_now(reservation)

    return method


class KvRouter(_Router[Driver], AsyncClosing):
    """Selects workers, reserves and frees, and streams from them. Use as `async with`, or
    aclose()."""

    _kind = Driver
    generate = _streamed(RouterCalls.generate)
    best_worker = awaited(RouterCalls.best_worker)
    get_potential_loads = awaited(RouterCalls.get_potential_loads)
    get_overlap_scores = awaited(RouterCalls.get_overlap_scores)
    mark_prefill_complete = awaited(RouterCalls.mark_prefill_complete)
    free = awaited(RouterCalls.free)
    report = awaited(RouterCalls.report)
    dump_events = awaited(RouterCalls.dump_events)
    reserve = _reserved(RouterCalls.reserve)
    route = _reserved(RouterCalls.route)

    async def aclose(self) -> None:
        """Free all reservations of streams and placements, also pending ones, then close all
        connections.

        A call that waits for a worker raises ClientClosed.
        """
        await self._driver.close()


KvPushRouter = KvRouter


# -- without an event loop ------------------------------------------------------------------------


class SyncTokenStream(Placed, Closing):
    """The chunks of one generation, as dicts: see CompletionStream.

    Its reservation is freed when the stream ends or fails, on close(), and when it is dropped.
    """

    def __init__(
        self,
        driver: SyncDriver,
        selected: Selected,
        reservation: Reservation,
        stream: TokenStream,
    ) -> None:
        super().__init__(selected, reservation)
        self._driver = driver
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        chunk = self._stream.taken()
        if chunk is not None:
            return chunk
        try:
            return self._driver.run(self._stream.__anext__())
        except (StopAsyncIteration, ClientClosed):
            raise StopIteration from None

    def close(self) -> None:
        """Stop the generation and free its reservation."""
        self._stream.forget()
        self._driver.release(self._reservation)


class SyncPlacement(Placed):
    """A reserved rank, for the duration of the `with`."""

    def __init__(self, driver: SyncDriver, selected: Selected, reservation: Reservation) -> None:
        super().__init__(selected, reservation)
        self._driver = driver

    def prefill_complete(self) -> None:
        """Report the first token. Raises NotFound if the reservation has expired."""
        self._driver.drive(ask(calls.prefill_complete(self.reservation_id)))

    def output_block(self, decay_fraction: float | None = None) -> None:
        """Report one more full block of output; decay_fraction (0 to 1) scales the request's
        blocks."""
        call = calls.output_block(self.reservation_id, decay_fraction)
        self._driver.drive(ask(call))


def _sync_streamed(
    flow: Flows[P, Generated],
) -> Callable[Concatenate[Any, P], SyncTokenStream]:
    @described_by(flow)
    def method(router: "SyncKvRouter", /, *args: P.args, **kwargs: P.kwargs) -> SyncTokenStream:
        sync = router._driver

        async def opened() -> SyncTokenStream:
            placed = await sync.driver.drive(flow(router._calls, *args, **kwargs))
            return SyncTokenStream(sync, *placed[:2], TokenStream(sync.driver, *placed))

        return sync.run(opened())

    return method


def _sync_reserved(
    flow: Flows[P, Reserved],
) -> Callable[Concatenate[Any, P], AbstractContextManager[SyncPlacement]]:
    @described_by(flow)
    @contextmanager
    def method(
        router: "SyncKvRouter", /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[SyncPlacement]:
        driver = router._driver
        selected, reservation = driver.drive(flow(router._calls, *args, **kwargs))
        try:
            yield SyncPlacement(driver, selected, reservation)
        finally:
            driver.release(reservation)

    return method


class SyncKvRouter(_Router[SyncDriver], Closing):
    """KvRouter without an event loop: the same methods and arguments. Use as `with`, or close()."""

    _kind = SyncDriver
    generate = _sync_streamed(RouterCalls.generate)
    best_worker = done(RouterCalls.best_worker)
    get_potential_loads = done(RouterCalls.get_potential_loads)
    get_overlap_scores = done(RouterCalls.get_overlap_scores)
    mark_prefill_complete = done(RouterCalls.mark_prefill_complete)
    free = done(RouterCalls.free)
    report = done(RouterCalls.report)
    dump_events = done(RouterCalls.dump_events)
    reserve = _sync_reserved(RouterCalls.reserve)
    route = _sync_reserved(RouterCalls.route)

    def close(self) -> None:
        """Free all reservations of streams and placements, then close all connections."""
        self._driver.close()
