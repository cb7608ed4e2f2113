"""Both services' HTTP applications in process: requests go in as the reader hands them over."""

import random
from collections.abc import Callable, Sequence

from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.settings import RouterSettings
from lean_selector.core.selection.workers import Source
from lean_selector.core.trackers import Trackers
from lean_selector.http1.header_block import HeaderBlock
from lean_selector.http1.protocol import PendingReply
from lean_selector.http1.reader import Request
from lean_selector.http1.response import JSON, encode_response
from lean_selector.services.busy_threshold import BusyThresholdService
from lean_selector.services.gate import Gate
from lean_selector.services.selection import SelectionService
from lean_selector.services.service_state import ServiceState
from lean_selector.services.slot_tracker import SlotTrackerService

NOW = 1000.0


class NoEngines:
    """Where KV events would come from; none do."""

    def subscribe(self, _: Partition, worker_id: int, dp_rank: int, source: Source) -> None:
        pass

    def unsubscribe(self, worker_id: int, dp_rank: int) -> None:
        pass

    def statuses(self, model_name: str | None, tenant_id: str | None) -> Sequence[object]:
        return []


class Turns:
    """The loop's `call_soon`, run by hand: `run` returns how many turns the work took."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._due.append(callback)

    def run(self) -> int:
        turns = 0
        while self._due:
            due, self._due = self._due, []
            turns += 1
            for callback in due:
                callback()
        return turns


def selection_gate() -> Gate:
    """The selection service without engines; nothing is registered."""
    engines = NoEngines()
    selector = Selector(RouterSettings(use_kv_events=False), engines, random.Random(7))
    service = SelectionService(
        selector,
        dump=lambda: encode_response(200, b"{}"),
        sources=engines,
        state=ServiceState(),
        clock=lambda: NOW,
    )
    return Gate((*service.routes(), *BusyThresholdService(selector, lambda: NOW).routes()))


def slot_tracker_gate() -> Gate:
    return Gate(SlotTrackerService(Trackers(), clock=lambda: NOW).routes())


def request(
    method: str,
    path: str | bytes,
    body: bytes = b"",
    *,
    content_type: bytes | None = JSON,
    accept: bytes | None = None,
    query: bytes | None = None,
) -> Request:
    fields = {b"content-type": content_type, b"accept": accept}
    block = HeaderBlock(
        {name: value for name, value in fields.items() if value is not None}, False, False
    )
    target = path.encode() if isinstance(path, str) else path
    return Request(method.encode(), target, query, body, block)


def answered(gate: Gate, request: Request) -> tuple[int, bytes]:
    """Status and body of an answer that is not put off."""
    answer = gate(request)
    assert not isinstance(answer, PendingReply)
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return int(head[9:12]), body
