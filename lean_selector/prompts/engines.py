"""What the engines of a model say of themselves: whose make they are, and which adapters they have.

Asked when a request needs it: of the make a few workers, of adapters all, when a request names a
model that is not registered. What they said holds for a while and is looked at again
beside the requests.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import msgspec

from lean_selector.http.outbound import OutboundClient, OutboundFailed
from lean_selector.prompts.fleet import Fleet
from lean_selector.prompts.model_card import ModelCards
from lean_selector.prompts.served import Served
from lean_selector.tasks import supervise

TIMEOUT_S: Final = 2.0  # of each question
FRESH_S: Final = 10.0  # after this a name that is unknown, or an adapter, is looked for again
MOST_AT_ONCE: Final = 32
_MAKE_FRESH_S: Final = 60.0
_ASKED_FOR_MAKE: Final = 3  # of a model's workers; one that answers is enough
_FROM: Final = 4096  # workers whose answers are kept


class _Told:
    """What a worker said, and when."""

    __slots__ = ("adapters", "at", "make")

    def __init__(self, at: float, make: str | None, adapters: dict[str, str]) -> None:
        self.at = at
        self.make = make
        self.adapters = adapters  # the model that each adapts


class Engines:
    """From the loop's thread only."""

    def __init__(
        self, fleet: Fleet, client: OutboundClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._clock = clock
        self._told: dict[str, _Told] = {}  # by base URL
        self._under_way: dict[object, asyncio.Task[None]] = {}

    async def make(self, served: Served) -> str | None:
        """`vllm`, `sglang`, ...; None where nobody says."""
        told = self._any_told(served)
        key = ("make", served.model_name, served.tenant_id)
        if told is None:
            await self._once(key, partial(self._ask_some, served))
            told = self._any_told(served)
        elif self._clock() - told.at > (FRESH_S if told.make is None else _MAKE_FRESH_S):
            self._beside(key, partial(self._ask_some, served))
        return None if told is None else told.make

    async def adapted(self, name: str, tenant_id: str) -> tuple[Served, frozenset[int]] | None:
        """The model that an adapter of this name adapts, and the workers that have it."""
        found = self._adapted(name, tenant_id)
        if found is None:
            await self._refresh(tenant_id)
            return self._adapted(name, tenant_id)
        if any(self._is_old(base) for base in found[0].workers.values()):
            self._beside(("adapters", tenant_id), partial(self._ask_all, tenant_id))
        return found

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what was said -------------------------------------------------------------------------

    def _any_told(self, served: Served) -> _Told | None:
        for base in served.workers.values():
            told = self._told.get(base)
            if told is not None and told.make is not None:
                return told
        return next((t for b in served.workers.values() if (t := self._told.get(b))), None)

    def _adapted(self, name: str, tenant_id: str) -> tuple[Served, frozenset[int]] | None:
        for model in self._fleet.models(tenant_id):
            served = self._fleet.model(model, tenant_id)
            if served is None:
                continue
            workers = frozenset(
                worker_id
                for worker_id, base in served.workers.items()
                if (told := self._told.get(base)) is not None and name in told.adapters
            )
            if workers:
                return served, workers
        return None

    def _is_old(self, base: str) -> bool:
        told = self._told.get(base)
        return told is None or self._clock() - told.at > FRESH_S

    # -- asking --------------------------------------------------------------------------------

    async def _refresh(self, tenant_id: str) -> None:
        bases = self._bases(tenant_id)
        if any(self._is_old(base) for base in bases):
            await self._once(("adapters", tenant_id), partial(self._ask_all, tenant_id))

    def _bases(self, tenant_id: str) -> list[str]:
        models = (self._fleet.model(name, tenant_id) for name in self._fleet.models(tenant_id))
        return [base for served in models if served for base in served.workers.values()]

    async def _ask_all(self, tenant_id: str) -> None:
        bases = [base for base in self._bases(tenant_id) if self._is_old(base)]
        for at in range(0, len(bases), MOST_AT_ONCE):
            await asyncio.gather(*map(self._ask, bases[at : at + MOST_AT_ONCE]))

    async def _ask_some(self, served: Served) -> None:
        bases = list(served.workers.values())
        await asyncio.gather(*map(self._ask, bases[:_ASKED_FOR_MAKE]))

    async def _ask(self, base: str) -> None:
        make, adapters = None, dict[str, str]()
        try:
            body = await self._client.text(base + "/v1/models", timeout_s=TIMEOUT_S)
            cards = msgspec.json.decode(body, type=ModelCards).data
            adapters = {card.id: card.parent for card in cards if card.parent is not None}
            make = next((card.owned_by for card in cards if card.owned_by), None)
        except (OutboundFailed, msgspec.DecodeError, ValueError):
            old = self._told.get(base)  # it is asked again when this is old, too
            if old is not None:
                make, adapters = old.make, old.adapters
        self._told.pop(base, None)
        self._told[base] = _Told(self._clock(), make, adapters)
        if len(self._told) > _FROM:
            del self._told[next(iter(self._told))]

    async def _once(self, key: object, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Waits for what is asked, by whoever asked first."""
        await asyncio.shield(self._beside(key, work))

    def _beside(
        self, key: object, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> "asyncio.Task[None]":
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = supervise("model lists", work, again=False)
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return task
