"""KvRouter and SyncKvRouter: Dynamo's Python router API, on top of a selection service.

The API is specified in Dynamo's document "Using KvPushRouter Python API". KvPushRouter in that
document is KvRouter here. SyncKvRouter runs the methods of a KvRouter in a thread."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

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
from lean_selector.client.completions import Chunk, Option, completion_body
from lean_selector.client.drivers import Driver, LoopThread
from lean_selector.client.errors import ClientClosed
from lean_selector.client.reservation import ChunkIntake, Outcome, Placed, Reservation
from lean_selector.client.routing import Prompt, Routing, Wishes
from lean_selector.client.transport import AsyncClosing, Closing, Opened

P = ParamSpec("P")
T = TypeVar("T")


# -- on an event loop ------------------------------------------------------------------------------


class TokenStream(ChunkIntake, AsyncClosing):
    """The chunks of one generation, as dicts; see CompletionStream.

    The reservation is freed when the stream ends or fails, on aclose(), when the reading task is
    cancelled, and when this object is garbage-collected, even if no chunk was read."""

    def __init__(
        self, driver: Driver, selected: Selected, reservation: Reservation, opened: Opened
    ) -> None:
        super().__init__(selected, reservation)
        self._driver = driver
        self._opened = opened
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
        """Return the next chunk that was received but not read, or None."""
        return self._ready.popleft() if self._ready else None

    def forget(self) -> None:
        """Drops the chunks that were received but not read."""
        self._ready.clear()

    async def aclose(self) -> None:
        """Stops the generation, and frees the reservation."""
        self.forget()
        await self._driver.release_now(self._reservation)

    def __del__(self) -> None:
        self._driver.release_from_anywhere(self._reservation)


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
        rng: random.Random | None = None,
        verify: Verify = True,
        cert: Cert | None = None,
        token: Token | None = None,
        sleep: Callable[[float], Any] | None = None,
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
        sleep: called with the seconds to wait before a retry, in place of asyncio.sleep.

        Raises ValueError for an invalid endpoint, block size or token, and OSError for unusable
        certificate or key files.
        """
        self._return_token_ids = return_token_ids
        self._driver = Driver(endpoint, timeouts or Timeouts(), sleep, Access(verify, cert, token))
        self._routing = Routing(
            self._driver,
            kv_router_config,
            block_size,
            model_name,
            tenant_id,
            is_eagle,
            backoff or Backoff(),
            rng,
        )

    async def generate(
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
    ) -> TokenStream:
        """Reserves a worker, sends it the request, and returns the stream of output chunks.

        stop_conditions, sampling_options, output_options, extra_args: fields for the worker's
            /v1/completions. If several of these set the same field, the last one counts.
        worker_id: choose only this worker; with dp_rank, only this rank of the worker.
        expected_output_tokens: if given, the request's load decreases as its output grows.

        Retries with the router's `backoff` while workers are busy or the service is unreachable.
        If a worker does not accept the request, another worker is tried if there is one. Raises
        ClientError and ValueError.
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
        body = completion_body(
            token_ids,
            model,
            (stop_conditions, sampling_options, output_options, extra_args),
            return_token_ids=self._return_token_ids,
            cache_salt=cache_salt,
        )
        prompt = Prompt(token_ids, lora_name, cache_salt)
        placed = await self._routing.generate(prompt, terms, model, body)
        return TokenStream(self._driver, *placed)

    async def best_worker(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, object] | None = None,
        request_id: str | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        routing_constraints: Mapping[str, object] | None = None,
        strict_priority: int | None = None,
    ) -> tuple[int, int, int]:
        """Return (worker_id, dp_rank, overlap_blocks). The overlap counts only device memory.

        If request_id is given, the rank is reserved under this id. The caller must later call
        mark_prefill_complete() and free(), on this router or another; aclose() does not free the
        rank. Raises NoWorkerAvailable at once, without retries, if all workers are busy.
        """
        terms = Wishes(
            router_config_override=router_config_override,
            routing_constraints=routing_constraints,
            strict_priority=strict_priority,
        )
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return await self._routing.best_worker(prompt, terms, request_id)

    async def get_potential_loads(
        self,
        token_ids: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[dict[str, int]]:
        """Return the load that each rank would have with this prompt: worker_id, dp_rank,
        potential_prefill_tokens, potential_decode_blocks, active_requests."""
        return await self._routing.potential_loads(Prompt(token_ids, lora_name, cache_salt))

    async def get_overlap_scores(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, object] | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """Return the answer of /overlap_scores: how much of the prompt each rank has cached."""
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return await self._routing.overlap_scores(prompt, router_config_override)

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
        await self._driver.ask(calls.free(request_id, outcome, cached_tokens))

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
        call = calls.report(worker_id, outcome, dp_rank, ttft_ms, cached_tokens)
        await self._driver.ask(call)

    async def dump_events(self) -> str:
        """Return a JSON list of KV events that rebuild the service's index of this model."""
        return await self._routing.dump_events()

    # -- for callers that send the request to the worker themselves --------------------------------

    @asynccontextmanager
    async def reserve(
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
    ) -> AsyncIterator[Placement]:
        """`async with router.reserve(token_ids) as placement:` reserves a rank until the end of the
        block. With a SyncKvRouter, use `with`.

        Retries with the router's `backoff` while workers are busy or the service is unreachable."""
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
        async with self._freed(*await self._routing.place(prompt, terms)) as placement:
            yield placement

    @asynccontextmanager
    async def route(
        self, body: bytes | Mapping[str, object], path: str = "/v1/chat/completions"
    ) -> AsyncIterator[Placement]:
        """`async with router.route(body) as placement:` reserves a rank until the end of the block,
        for an OpenAI request with this body. The service reads the prompt; it needs --prompts.

        Retries with the router's `backoff` while workers are busy or the service is unreachable."""
        async with self._freed(*await self._routing.route(path, body)) as placement:
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


KvPushRouter = KvRouter


# -- without an event loop -------------------------------------------------------------------------


class SyncTokenStream(Placed, Closing):
    """The chunks of one generation, as dicts; see CompletionStream.

    The reservation is freed when the stream ends or fails, on close(), and when this object is
    garbage-collected."""

    def __init__(self, thread: LoopThread, stream: TokenStream) -> None:
        super().__init__(stream._selected, stream._reservation)
        self._thread = thread
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        chunk = self._stream.taken()
        if chunk is not None:
            return chunk
        try:
            return self._thread.run(self._stream.__anext__())
        except (StopAsyncIteration, ClientClosed):
            raise StopIteration from None

    def close(self) -> None:
        """Stops the generation, and frees the reservation."""
        self._stream.forget()
        if not self._reservation.ended:
            self._thread.run(self._stream.aclose())


class SyncPlacement(Placed):
    """A rank that is reserved until the end of the `with` block."""

    def __init__(self, thread: LoopThread, placement: Placement) -> None:
        super().__init__(placement._selected, placement._reservation)
        self._thread = thread
        self._placement = placement

    @wraps(Placement.prefill_complete)
    def prefill_complete(self) -> None:
        self._thread.run(self._placement.prefill_complete())

    @wraps(Placement.output_block)
    def output_block(self, decay_fraction: float | None = None) -> None:
        self._thread.run(self._placement.output_block(decay_fraction))


def _made_as(
    init: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator that gives a constructor the signature and docstring of `init`."""
    return lambda own: cast(Callable[Concatenate[Any, P], None], wraps(init)(own))


def _run(
    method: Callable[Concatenate[KvRouter, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SyncKvRouter", P], T]:
    """Return a method of SyncKvRouter that runs `method` of KvRouter in the router's thread."""

    @wraps(method)
    def run(router: "SyncKvRouter", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return router._thread.run(method(router._router, *args, **kwargs))

    return run


def _streamed(
    method: Callable[Concatenate[KvRouter, P], Coroutine[Any, Any, TokenStream]],
) -> Callable[Concatenate["SyncKvRouter", P], SyncTokenStream]:
    @wraps(method)
    def streamed(router: "SyncKvRouter", /, *args: P.args, **kwargs: P.kwargs) -> SyncTokenStream:
        stream = router._thread.run(method(router._router, *args, **kwargs))
        return SyncTokenStream(router._thread, stream)

    return streamed


def _reserved(
    method: Callable[Concatenate[KvRouter, P], AbstractAsyncContextManager[Placement]],
) -> Callable[Concatenate["SyncKvRouter", P], AbstractContextManager[SyncPlacement]]:
    """Return a method of SyncKvRouter that runs `method`, a context manager, in a thread."""

    @wraps(method)
    @contextmanager
    def reserved(
        router: "SyncKvRouter", /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[SyncPlacement]:
        held = method(router._router, *args, **kwargs)
        placement = router._thread.run(_entered(held))
        try:
            yield SyncPlacement(router._thread, placement)
        finally:
            if not placement._reservation.ended:  # by the end of the router
                router._thread.run(_left(held))

    return reserved


async def _entered(held: AbstractAsyncContextManager[T]) -> T:
    return await held.__aenter__()


async def _left(held: AbstractAsyncContextManager[T]) -> None:
    await held.__aexit__(None, None, None)


class SyncKvRouter(Closing):
    """KvRouter for programs without an event loop. Use `with`, or call close()."""

    @_made_as(KvRouter.__init__)
    def __init__(self, *args: Any, sleep: Callable[[float], object] | None = None, **more: Any):
        """Like KvRouter(), but `sleep` may block, because it is called in a separate thread."""
        asleep = None if sleep is None else lambda wait_s: asyncio.to_thread(sleep, wait_s)
        self._router = KvRouter(*args, sleep=asleep, **more)
        self._thread = LoopThread(self._router._driver)

    generate = _streamed(KvRouter.generate)
    best_worker = _run(KvRouter.best_worker)
    get_potential_loads = _run(KvRouter.get_potential_loads)
    get_overlap_scores = _run(KvRouter.get_overlap_scores)
    mark_prefill_complete = _run(KvRouter.mark_prefill_complete)
    free = _run(KvRouter.free)
    report = _run(KvRouter.report)
    dump_events = _run(KvRouter.dump_events)
    reserve = _reserved(KvRouter.reserve)
    route = _reserved(KvRouter.route)

    def close(self) -> None:
        """Frees what generate(), reserve() and route() reserved, then closes all connections."""
        self._thread.close()
