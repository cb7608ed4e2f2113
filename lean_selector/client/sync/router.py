"""SyncKvRouter: the router API without an event loop; the twin of `aio.router`, name by name.

Translates calls into flows of `routing`, which `driver` runs.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from lean_selector.client import service_calls
from lean_selector.client.access import Access, Cert, Token, Verify
from lean_selector.client.backoff import Backoff
from lean_selector.client.completions import Chunk, Option
from lean_selector.client.exchanges import Selected
from lean_selector.client.placed import ChunkIntake, Outcome, Placed
from lean_selector.client.reservation import Reservation
from lean_selector.client.router_config import KvRouterConfig
from lean_selector.client.routing import Routing, ask
from lean_selector.client.sync.driver import SyncDriver, SyncOpened
from lean_selector.client.terms import Generation, Prompt, Terms
from lean_selector.client.timeouts import Timeouts


class SyncKvRouter:
    """The twin of KvRouter: same names, same arguments. Use as `with`, or close()."""

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
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """As KvRouter. Raises ValueError for an endpoint or a block size that cannot be."""
        self._routing = Routing(
            kv_router_config, block_size, model_name, tenant_id, is_eagle, backoff or Backoff(), rng
        )
        self._return_token_ids = return_token_ids
        self._driver = SyncDriver(
            endpoint, self._routing, timeouts or Timeouts(), sleep, Access(verify, cert, token)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free what streams and placements still hold, then close all connections."""
        self._driver.close()

    # -- the document's methods ----------------------------------------------------------------

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
    ) -> "SyncTokenStream":
        """As KvRouter.generate(); returns an iterator of chunks."""
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
        selected, reservation, opened = self._driver.drive(
            self._routing.generate(prompt, terms, wanted)
        )
        return SyncTokenStream(self._driver, selected, reservation, opened)

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
    ) -> tuple[int, int, int]:
        """As KvRouter.best_worker(): (worker_id, dp_rank, overlap_blocks)."""
        terms = Terms(
            router_config_override=router_config_override,
            routing_constraints=routing_constraints,
            strict_priority=strict_priority,
        )
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return self._driver.drive(self._routing.best_worker(prompt, terms, request_id))

    def get_potential_loads(
        self,
        token_ids: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[dict[str, int]]:
        """As KvRouter.get_potential_loads(): a row for each rank."""
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return self._driver.drive(self._routing.potential_loads(prompt))

    def get_overlap_scores(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, object] | None = None,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> dict[str, Any]:
        """As KvRouter.get_overlap_scores()."""
        prompt = Prompt(token_ids, lora_name, cache_salt)
        return self._driver.drive(self._routing.overlap_scores(prompt, router_config_override))

    def mark_prefill_complete(self, request_id: str) -> None:
        """Raises NotFound for an id that is not booked."""
        self._driver.drive(ask(service_calls.prefill_complete(request_id)))

    def free(
        self,
        request_id: str,
        outcome: Outcome | None = None,
        *,
        cached_tokens: int | None = None,
    ) -> None:
        """outcome, cached_tokens: as in report(). Raises NotFound for an id that is not booked."""
        call = service_calls.free(request_id, outcome, cached_tokens)
        self._driver.drive(ask(call))

    def report(
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
        self._driver.drive(ask(call))

    def dump_events(self) -> str:
        """All KV events that rebuild the service's index of this model, as a JSON list."""
        return self._driver.drive(self._routing.dump_events())

    # -- for those who forward a request themselves --------------------------------------------

    @contextlib.contextmanager
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
    ) -> Iterator["SyncPlacement"]:
        """`with router.reserve(token_ids) as placement:` books, and frees at the end."""
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
        selected, reservation = self._driver.drive(self._routing.place(prompt, terms))
        try:
            yield SyncPlacement(self._driver, selected, reservation)
        finally:
            self._driver.release(reservation)


class SyncTokenStream(ChunkIntake):
    """The chunks of one generation, as dicts: see CompletionStream.

    Its reservation is freed when the stream ends or fails, on close(), and when it is dropped.
    """

    def __init__(
        self, driver: SyncDriver, selected: Selected, reservation: Reservation, opened: SyncOpened
    ) -> None:
        super().__init__(selected, reservation)
        self._driver = driver
        self._opened = opened
        driver.hold(reservation, opened)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            while not self._ready:
                if self._failure is not None:
                    raise self._failure
                if self._is_over:
                    raise StopIteration
                self._take(self._driver.read(self._opened))
                self._opened.is_done = self._is_over
                self._driver.report(self._reservation)
            return self._ready.popleft()
        except BaseException as error:
            self._note(error)
            self._driver.release(self._reservation)
            raise

    def close(self) -> None:
        """Stop the generation and free its reservation."""
        self._ready.clear()
        self._driver.release(self._reservation)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._reservation.ended:
            self._driver.drop(self._reservation)


class SyncPlacement(Placed):
    """A booked rank, for as long as the `with` lasts."""

    def __init__(self, driver: SyncDriver, selected: Selected, reservation: Reservation) -> None:
        super().__init__(selected, reservation)
        self._driver = driver

    def prefill_complete(self) -> None:
        """The first token is there. Raises NotFound when the reservation has expired."""
        self._driver.drive(ask(service_calls.prefill_complete(self.reservation_id)))

    def output_block(self, decay_fraction: float | None = None) -> None:
        """One more block of output is full; decay_fraction (0 to 1) weighs the request's blocks."""
        call = service_calls.output_block(self.reservation_id, decay_fraction)
        self._driver.drive(ask(call))
