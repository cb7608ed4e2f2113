"""The load client of the comparison, a program of its own: sends given requests, times the answers.

Closed: each connection sends its next request when the last one is answered. Open (`--rate`): a
request is due at its own time whatever happened to those before it, and its latency counts from
then, so that a stalled service is charged for all requests that it kept waiting (no coordinated
omission). select(2) has finer time-outs than an event loop.

    python -m loadtest.duel.client ADDRESS FOLDER LANES --connections 32 [--rate 1000]
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import select
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from loadtest.http_client import Connection, Malformed

_PR_SET_TIMERSLACK = 29
_ANSWER_TIMEOUT_S = 30.0


class Timed(Connection):
    """At most one request under way, due at `due` (seconds)."""

    due = 0.0
    lane: Iterator[bytes] = iter(())

    def send(self, request: bytes, due: float) -> None:
        self.due = due
        self.socket.sendall(request)

    def send_next(self) -> None:
        """The next request of its lane, if there is one left."""
        if (request := next(self.lane, None)) is not None:
            self.send(request, time.perf_counter())


class Run:
    """Requests sent in order over some connections, and what came of them.

    Closed, connections share a lane, or each has its own; open, there is one lane.
    """

    def __init__(
        self, address: int | str, lanes: list[list[bytes]], count: int, connections: int
    ) -> None:
        self._lanes = lanes
        self._count = count
        self._connections = [Timed(address) for _ in range(connections)]
        self.latencies_us: list[int] = []
        self.late_us: list[int] = []  # how much later than due we noticed: our own failing
        self.bad = 0  # answers that were not 2xx

    def _answered(self, connection: Timed) -> bool:
        status = connection.receive()
        if status is None:
            return False
        self.latencies_us.append(round((time.perf_counter() - connection.due) * 1e6))
        self.bad += not 200 <= status < 300
        return True

    def closed(self) -> None:
        poll, by_descriptor = select.epoll(), {c.fileno(): c for c in self._connections}
        lanes = itertools.cycle(map(iter, self._lanes))
        for connection in self._connections:
            connection.lane = next(lanes)
            poll.register(connection, select.EPOLLIN)
            connection.send_next()
        while len(self.latencies_us) < self._count:
            events = poll.poll(_ANSWER_TIMEOUT_S)
            if not events:
                raise SystemExit(f"no answer within {_ANSWER_TIMEOUT_S:.0f} s")
            for descriptor, _ in events:
                if self._answered(by_descriptor[descriptor]):
                    by_descriptor[descriptor].send_next()

    def open(self, rate: float) -> None:
        idle, busy = list(self._connections), list[Timed]()
        requests = itertools.cycle(self._lanes[0])
        started = time.perf_counter() + 0.01
        waiting: deque[float] = deque()  # times of those that are due and found no connection
        due_count = 0
        while len(self.latencies_us) < self._count:
            now = time.perf_counter()
            while due_count < self._count and (due := started + due_count / rate) <= now:
                waiting.append(due)
                self.late_us.append(round((now - due) * 1e6))
                due_count += 1
            while waiting and idle:
                connection = idle.pop()
                connection.send(next(requests), waiting.popleft())
                busy.append(connection)
            last = due_count == self._count
            next_s = _ANSWER_TIMEOUT_S if last else started + due_count / rate - time.perf_counter()
            ready, _, _ = select.select(busy, [], [], max(0.0, next_s))
            if last and not ready:
                raise SystemExit(f"no answer within {_ANSWER_TIMEOUT_S:.0f} s")
            for connection in ready:
                if self._answered(connection):
                    busy.remove(connection)
                    idle.append(connection)


def read_lane(folder: Path, number: int) -> list[bytes]:
    """The requests of one lane, in order."""
    data, at, requests = (folder / f"requests.{number}").read_bytes(), 0, []
    for line in (folder / f"lengths.{number}").read_text().splitlines():
        requests.append(data[at : at + int(line)])
        at += int(line)
    return requests


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("folder", type=Path)
    parser.add_argument("lanes", type=int)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--count", type=int)
    args = parser.parse_args()
    lanes = [read_lane(args.folder, number) for number in range(args.lanes)]
    if args.rate:  # keep the time of a busy machine out of the latencies, where that is allowed
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    gc.disable()
    address = int(args.address) if args.address.isdigit() else args.address
    run = Run(address, lanes, args.count or sum(map(len, lanes)), args.connections)
    began = time.perf_counter()
    try:
        run.open(args.rate) if args.rate else run.closed()
    except Malformed as error:
        raise SystemExit(str(error)) from None
    figures = {
        "requests": len(run.latencies_us),
        "seconds": time.perf_counter() - began,
        "bad": run.bad,
        "latencies_us": run.latencies_us,
        "late_us": run.late_us,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
