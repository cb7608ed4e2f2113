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

Two lists are in order: the ids that wait, and in each line its ids by who goes next. A step is two
binary searches in each. Ids that do not wait are forgotten, the least recent first, beyond
MAX_IDS. Each replica counts what it serves itself."""

import bisect
from collections.abc import Mapping
from operator import attrgetter
from typing import Final

from lean_selector.core.load.shapes import Reservation
from lean_selector.core.selection.queue import Line, QueuePosition, Ties, Waiting, take_out
from lean_selector.core.selection.shapes import Placement, SelectionRequest

MAX_IDS: Final = 4_096
HALF_LIFE_S: Final = 60.0
OUTPUT_WEIGHT: Final = 2  # an output token takes about as long as two prompt tokens

_position = attrgetter("position")
_key = attrgetter("key")


class Share:
    """What one id has been served."""

    __slots__ = ("flows", "number", "position", "service", "waiting", "weight")

    def __init__(self, number: int, weight: float) -> None:
        self.number = number
        self.weight = weight
        self.service = 0.0  # tokens / weight
        self.waiting = 0  # requests in the queue
        self.position = 0.0, number  # service and number, as they were put in order
        self.flows: list[Flow] = []  # where its requests wait


class Flow:
    """The requests of one id in a line."""

    __slots__ = ("items", "line", "position", "share")

    def __init__(self, line: "FairLine", share: Share) -> None:
        self.line = line
        self.share = share
        self.items: list[Waiting] = []  # in order
        self.position: QueuePosition = (0, 0.0, 0.0, 0)  # that of the first item

    def find_position(self) -> None:
        priority, _, score, serial = self.items[0].key
        self.position = priority, self.share.service, score, serial


class FairLine(Line):
    """Requests with the same ties. Of the ids that have some, the least served comes first."""

    __slots__ = ("_flows", "_in_order", "_shares")

    def __init__(self, ties: Ties, shares: "FairShares") -> None:
        super().__init__(ties)
        self._shares = shares
        self._flows: dict[str, Flow] = {}
        self._in_order: list[Flow] = []

    def position(self) -> QueuePosition:
        return self._in_order[0].position

    def head(self) -> Waiting:
        return self._in_order[0].items[0]

    def has_any(self) -> bool:
        return bool(self._in_order)

    def all(self) -> list[Waiting]:
        return [item for flow in self._in_order for item in flow.items]

    def insert(self, waiting: Waiting) -> None:
        name = waiting.request.fairness_id
        share = self._shares.enter(name)
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = Flow(self, share)
            share.flows.append(flow)
        bisect.insort(flow.items, waiting, key=_key)
        if flow.items[0] is waiting:
            if len(flow.items) > 1:
                self._take(flow)
            self._put(flow)

    def remove(self, waiting: Waiting) -> bool:
        name = waiting.request.fairness_id
        flow = self._flows.get(name)
        if flow is None:
            return False
        first = flow.items[0]
        if not take_out(flow.items, waiting):
            return False
        if first is waiting:
            self._take(flow)
            if flow.items:
                self._put(flow)
            else:
                del self._flows[name]
                flow.share.flows.remove(flow)
        self._shares.leave(flow.share)
        return True

    def move(self, flow: Flow) -> None:
        """Put a flow where it belongs, because its id was served."""
        self._take(flow)
        self._put(flow)

    def _take(self, flow: Flow) -> None:
        del self._in_order[bisect.bisect_left(self._in_order, flow.position, key=_position)]

    def _put(self, flow: Flow) -> None:
        flow.find_position()
        bisect.insort(self._in_order, flow, key=_position)

    def sort(self) -> None:
        """Restore the order after all services were halved."""
        for flow in self._in_order:
            flow.find_position()
        self._in_order.sort(key=_position)


class FairShares:
    """The services of the ids of one queue."""

    def __init__(self, weights: Mapping[str, float], block_size: int) -> None:
        self._weights = weights
        self._block_size = block_size
        self._shares: dict[str, Share] = {}  # the least recent first
        self._waiting: list[Share] = []  # those with requests in the queue, in order of service
        self._number = 0
        self._floor = 0.0  # where an id starts if nobody waits
        # Reservations that were charged: for how many output tokens, and after how many halvings
        self._charged: dict[str, tuple[Share, int, int]] = {}
        self._halved = 0
        self._halved_at: float | None = None

    def __len__(self) -> int:
        return len(self._shares)

    def new_line(self, ties: Ties) -> Line:
        return FairLine(ties, self)

    def services(self) -> dict[str, float]:
        return {name: share.service for name, share in self._shares.items()}

    def enter(self, name: str) -> Share:
        """Return the share of an id that has one more request in the queue."""
        share = self._share(name)
        if not share.waiting:
            least = self._waiting[0].service if self._waiting else self._floor
            share.service = max(share.service, least)
            self._put(share)
        share.waiting += 1
        return share

    def leave(self, share: Share) -> None:
        """Count one request less of an id in the queue."""
        share.waiting -= 1
        if not share.waiting:
            self._take(share)
            if not self._waiting:
                self._floor = share.service

    def charge(self, request: SelectionRequest, placement: Placement, *, waited: bool) -> None:
        """Count a request for which a rank was chosen. `waited`: whether it was in the queue."""
        if not waited and not self._waiting:
            return
        share = self._share(request.fairness_id)
        output = request.expected_output_tokens or 0
        self._add(share, placement.effective_prefill_tokens + OUTPUT_WEIGHT * output)
        if request.books:
            self._charged[request.reservation_id] = share, output, self._halved

    def ended(self, reservation: Reservation) -> None:
        """Correct what was charged for the output of a reservation, if its output was reported."""
        charged = self._charged.pop(reservation.request_id, None)
        if charged is not None and reservation.output_blocks:
            share, expected, halved = charged
            more = reservation.output_blocks * self._block_size - expected
            self._add(share, OUTPUT_WEIGHT * more * 0.5 ** (self._halved - halved))

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
        for share in self._shares.values():
            share.service *= 0.5
        lines: dict[FairLine, None] = {}
        for share in self._waiting:  # their order stays
            share.position = share.service, share.number
            for flow in share.flows:
                lines[flow.line] = None
        for line in lines:
            line.sort()

    def _share(self, name: str) -> Share:
        share = self._shares.pop(name, None)
        if share is None:
            self._number += 1
            share = Share(self._number, self._weights.get(name, 1.0))
            for _ in range(2):  # ids that wait stay; the number of connections limits them
                if len(self._shares) < MAX_IDS:
                    break
                oldest = next(iter(self._shares))
                other = self._shares.pop(oldest)
                if other.waiting:
                    self._shares[oldest] = other
        self._shares[name] = share
        return share

    def _add(self, share: Share, tokens: float) -> None:
        if share.waiting:
            self._take(share)
        share.service = max(0.0, share.service + tokens / share.weight)
        if share.waiting:
            self._put(share)
            for flow in share.flows:
                flow.line.move(flow)

    def _put(self, share: Share) -> None:
        share.position = share.service, share.number
        bisect.insort(self._waiting, share, key=_position)

    def _take(self, share: Share) -> None:
        del self._waiting[bisect.bisect_left(self._waiting, share.position, key=_position)]
