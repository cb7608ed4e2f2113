"""Requests that wait for a worker, in the order in which they may go.

Order (spec selection.md 3.4): strict_priority, highest first; then the score of the policy, highest
first; then arrival. With jump = max(priority_jump, 0) the score is jump - arrival (fcfs), jump +
arrival (lcfs), or (1 + jump) / the tokens that are left to prefill where most is cached (wspt, the
weighted shortest processing time; as it was on arrival). Nobody holds those behind it who may
go elsewhere (D11). So requests that may go to the same ranks wait in one line, each line knows its
ranks as a set, and when a rank comes free only the heads of lines that lead there are looked at.
The queue is bounded by the connections that wait in it: each holds at most one.
"""

import bisect
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from lean_selector.core.load.busy import Headroom
from lean_selector.core.selection.records import PinnedWorker, Placement, SelectionRequest
from lean_selector.core.selection.schedulable import SchedulableWorker
from lean_selector.core.selection.settings import QueuePolicy

# What ties a request to some of the ranks: a pin, allowed workers, required taints.
Ties = tuple[PinnedWorker | None, frozenset[int] | None, frozenset[str]]
Place = tuple[int, float, int]  # in the queue; no two are equal


class Parked:
    """A request in the queue. `on_answer` hears once: a placement, or why there is none, which is a
    SelectorError unless something broke."""

    __slots__ = ("arrived_at", "key", "line", "on_answer", "request")

    def __init__(
        self,
        request: SelectionRequest,
        arrived_at: float,
        serial: int,
        score: float,
        on_answer: Callable[["Parked", Placement | Exception], None],
        line: "Line",
    ) -> None:
        self.request = request
        self.arrived_at = arrived_at
        self.on_answer = on_answer
        self.line = line
        self.key: Place = (-request.strict_priority, -score, serial)


_place = attrgetter("key")


class Line:
    """The parked requests with the same ties; never empty while it is in the queue."""

    __slots__ = ("items", "leads_to", "ranks", "ties")

    def __init__(self, ties: Ties) -> None:
        self.ties = ties
        self.items: list[Parked] = []  # in order
        self.ranks = 0  # that its requests may go to, busy or not
        # Ranks that may let somebody go when they come free. With a pin all of its worker's: a busy
        # rank takes the request that insists on it while the worker has another that is not.
        self.leads_to = 0

    def open_worker(self, worker: SchedulableWorker) -> None:
        """Takes in the ranks of a new worker that suit."""
        pinned, allowed, required = self.ties
        if not required <= worker.taints:
            return
        if pinned is not None:
            if pinned.worker_id != worker.worker_id:
                return
            for load in worker.loads:
                if load.dp_rank == pinned.dp_rank:
                    self.ranks |= load.mask
                    self.leads_to |= worker.mask
        elif allowed is None or worker.worker_id in allowed:
            self.ranks |= worker.mask
            self.leads_to |= worker.mask

    def close_worker(self, worker: SchedulableWorker) -> None:
        self.ranks &= ~worker.mask
        self.leads_to &= ~worker.mask

    def is_open(self, room: Headroom) -> bool:
        """True when its requests may go now: when they have a rank below the threshold among those
        that `scheduler.not_busy` would leave them."""
        if self.ties[0] is None:
            return (self.ranks & ~room.avoided or self.ranks) & room.below & room.idle != 0
        return self.ranks & room.below != 0 and self.leads_to & room.idle != 0


class ParkedQueue:
    """The parked requests of one partition."""

    __slots__ = (
        "_lines",
        "_policy",
        "_serial",
        "_size",
        "_workers",
        "admitted",
        "hopeless",
        "is_moving",
        "isl_tokens",
        "waited_s",
    )

    def __init__(
        self, workers: Mapping[int, SchedulableWorker], policy: QueuePolicy = "fcfs"
    ) -> None:
        """`workers` are the partition's; of each change of them `worker_changed` must hear."""
        self._workers = workers
        self._policy = policy
        self._lines: dict[Ties, Line] = {}
        self._serial = 0
        self._size = 0
        self.hopeless: set[Line] = set()  # those that lead nowhere
        self.is_moving = False  # while requests are being let go
        self.isl_tokens = 0  # sum over the items
        self.admitted = 0  # requests that left for a worker, ever, and how long they had waited
        self.waited_s = 0.0

    def __len__(self) -> int:
        return self._size

    def lines(self) -> Iterable[Line]:
        return self._lines.values()

    def in_order(self) -> list[Parked]:
        """A copy, so that items may leave while the caller walks."""
        return sorted((item for line in self._lines.values() for item in line.items), key=_place)

    def park(
        self,
        request: SelectionRequest,
        now: float,
        on_answer: Callable[[Parked, Placement | Exception], None],
        uncached_tokens: int = 0,
    ) -> Parked:
        """`uncached_tokens`: what is left to prefill where most is cached; of use to wspt only."""
        ties = request.pinned, request.allowed_worker_ids, request.required_taints
        line = self._lines.get(ties)
        if line is None:
            line = self._lines[ties] = self._new_line(ties)
        self._serial += 1
        score = self._score(request.priority_jump, now, uncached_tokens)
        parked = Parked(request, now, self._serial, score, on_answer, line)
        bisect.insort(line.items, parked, key=_place)
        self._size += 1
        self.isl_tokens += request.prompt.isl_tokens
        return parked

    def _score(self, priority_jump: float, now: float, uncached_tokens: int) -> float:
        jump = priority_jump if priority_jump > 0.0 else 0.0  # also for what is no number
        if self._policy == "fcfs":
            return jump - now
        if self._policy == "lcfs":
            return jump + now
        return (1.0 + jump) / max(1, uncached_tokens)

    def _new_line(self, ties: Ties) -> Line:
        line = Line(ties)
        pinned = ties[0]
        if pinned is None:
            for worker in self._workers.values():
                line.open_worker(worker)
        elif (only := self._workers.get(pinned.worker_id)) is not None:
            line.open_worker(only)
        if not line.ranks:
            self.hopeless.add(line)
        return line

    def leave(self, parked: Parked) -> bool:
        """Takes an item out; False when it has left already."""
        line = parked.line
        if self._lines.get(line.ties) is not line:
            return False
        at = bisect.bisect_left(line.items, parked.key, key=_place)
        if at == len(line.items) or line.items[at] is not parked:
            return False
        del line.items[at]
        if not line.items:
            del self._lines[line.ties]
            self.hopeless.discard(line)
        self._size -= 1
        self.isl_tokens -= parked.request.prompt.isl_tokens
        return True

    def worker_changed(self, old: SchedulableWorker | None, new: SchedulableWorker | None) -> None:
        """A worker came, went (None), or is another than it was."""
        for line in self._lines.values():
            if old is not None:
                line.close_worker(old)
            if new is not None:
                line.open_worker(new)
            if line.ranks:
                self.hopeless.discard(line)
            else:
                self.hopeless.add(line)
