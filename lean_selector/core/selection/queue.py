"""The queue of one partition: requests that wait for a worker, and their admission (D11).

Order (spec selection.md 3.4): strict_priority, highest first; then the policy's score, highest
first; then arrival. With jump = max(priority_jump, 0) and work = the fewest tokens left to
prefill on any rank at arrival, the score is jump - arrival (fcfs), jump + arrival (lcfs), (1 +
jump) / work (wspt, weighted shortest processing time), or jump - arrival - work / AGING
(least-work: a request is overtaken only by requests that arrive within work / AGING seconds). A
request never blocks others that can use other ranks. So requests that may use the same ranks share
a line, which stores the set of these ranks. Each connection has at most one queued request, which
limits the queue.

One event frees at most one rank. It costs next to nothing while no rank is below its threshold. If
one is, each line is checked once for whether it includes the rank. Then only requests that can
leave are visited, in the order of the queue."""

import bisect
import contextlib
import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from lean_selector.core.errors import (
    NO_ENDPOINTS,
    NotFound,
    SelectorError,
    Unavailable,
    WaitedTooLong,
)
from lean_selector.core.load.busy import Headroom
from lean_selector.core.selection.router_settings import QueuePolicy
from lean_selector.core.selection.schedulable_worker import SchedulableWorker
from lean_selector.core.selection.shapes import (
    BOTH,
    DECODE,
    PREFILL,
    PinnedWorker,
    Placement,
    SelectionRequest,
)

# What restricts a request to some ranks: a pin, allowed workers, required taints, and a role. A
# request for a pair waits for a rank of the role `prefill`.
Ties = tuple[PinnedWorker | None, frozenset[int] | None, frozenset[str], str]
# Position in the queue, unique: priority, service of its id (0 without fair shares), score, serial
QueuePosition = tuple[int, float, float, int]
AGING_TOKENS_PER_S = 4_000.0  # per second of waiting

# requests that one event admits per turn of the loop; takes a millisecond, answers included
MOST_AT_ONCE = 32


class Timer(Protocol):
    """A scheduled call, as returned by the event loop's call_later."""

    def cancel(self) -> None: ...


CallSoon = Callable[[Callable[[], None]], object]
CallLater = Callable[[float, Callable[[], None]], Timer]


class Waiting:
    """A request in the queue, whose answer comes later.

    Set `on_answer` in the turn of the loop in which the selector returned this object. It is called
    once, with the placement or with the error (always a SelectorError, unless there is a bug)."""

    __slots__ = (
        "_queue", "_timers", "answer", "arrived_at", "has_client", "key", "line", "on_answer",
        "request",
    )  # fmt: skip

    def __init__(
        self,
        queue: "Queue",
        request: SelectionRequest,
        arrived_at: float,
        serial: int,
        score: float,
        line: "Line",
    ) -> None:
        self._queue = queue
        self._timers: tuple[Timer, ...] = ()
        self.request = request
        self.arrived_at = arrived_at
        self.line = line
        self.key: QueuePosition = (-request.strict_priority, 0.0, -score, serial)
        self.on_answer: Callable[[Placement | Exception], None] = lambda answer: None
        self.has_client: Callable[[], bool] = lambda: True  # asked before the request is placed
        self.answer: Placement | Exception | None = None

    def cancel(self, now: float) -> None:
        """Gives up: the request leaves the queue. If it was answered in the same moment, so that
        nobody uses the answer, the reservation is freed."""
        if self._queue.leave(self):
            self._queue.admit(now)
        elif isinstance(self.answer, Placement) and self.request.books:
            self.answer = None
            self._queue.rules.give_back(self.request.reservation_id, now)

    def limit(self, limit_s: float, error: SelectorError) -> None:
        """Answers with `error` if the request still waits after `limit_s`."""
        call_later = self._queue.rules.call_later
        if call_later is not None:
            timer = call_later(limit_s, lambda: self._queue.refuse(self, error))
            self._timers = *self._timers, timer

    def left(self) -> None:
        # Otherwise the timers would keep the request and its prompt until the limits.
        for timer in self._timers:
            timer.cancel()
        self._timers = ()

    def set_answer(self, answer: Placement | Exception) -> None:
        self.answer = answer
        self.on_answer(answer)


_position = attrgetter("key")


def take_out(items: list[Waiting], waiting: Waiting) -> bool:
    """Remove a request from a list in order. Return False if it is not there."""
    at = bisect.bisect_left(items, waiting.key, key=_position)
    if at == len(items) or items[at] is not waiting:
        return False
    del items[at]
    return True


def ties_of(request: SelectionRequest) -> Ties:
    required = request.required_taints
    if request.asks_pair:
        return None, request.prefill_allowed_worker_ids, required, PREFILL
    return request.pinned, request.allowed_worker_ids, required, request.role


class Line:
    """Queued requests that have the same `ties`: pin, allowed workers and required taints."""

    __slots__ = ("items", "leads_to", "ranks", "ties")

    def __init__(self, ties: Ties) -> None:
        self.ties = ties
        self.items: list[Waiting] = []  # in order
        self.ranks = 0  # ranks that requests of the line may use, including busy ones
        # If one of these comes free, requests may leave. With a pin: all ranks of the worker,
        # because a busy rank accepts a pinned request if another rank of the worker is free.
        self.leads_to = 0

    def position(self) -> QueuePosition:
        """Return the position of the request that goes next; the line must not be empty."""
        return self.items[0].key

    def has_any(self) -> bool:
        return bool(self.items)

    def head(self) -> Waiting:
        return self.items[0]

    def all(self) -> list[Waiting]:
        return self.items

    def insert(self, waiting: Waiting) -> None:
        bisect.insort(self.items, waiting, key=_position)

    def remove(self, waiting: Waiting) -> bool:
        """Remove a request. Return False if it is not in this line."""
        return take_out(self.items, waiting)

    def open_worker(self, worker: SchedulableWorker) -> None:
        """Add to `ranks` those ranks of a new worker that this line's queued requests may use."""
        pinned, allowed, required, role = self.ties
        if not required <= worker.taints:
            return
        if worker.role == (DECODE if role == PREFILL else PREFILL):
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
        """Whether a queued request of this line can be placed now on a rank below the queue's
        threshold. All requests of a line have the same pin, allowed workers and required taints."""
        if self.ties[0] is None:
            role, avoided = self.ties[3], room.avoided
            if role != BOTH:
                avoided = room.avoided_by_role.get(role, avoided)
            return (self.ranks & ~avoided or self.ranks) & room.below & room.idle != 0
        return self.ranks & room.below != 0 and self.leads_to & room.idle != 0


@dataclass(eq=False)
class QueueRules:
    """What all queues of a selector have in common.

    `free(reservation_id, now, was_served)` ends a reservation. `threshold`: None if requests never
    wait. `call_soon` and `call_later` are the event loop's methods: without the first, all requests
    are admitted at once; without the second, no wait has a limit. `claimed` gets the reservation
    ids of queued requests, if given. `refusal`: why no more requests are queued."""

    free: Callable[[str, float, bool], None] = lambda reservation_id, now, was_served: None
    threshold: float | None = None
    max_wait_s: float | None = None
    call_soon: CallSoon | None = None
    call_later: CallLater | None = None
    claimed: set[str] | None = None
    refusal: SelectorError | None = None

    def __post_init__(self) -> None:
        self.most = 1 << 60 if self.call_soon is None else MOST_AT_ONCE

    def give_back(self, reservation_id: str, now: float) -> None:
        with contextlib.suppress(NotFound):  # removed with its worker
            self.free(reservation_id, now, False)


class Queue:
    """The queued requests of one partition. `room`: the ranks with room for them; None if requests
    never wait."""

    def __init__(
        self,
        place: "Callable[[Waiting, int, float], Placement] | None" = None,
        policy: QueuePolicy = "fcfs",
        rules: QueueRules | None = None,
        new_line: Callable[[Ties], Line] = Line,
    ) -> None:
        """`place(waiting, ranks, now)` chooses one of `ranks` that the request may use, and books
        it, or raises. `new_line` makes a line, which says who of it goes next."""
        self._place = place
        self._policy = policy
        self.rules = rules = QueueRules() if rules is None else rules
        self.room = None if rules.threshold is None else Headroom(rules.threshold)
        # Whether the policy needs `uncached_tokens` of each request.
        self.asks_work = policy in ("wspt", "least-work")
        self._workers: dict[int, SchedulableWorker] = {}
        self._lines: dict[Ties, Line] = {}
        self._make_line = new_line
        self._serial = 0  # of the request that was queued last
        self._size = 0
        self.hopeless: set[Line] = set()  # lines whose requests no registered rank can serve
        self._is_moving = False  # while requests are being admitted
        self._is_due = False  # a later turn of the loop will admit more
        self.isl_tokens = 0  # sum over the queued requests
        # How many were admitted, by priority, and their total waiting time
        self.admitted = {"low": 0, "normal": 0, "high": 0}
        self.waited_s = dict.fromkeys(self.admitted, 0.0)

    def __len__(self) -> int:
        return self._size

    def lines(self) -> Iterable[Line]:
        return self._lines.values()

    def in_order(self) -> list[Waiting]:
        """Return the queued requests as a new list, in the order in which they would go if all were
        of one id."""
        return sorted((item for line in self._lines.values() for item in line.all()), key=_position)

    # -- entering and leaving ----------------------------------------------------------------------

    def may_pass(self, room: Headroom, ranks: int) -> tuple[int, bool]:
        """Return those of `ranks` that a new request may use, and whether it need not wait."""
        if not self._size:  # a request without eligible rank fails at once
            return ranks, not ranks or ranks & room.below != 0
        ranks &= room.below  # a request that overtakes may only use ranks below the threshold
        return ranks, ranks != 0 and not (self._is_moving or self._is_due)

    def add(self, request: SelectionRequest, now: float, uncached_tokens: int = 0) -> Waiting:
        """Queue a request. `uncached_tokens`: the tokens to prefill, if the policy needs them."""
        rules, room = self.rules, self.room
        if not self._size and room is not None:
            room.came_free = 0  # no request was queued, so nobody waits for these ranks
        ties = ties_of(request)
        line = self._lines.get(ties)
        if line is None:
            line = self._lines[ties] = self._new_line(ties)
        self._serial += 1
        score = self._score(request.priority_jump, now, uncached_tokens)
        waiting = Waiting(self, request, now, self._serial, score, line)
        line.insert(waiting)
        self._size += 1
        self.isl_tokens += request.prompt.isl_tokens
        if rules.claimed is not None and request.books:
            rules.claimed.add(request.reservation_id)
        if rules.max_wait_s is not None:
            waiting.limit(rules.max_wait_s, WaitedTooLong(rules.max_wait_s))
        if room is not None and (self._is_moving or self._is_due):
            # The request arrived during an admission, and may be the next to leave.
            room.came_free |= line.leads_to
        return waiting

    def _score(self, priority_jump: float, now: float, uncached_tokens: int) -> float:
        jump = priority_jump if priority_jump > 0.0 else 0.0  # 0.0 also for NaN
        if self._policy == "fcfs":
            return jump - now
        if self._policy == "lcfs":
            return jump + now
        if self._policy == "least-work":
            return jump - now - uncached_tokens / AGING_TOKENS_PER_S
        return (1.0 + jump) / max(1, uncached_tokens)

    def _new_line(self, ties: Ties) -> Line:
        line = self._make_line(ties)
        pinned = ties[0]
        if pinned is None:
            for worker in self._workers.values():
                line.open_worker(worker)
        elif (only := self._workers.get(pinned.worker_id)) is not None:
            line.open_worker(only)
        if not line.ranks:
            self.hopeless.add(line)
        return line

    def leave(self, waiting: Waiting) -> bool:
        """Remove a request from the queue. Return False if the request is no longer queued."""
        line = waiting.line
        if self._lines.get(line.ties) is not line or not line.remove(waiting):
            return False
        if not line.has_any():
            del self._lines[line.ties]
            self.hopeless.discard(line)
        self._size -= 1
        self.isl_tokens -= waiting.request.prompt.isl_tokens
        if self.rules.claimed is not None and waiting.request.books:
            self.rules.claimed.discard(waiting.request.reservation_id)
        waiting.left()
        return True

    def refuse(self, waiting: Waiting, error: SelectorError) -> None:
        """Answer a request with `error`, unless it has left the queue."""
        if self.leave(waiting):
            waiting.set_answer(error)

    def forget_matches(self, ranks: int) -> None:
        """Forget what queued requests have cached on ranks that are now others than before."""
        for line in self._lines.values():
            for request in [waiting.request for waiting in line.all()]:
                matches = [(match, held & ~ranks) for match, held in request.matches]
                request.matches = [(match, held) for match, held in matches if held]

    def worker_changed(self, old: SchedulableWorker | None, new: SchedulableWorker | None) -> None:
        """Update which ranks the queued requests may use, because a worker was added (`old` is
        None), removed (`new` is None) or changed."""
        if old is not None:
            del self._workers[old.worker_id]
        if new is not None:
            self._workers[new.worker_id] = new
        for line in self._lines.values():
            if old is not None:
                line.close_worker(old)
            if new is not None:
                line.open_worker(new)
            if line.ranks:
                self.hopeless.discard(line)
            else:
                self.hopeless.add(line)

    # -- admission ---------------------------------------------------------------------------------

    def admit(self, now: float, hopeless_after_s: float = 0.0) -> None:
        """Fail queued requests that no worker can serve and that have waited for `hopeless_after_s`
        seconds. Then admit queued requests that can be placed now, in order."""
        if not self._size:
            return
        if self.hopeless and not self._is_due:
            told = [
                item
                for line in self.hopeless
                for item in line.all()
                if now - item.arrived_at >= hopeless_after_s
            ]
            for item in told[: self.rules.most]:
                if item.line.ties[3] == PREFILL and self.room is not None:
                    self._admit_one(self.room, item, passes=False)  # may do without, or says why
                else:
                    self.refuse(item, Unavailable(NO_ENDPOINTS))
            if len(told) > self.rules.most:
                self._admit_later()
        self.admit_next(now)

    def admit_next(self, now: float) -> None:
        """Admit queued requests that can be placed now, in the order of the queue, a limited number
        in each turn of the event loop."""
        room = self.room
        if room is None or not self._size:
            return
        room.advance(now)
        if self._is_moving or self._is_due:
            return  # the running admission will look again
        self._is_moving = True
        left = self.rules.most
        try:
            while room.came_free and left:
                left = self._admit_waiting(room, left)
        finally:
            self._is_moving = False
        if room.came_free:
            self._admit_later()

    def _admit_later(self) -> None:
        room, call_soon = self.room, self.rules.call_soon
        assert room is not None, "requests are queued"
        assert call_soon is not None, "or all have gone"

        def go_on() -> None:
            self._is_due = False
            self.admit(room.now)

        self._is_due = True
        call_soon(go_on)

    def _admit_waiting(self, room: Headroom, most: int) -> int:
        """Admit queued requests that can use ranks that came free, at most `most`. Return how many
        of `most` are left. Return early if more ranks come free; the caller then calls again."""
        came_free, room.came_free = room.came_free, 0
        open_lines: list[tuple[QueuePosition, Line]] = []
        blocked: QueuePosition | None = None  # the first request that cannot leave
        try:
            for line in self._lines.values():
                head = line.position()
                if line.leads_to & came_free and line.is_open(room):
                    open_lines.append((head, line))
                elif line.ranks and (blocked is None or head < blocked):
                    blocked = head
            heapq.heapify(open_lines)
            while open_lines and most and not room.came_free:
                key, line = open_lines[0]
                if not line.has_any():
                    heapq.heappop(open_lines)
                    continue
                head = line.position()
                if not line.is_open(room):
                    heapq.heappop(open_lines)
                    if blocked is None or head < blocked:
                        blocked = head
                elif head != key:
                    heapq.heapreplace(open_lines, (head, line))
                else:
                    passes = blocked is not None and blocked < key
                    self._admit_one(room, line.head(), passes)
                    most -= 1
        finally:
            if open_lines:
                room.came_free |= came_free
        return most

    def _admit_one(self, room: Headroom, waiting: Waiting, passes: bool) -> None:
        """Place a queued request. If `passes`, the request overtakes earlier requests, which stay
        queued. A request that overtakes may use only ranks below the queue's threshold."""
        if not self.leave(waiting) or not waiting.has_client():
            return  # without a client, its reservation would stand until it expires
        now = room.now
        waited_s = waiting.request.waited_s = now - waiting.arrived_at
        answer: Placement | Exception
        try:
            assert self._place is not None
            answer = self._place(waiting, room.below if passes else -1, now)
            strict = waiting.request.strict_priority
            priority = "high" if strict > 0 else "low" if strict else "normal"
            self.admitted[priority] += 1
            self.waited_s[priority] += waited_s
        # a failure must reach this request, not the caller whose event admitted it
        except Exception as error:
            answer = error
        waiting.set_answer(answer)
