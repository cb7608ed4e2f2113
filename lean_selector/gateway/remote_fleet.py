"""The workers of a selector beside the gateway, asked for now and then; kept while it is away."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from lean_selector.gateway.directory import Row
from lean_selector.gateway.selector_answers import ListedWorker
from lean_selector.gateway.selector_link import SelectorAway, SelectorLink, told
from lean_selector.prompts.served import Served

log = logging.getLogger("lean_selector.gateway")

EVERY_S: Final = 2.0
_SOON_S: Final = 0.25  # until it has told something


class RemoteFleet:
    """What prompts and the rotation ask."""

    def __init__(self, link: SelectorLink, on_rows: Callable[[list[Row]], None]) -> None:
        self._link = link
        self._on_rows = on_rows
        self._served: dict[tuple[str, str], Served] = {}
        self._answer = b""
        self._is_away = False
        self._refusal: int | None = None  # its status, while it does not tell
        self._unread: str | None = None  # what is wrong with its answer, while that is no list

    def model(self, model_name: str, tenant_id: str) -> Served | None:
        return self._served.get((model_name, tenant_id))

    def models(self, tenant_id: str) -> Sequence[str]:
        return sorted(name for name, tenant in self._served if tenant == tenant_id)

    def workers_of(self, model_name: str, tenant_id: str) -> set[int]:
        served = self._served.get((model_name, tenant_id))
        return set() if served is None else set(served.workers)

    async def run(self) -> None:
        """Asks for as long as it runs."""
        while True:
            try:
                status, answer = await self._link.call("GET", "/workers", insists=True)
                self._look_at(status, answer)
                if status == 200:
                    self._read(answer)
                if self._is_away:
                    log.info("the selector answers again", extra={"selector": self._link.target})
                self._is_away = False
            except SelectorAway as error:
                if not self._is_away:
                    log.warning(
                        "the selector does not answer, workers are taken in turn: %s",
                        error,
                        extra={"selector": self._link.target},
                    )
                self._is_away = True
            await asyncio.sleep(EVERY_S if self._served and not self._is_away else _SOON_S)

    def _look_at(self, status: int, answer: bytes) -> None:
        """Say it once where it has another answer than its workers, such as to a wrong token."""
        refusal = None if status == 200 else status
        if refusal is not None and refusal != self._refusal:
            log.warning(
                "the selector does not tell its workers: status %d: %s",
                status,
                told(answer).error or "no reason",
                extra={"selector": self._link.target},
            )
        elif refusal is None and self._refusal is not None:
            log.info("the selector tells its workers", extra={"selector": self._link.target})
        self._refusal = refusal

    def _read(self, answer: bytes) -> None:
        """Take it, or say once what is wrong with it."""
        extra = {"selector": self._link.target}
        try:
            self._take(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if str(error) != self._unread:
                log.warning(
                    "the selector's workers cannot be read: %s",
                    error,
                    extra=extra,
                )
            self._unread = str(error)
            return
        if self._unread is not None:
            log.info("the selector's workers can be read again", extra=extra)
        self._unread = None

    def _take(self, answer: bytes) -> None:
        if answer == self._answer:
            return
        rows = msgspec.json.decode(answer, type=list[ListedWorker])
        schedulable = [each for each in rows if each.lifecycle == "schedulable" and each.endpoint]
        if not schedulable and self._served:
            return  # it was restarted, and will know them again: until then what was known holds
        self._answer = answer
        served: dict[tuple[str, str], Served] = {}
        for each in schedulable:
            key = each.model_name, each.tenant_id
            workers = {} if key not in served else served[key].workers
            assert each.endpoint is not None
            workers[each.worker_id] = each.endpoint.rstrip("/")
            served[key] = Served(*key, each.block_size or 1, bool(each.is_eagle), workers)
        self._served = served
        self._on_rows(
            [Row(each.worker_id, each.model_name, each.endpoint or "") for each in schedulable]
        )
