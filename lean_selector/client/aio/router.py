"""KvRouter: the document's router API, asynchronous, in front of a selection service.

Translates calls into flows of `routing`, which `driver` runs. Section "Using KvPushRouter Python
API" of the router examples; KvPushRouter is the document's name for it.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from lean_selector.client import service_calls
from lean_selector.client.access import Access, Cert, Token, Verify
from lean_selector.client.aio.driver import Driver, Opened
from lean_selector.client.backoff import Backoff
from lean_selector.client.completions import Chunk, Option
from lean_selector.client.exchanges import Selected
from lean_selector.client.placed import ChunkIntake, Outcome, Placed
from lean_selector.client.reservation import Reservation
from lean_selector.client.router_config import KvRouterConfig
from lean_selector.client.routing import Routing, ask
from lean_selector.client.terms import Generation, Prompt, Terms
from lean_selector.client.timeouts import Timeouts


class KvRouter:
    """Selects workers, books and frees, and streams from them. Use as `async with`, or aclose()."""

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
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """
        endpoint: URL of the selection service, or unix:PATH.
        block_size: tokens per KV block, which must be the workers'. None: as the service says.
        model_name: under which the workers are registered. None: the only one there is.
        is_eagle: None: as the service says.
        return_token_ids: ask engines for token ids in the stream (a vLLM extension; switch it off
            for an engine that refuses unknown fields).
        verify, cert, token: for the service, not for workers. verify is True for the system's
            authorities, the path of a PEM file with others, False to believe anybody, or an
            SSLContext; cert the path of our certificate with its key, or a pair of paths; token a
            bearer token, or a function that gives that of now.

        Raises ValueError for an endpoint, a block size or a token that cannot be, and OSError for
        files that cannot be used.
        """
        self._routing = Routing(
            kv_router_config, block_size, model_name, tenant_id, is_eagle, backoff or Backoff(), rng
        )
        self._return_token_ids = return_token_ids
        self._driver = Driver(
            endpoint, self._routing, timeouts or Timeouts(), sleep, Access(verify, cert, token)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Free what streams and placements hold or are about to, then close all connections.

        A call that waits for a worker raises ClientClosed.
        """
        await self._driver.close()

    # -- the document's methods ----------------------------------------------------------------

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
    ) -> "TokenStream":
        """Choose and book a worker, and open its stream: `stream = await router.generate(...)`.

        stop_conditions, sampling_options, output_options, extra_args: fields of the worker's
            /v1/completions, later ones winning; the router document's names are understood.
        worker_id: only this worker; with dp_rank, only that rank of it.
        expected_output_tokens: lets the load of a request fade as it nears its end.

        Busy workers and an absent service are waited for as `backoff` says; a worker that does not
        take the request is avoided while there are others. Raises ClientError and ValueError.
        """
        terms = Terms(
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
        selected, reservation, opened = await self._driver.drive(
            self._routing.generate(prompt, terms, wanted)
        )
        return TokenStream(self._driver, selected, reservation, opened)

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
        """(worker_id, dp_rank, overlap_blocks): device blocks of the prompt on that rank.

        With request_id the placement is booked under it, and is the caller's: it must call
        mark_prefill_complete() and free(), of this router or of any other; aclose() frees only
        what streams and placements hold. Raises NoWorkerAvailable at once, without retries. When
        it raises, the id is free again.
        """
        terms = Terms(
            router_config_override=router_config_override,
            routing_constraints=routing_constraints,
            strict_priority=strict_priority,
        )
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return await self._driver.drive(self._routing.best_worker(prompt, terms, request_id))

    async def get_potential_loads(
        self,
        token_ids: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[dict[str, int]]:
        """A row for each rank, as it would be with this prompt: worker_id, dp_rank,
        potential_prefill_tokens, potential_decode_blocks, active_requests."""
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return await self._driver.drive(self._routing.potential_loads(prompt))

    async def get_overlap_scores(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, object] | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """Cached blocks of the prompt by rank and tier, as the service's /overlap_scores."""
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return await self._driver.drive(
            self._routing.overlap_scores(prompt, router_config_override)
        )

    async def mark_prefill_complete(self, request_id: str) -> None:
        """Raises NotFound for an id that is not booked."""
        await self._driver.drive(ask(service_calls.prefill_complete(request_id)))

    async def free(
        self,
        request_id: str,
        outcome: Outcome | None = None,
        *,
        cached_tokens: int | None = None,
    ) -> None:
        """outcome, cached_tokens: as in report(). Raises NotFound for an id that is not booked."""
        call = service_calls.free(request_id, outcome, cached_tokens)
        await self._driver.drive(ask(call))

    async def report(
        self,
        worker_id: int,
        outcome: Outcome,
        dp_rank: int | None = None,
        *,
        ttft_ms: float | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """How a request to a worker went that you sent yourself, without a booking.

        refused: nobody took the connection; failed; or ok. Without dp_rank the whole worker counts.
        Who fails several times in a row is given no requests for a while. Raises NotFound.
        """
        call = service_calls.report(worker_id, outcome, dp_rank, ttft_ms, cached_tokens)
        await self._driver.drive(ask(call))

    async def dump_events(self) -> str:
        """All KV events that rebuild the service's index of this model, as a JSON list."""
        return await self._driver.drive(self._routing.dump_events())

    # -- for those who forward a request themselves --------------------------------------------

    @contextlib.asynccontextmanager
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
    ) -> AsyncIterator["Placement"]:
        """`async with router.reserve(token_ids) as placement:` books, and frees at the end.

        Busy workers and an absent service are waited for as `backoff` says.
        """
        terms = Terms(
            router_config_override=router_config_override,
            worker_id=worker_id,
            dp_rank=dp_rank,
            expected_output_tokens=expected_output_tokens,
            priority_jump=priority_jump,
            strict_priority=strict_priority,
            routing_constraints=routing_constraints,
        )
        prompt = Prompt(token_ids, lora_name, cache_salt)
        selected, reservation = await self._driver.drive(self._routing.place(prompt, terms))
        try:
            yield Placement(self._driver, selected, reservation)
        finally:
            await self._driver.release_now(reservation)


KvPushRouter = KvRouter


class TokenStream(ChunkIntake):
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

    async def aclose(self) -> None:
        """Stop the generation and free its reservation."""
        self._ready.clear()
        await self._driver.release_now(self._reservation)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # May run in any thread, and at any moment: only hand over what has to be released.
        if not self._reservation.ended:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all with it
                self._loop.call_soon_threadsafe(self._driver.release, self._reservation)


class Placement(Placed):
    """A booked rank, for as long as the `async with` lasts."""

    def __init__(self, driver: Driver, selected: Selected, reservation: Reservation) -> None:
        super().__init__(selected, reservation)
        self._driver = driver

    async def prefill_complete(self) -> None:
        """The first token is there. Raises NotFound when the reservation has expired."""
        await self._driver.drive(ask(service_calls.prefill_complete(self.reservation_id)))

    async def output_block(self, decay_fraction: float | None = None) -> None:
        """One more block of output is full; decay_fraction (0 to 1) weighs the request's blocks."""
        call = service_calls.output_block(self.reservation_id, decay_fraction)
        await self._driver.drive(ask(call))
