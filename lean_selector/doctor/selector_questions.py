"""Asks a selector for its workers, how it follows their events, and what it looks for itself."""

from typing import Final, TypeVar

import msgspec

from lean_selector.doctor.selector_shapes import (
    Discoveries,
    OverlapScores,
    Readiness,
    SelectorFacts,
    Source,
    WorkerRecord,
)
from lean_selector.outbound.client import OutboundClient
from lean_selector.outbound.failure import OutboundFailed

T = TypeVar("T")

_MOST_BYTES: Final = 256 << 20  # of an answer: a record takes a kilobyte
_NOT_SERVED: Final = (404, 405)


class NotASelector(Exception):
    """Who answers there is no selection service, or nobody answers; the message says which."""


class Selector:
    """A running selection service at `url`, ours or the reference's."""

    def __init__(self, client: OutboundClient, url: str, timeout_s: float) -> None:
        self.url: Final = url.rstrip("/")
        self._client = client
        self._timeout_s = timeout_s

    async def facts(self) -> SelectorFacts:
        """Raises NotASelector."""
        try:
            ready = await self._client.get(f"{self.url}/ready", timeout_s=self._timeout_s)
            if ready.status in _NOT_SERVED:
                raise NotASelector(
                    f"GET {self.url}/ready: status {ready.status}: this is no selection service"
                )
            workers = await self._told("/workers?detail=true", list[WorkerRecord])
            return SelectorFacts(
                ready.status == 200,
                workers,
                await self._told_if_served("/kv_sources", list[Source]),
                await self._told_if_served("/discovery", Discoveries),
                _readiness(ready.body),
            )
        except OutboundFailed as error:
            raise NotASelector(error.message) from None

    async def _told_if_served(self, path: str, kind: type[T]) -> T | None:
        """None where it has no such route. Raises OutboundFailed and NotASelector."""
        try:
            return await self._told(path, kind)
        except OutboundFailed as error:
            if error.status in _NOT_SERVED:
                return None
            raise

    async def _told(self, path: str, kind: type[T]) -> T:
        """Raises OutboundFailed and NotASelector."""
        url = f"{self.url}{path}"
        try:
            text = await self._client.text(url, timeout_s=self._timeout_s, most_bytes=_MOST_BYTES)
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            raise NotASelector(
                f"GET {url}: this is no answer of a selection service: {error}"
            ) from None

    async def cached_blocks(
        self, worker: WorkerRecord, token_ids: list[int]
    ) -> dict[tuple[int, int], int]:
        """Of this prompt, by (worker_id, dp_rank), as the selector's index has it.

        Raises OutboundFailed, and DecodeError of msgspec.
        """
        body = {
            "model_name": worker.model_name,
            "tenant_id": worker.tenant_id,
            "routing_group": worker.tenant_id,  # the reference reads one name or the other
            "token_ids": token_ids,
        }
        url = f"{self.url}/overlap_scores"
        answer = await self._client.post(url, msgspec.json.encode(body), timeout_s=self._timeout_s)
        if answer.status != 200:
            raise OutboundFailed(f"POST {url}: status {answer.status}", answer.status)
        rows = msgspec.json.decode(answer.body, type=OverlapScores).workers
        return {(row.worker_id, row.dp_rank): row.device_blocks for row in rows}


def _readiness(body: bytes) -> Readiness:
    """What else the answer says; one of another service may be anything."""
    try:
        return msgspec.json.decode(body, type=Readiness)
    except msgspec.DecodeError:
        return Readiness()
