"""Fair shares of a queue: who of those that wait has been served least goes next (D11).

One client that floods a queue in order of arrival delays all others by all that it asked for. So
requests have an id, and among requests of one strict priority the id with the least service comes
first; within an id the queue's policy decides. Service is counted in tokens, divided by the id's
weight: those of the prompt that its rank must compute, and twice those of the output, as far as
they are known when a rank is chosen. The output is corrected when the reservation ends.

Only what is chosen while somebody waits is counted, since nobody else lacks the rest. An id that
begins to wait starts at the least service of those that wait (if nobody does, at that of the last
to leave), so that no id saves up a claim while it asks for nothing. All service is halved every
minute: who took much is forgiven. While two ids wait for the same ranks with the same strict
priority, their services, counted from any moment on, therefore differ by at most twice the largest
request; what output adds later, by at most that of what is in flight.

A heap tells which id comes first in a line. Being served makes a position worse, so an entry is
brought up to date when it comes first; what makes one better adds an entry, or builds the heap
anew. Ids that do not wait are forgotten, the least recent first, beyond MAX_IDS. Each replica
counts what it serves itself."""

import bisect
import heapq
from collections.abc import Mapping
from operator import attrgetter
from typing import Final

from msgspec import UnsetType

from lean_selector.core.load.shapes import Reservation
from lean_selector.core.selection.queue import Line, QueuePosition, Ties, Waiting, take_out
from lean_selector.core.selection.shapes import Placement, SelectionRequest

MAX_IDS: Final = 4_096
HALF_LIFE_S: Final = 60.0
OUTPUT_WEIGHT: Final = 2  # an output token takes about as long as two prompt tokens
_SPARE: Final = 16  # entries of a heap, beyond two for each member

_key = attrgetter("key")


class Share:
    """What one id has been served."""

    __slots__ = ("flows", "service", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.service = 0.0  # tokens / weight
        self.flows: list[Flow] = []  # where its requests wait


class Flow:
    """The requests of one id in a line."""

    __slots__ = ("items", "line", "share")

    def __init__(self, line: "FairLine", share: Share) -> None:
        self.line = line
        self.share = share
        self.items: list[Waiting] = []  # in order

    def position(self) -> QueuePosition:
        priority, _, score, serial = self.items[0].key
        return priority, self.share.service, score, serial


class FairLine(Line):
    """Requests with the same ties. Of the ids that have some, the least served comes first."""

    __slots__ = ("_flows", "_heap", "_shares")

    def __init__(self, ties: Ties, shares: "FairShares") -> None:
        super().__init__(ties)
        self._shares = shares
        self._flows: dict[str, Flow] = {}
        self._heap: list[tuple[QueuePosition, Flow]] = []

    def position(self) -> QueuePosition:
        heap = self._heap
        while True:
            position, flow = heap[0]
            if not flow.items:
                heapq.heappop(heap)
            elif position[1] == flow.share.service and position[3] == flow.items[0].key[3]:
                return position
            else:
                heapq.heapreplace(heap, (flow.position(), flow))

    def head(self) -> Waiting:
        self.position()
        return self._heap[0][1].items[0]

    def has_any(self) -> bool:
        return bool(self._flows)

    def all(self) -> list[Waiting]:
        return [item for flow in self._flows.values() for item in flow.items]

    def insert(self, waiting: Waiting) -> None:
        name = waiting.request.fairness_id
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = self._shares.enter(self, name)
        bisect.insort(flow.items, waiting, key=_key)
        if flow.items[0] is waiting:
            self.put(flow)

    def remove(self, waiting: Waiting) -> bool:
        name = waiting.request.fairness_id
        flow = self._flows.get(name)
        if flow is None or not take_out(flow.items, waiting):
            return False
        if not flow.items:
            del self._flows[name]
            self._shares.leave(flow)
        return True

    def put(self, flow: Flow) -> None:
        """Add an entry for a flow that is new, or that goes earlier now."""
        heapq.heappush(self._heap, (flow.position(), flow))
        if len(self._heap) > 2 * len(self._flows) + _SPARE:
            self.build()

    def build(self) -> None:
        self._heap = [(flow.position(), flow) for flow in self._flows.values()]
        heapq.heapify(self._heap)


class FairShares:
    """The services of the ids of one queue."""

    def __init__(self, weights: Mapping[str, float], block_size: int) -> None:
        self._weights = weights
        self._block_size = block_size
        self._shares: dict[str, Share] = {}  # the least recent first
        self._waiting: dict[Share, None] = {}  # those with flows
        self._floor = 0.0  # where an id starts if nobody waits
        # Reservations that were charged: for how many output tokens, and after how many halvings
        self._charged: dict[str, tuple[Share, int, int]] = {}
        self._halved = 0
        self._halved_at: float | None = None

    def new_line(self, ties: Ties) -> Line:
        return FairLine(ties, self)

    def enter(self, line: FairLine, name: str) -> Flow:
        """Return a new flow for the first request of an id in a line."""
        share = self._share(name)
        if not share.flows:
            services = [other.service for other in self._waiting]
            share.service = max(share.service, min(services, default=self._floor))
            self._waiting[share] = None
        flow = Flow(line, share)
        share.flows.append(flow)
        return flow

    def leave(self, flow: Flow) -> None:
        """Note that a flow is empty."""
        flow.share.flows.remove(flow)
        if not flow.share.flows:
            del self._waiting[flow.share]
            self._floor = flow.share.service

    def charge(self, request: SelectionRequest, placement: Placement) -> None:
        """Count a request for which a rank was chosen, after it had waited or while others wait."""
        share = self._share(request.fairness_id)
        output = request.expected_output_tokens or 0
        prefill, tokens = placement.prefill, placement.effective_prefill_tokens
        if not isinstance(prefill, UnsetType):
            tokens = prefill.effective_prefill_tokens
        share.service += (tokens + OUTPUT_WEIGHT * output) / share.weight
        if request.books:
            self._charged[request.reservation_id] = share, output, self._halved

    def ended(self, reservation: Reservation) -> None:
        """Correct what was charged for the output of a reservation, if its output was reported."""
        charged = self._charged.pop(reservation.request_id, None)
        if charged is None or not reservation.output_blocks:
            return
        share, expected, halved = charged
        more = reservation.output_blocks * self._block_size - expected
        tokens = OUTPUT_WEIGHT * more * 0.5 ** (self._halved - halved)
        share.service = max(0.0, share.service + tokens / share.weight)
        if more < 0:
            for flow in share.flows:
                flow.line.put(flow)

    def settle(self, now: float) -> None:
        """Halve all services if it is time. Call this about every second."""
        if self._halved_at is None:
            self._halved_at = now
        while now - self._halved_at >= HALF_LIFE_S:
            self._halved_at += HALF_LIFE_S
            self._halve()

    def _halve(self) -> None:
        self._halved += 1
        self._floor *= 0.5
        lines: dict[FairLine, None] = {}
        for share in self._shares.values():
            share.service *= 0.5
            for flow in share.flows:
                lines[flow.line] = None
        for line in lines:
            line.build()

    def _share(self, name: str) -> Share:
        share = self._shares.pop(name, None)
        if share is None:
            share = Share(self._weights.get(name, 1.0))
            for _ in range(2):  # ids that wait stay; the number of connections limits them
                if len(self._shares) < MAX_IDS:
                    break
                oldest = next(iter(self._shares))
                other = self._shares.pop(oldest)
                if other.flows:
                    self._shares[oldest] = other
        self._shares[name] = share
        return share
