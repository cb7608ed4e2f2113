"""A selector beside the gateway: choosing and booking are requests to it.

Its answer may be lost after it has booked, so whatever was asked for and not taken is freed by its
id. Ends are told in the background, in order, and again while the selector does not answer: a
selector that was restarted has forgotten the reservation, and says so.
"""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lean_selector.gateway.choosing import NobodyChose, Shed
from lean_selector.gateway.endpoint import Endpoint
from lean_selector.gateway.lease import WorkerLease
from lean_selector.gateway.remote_fleet import RemoteFleet
from lean_selector.gateway.rotation import Rotation
from lean_selector.gateway.selector_answers import ChosenWorker
from lean_selector.gateway.selector_link import SelectorAway, SelectorLink, told
from lean_selector.tasks import watched

if TYPE_CHECKING:
    from lean_selector.prompts.routed import Routed

log = logging.getLogger("lean_selector.gateway")

_AGAIN_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # pauses before an end is told again
_MOST_ENDS: Final = 10_000  # told at a time; beyond, a reservation expires at the selector
_SHEDS: Final = (429, 503, 529)
_NOT_LET_IN: Final = (401, 403)  # as while tokens are changed, here before there or after
_MSGPACK: Final = "application/msgpack"


class RemoteChooser:
    """From the loop's thread only."""

    def __init__(self, link: SelectorLink, fleet: RemoteFleet, rotation: Rotation) -> None:
        self._link = link
        self._fleet = fleet
        self._rotation = rotation
        self._asking: set[asyncio.Future[tuple[int, bytes]]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self.lost_ends = 0

    async def choose(
        self, routed: "Routed", reservation_id: str, avoided: frozenset[int]
    ) -> WorkerLease:
        """As `choosing` says."""
        allowed = routed.worker_ids
        if avoided:
            known = self._fleet.workers_of(routed.model_name, routed.tenant_id)
            allowed = (frozenset(known) if allowed is None else allowed) - avoided
            if not allowed:
                raise NobodyChose("all_failed")
        prompt = routed.prompt
        body: dict[str, object] = {
            "reservation_id": reservation_id,
            "selection_id": reservation_id,  # as a selector that speaks 1.6 calls it
            "model_name": routed.model_name,
            "tenant_id": routed.tenant_id,
            "isl_tokens": prompt.isl_tokens,
            "block_hashes": prompt.local_hashes,
            "sequence_hashes": prompt.sequence_hashes(),
        }
        if prompt.lora_name is not None:
            body["lora_name"] = prompt.lora_name
        if allowed is not None:
            body["allowed_worker_ids"] = sorted(allowed)
        asking = asyncio.ensure_future(
            self._link.call("POST", "/select_and_reserve", msgspec.msgpack.encode(body), _MSGPACK)
        )
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            status, answer = await asyncio.shield(asking)
        except SelectorAway:
            self._tell("DELETE", f"/reservations/{reservation_id}")
            raise NobodyChose("selector_away") from None
        except asyncio.CancelledError:
            # It may book all the same: freed when it has answered.
            asking.add_done_callback(lambda done: self._undo(done, reservation_id))
            raise
        if status != 200:
            said = told(answer)
            if status in _SHEDS and said.code is not None:
                raise Shed(status, said.error)
            raise NobodyChose("no_worker" if status == 503 else "refused")
        return self._lease(answer, routed, reservation_id)

    def _lease(self, answer: bytes, routed: "Routed", reservation_id: str) -> WorkerLease:
        try:
            chosen = msgspec.json.decode(answer, type=ChosenWorker)
            endpoint = self._rotation.endpoint(chosen.endpoint)
        except (msgspec.DecodeError, ValueError):
            self._tell("DELETE", f"/reservations/{reservation_id}")
            raise NobodyChose("no_url") from None
        return RemoteLease(
            self,
            reservation_id,
            endpoint,
            chosen.worker_id,
            chosen.dp_rank if len(chosen.overlap.dp) > 1 else None,
            routed.prompt.isl_tokens - chosen.effective_prefill_tokens,
        )

    def _undo(self, asked: "asyncio.Future[tuple[int, bytes]]", reservation_id: str) -> None:
        if asked.cancelled() or asked.exception() is not None or asked.result()[0] == 200:
            self._tell("DELETE", f"/reservations/{reservation_id}")

    # -- what the selector is told ---------------------------------------------------------------

    def _tell(
        self, method: str, path: str, body: bytes = b"", after: "asyncio.Task[None] | None" = None
    ) -> "asyncio.Task[None]":
        """In the background, `after` something else that it is told."""
        task = watched("telling the selector", self._told(method, path, body, after))
        if len(self._telling) >= _MOST_ENDS:
            task.cancel()
            self.lost_ends += 1
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        return task

    async def _told(
        self, method: str, path: str, body: bytes, after: "asyncio.Task[None] | None"
    ) -> None:
        if after is not None and not after.done():
            await asyncio.wait({after})
        for pause_s in (*_AGAIN_S, None):
            try:
                status, _ = await self._link.call(method, path, body, insists=method == "DELETE")
                if status in _NOT_LET_IN:
                    raise SelectorAway("it does not let us in")
            except SelectorAway:
                if pause_s is None or method != "DELETE":
                    self.lost_ends += method == "DELETE"
                    return
                await asyncio.sleep(pause_s)
            else:
                return

    async def close(self, patience_s: float) -> None:
        """Waits a moment for choices that nobody waits for any more, and for what is still to be
        told. A choice that is given up then ends its connection, and so leaves the queue."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while last := self._last():
                    await asyncio.wait(last)
        last = self._last()
        for each in last:
            each.cancel()
        await asyncio.gather(*last, return_exceptions=True)

    def _last(self) -> "set[asyncio.Future[Any]]":
        return {*self._asking, *self._telling}

    def begun(self, reservation_id: str) -> "asyncio.Task[None]":
        return self._tell("POST", f"/reservations/{reservation_id}/prefill_complete")

    def touched(self, reservation_id: str) -> "asyncio.Task[None]":
        return self._tell("POST", f"/reservations/{reservation_id}/output_block", b"{}")

    def freed(
        self,
        reservation_id: str,
        outcome: str | None,
        cached_tokens: int | None,
        after: "asyncio.Task[None] | None",
    ) -> None:
        ending: dict[str, object] = {}
        if outcome is not None:
            ending["outcome"] = outcome
        if cached_tokens is not None:
            ending["cached_tokens"] = cached_tokens
        body = msgspec.json.encode(ending) if ending else b""
        self._tell("DELETE", f"/reservations/{reservation_id}", body, after)


class RemoteLease(WorkerLease):
    """A reservation at the selector."""

    def __init__(
        self,
        chooser: RemoteChooser,
        reservation_id: str,
        endpoint: Endpoint,
        worker_id: int,
        dp_rank: int | None,
        overlap_tokens: int,
    ) -> None:
        super().__init__(endpoint, worker_id, dp_rank, overlap_tokens)
        self._chooser = chooser
        self._id = reservation_id
        self._last: asyncio.Task[None] | None = None  # what was told before, which goes first

    def _begun(self) -> None:
        self._last = self._chooser.begun(self._id)

    def _touched(self) -> None:
        self._last = self._chooser.touched(self._id)

    def _freed(self, outcome: str | None, cached_tokens: int | None) -> None:
        self._chooser.freed(self._id, outcome, cached_tokens, self._last)
