"""What keeping state costs, at many live reservations: of a core, and of the loop's turns.

    python -m loadtest.state_cost [--live N] [--blocks N] [--rate N] [--seconds N] [--rounds N]

A selector on the service's own loop, in this process, with `--live` reservations of `--blocks`
blocks each, of which `--rate` a second end and are booked anew. It runs in turns with a state
directory and without; the difference of the processor time is what keeping it costs. All the while
a timer is due every millisecond: how late it comes is what a request would wait.
"""

import argparse
import asyncio
import random
import shutil
import statistics
import tempfile
import time

import uvloop

from lean_selector.core.load.shapes import Booking
from lean_selector.core.replication.shapes import LiveBooking
from lean_selector.core.selection.inspection import established
from lean_selector.core.selection.restoring import restore_booking
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.settings import RouterSettings
from lean_selector.core.selection.workers import WorkerSpec
from lean_selector.form import form
from lean_selector.server.state_catalog import PeersByHttp, SelectorCatalog
from lean_selector.server.state_files import RESERVATIONS, StateDirectory
from lean_selector.server.state_persister import LiveBookings, Persister

WORKERS = 16
PROBE_S = 0.001
INTERVAL_S = 1.0
SHARED_BLOCKS = 8  # of each prompt, with an eighth of the others


class Filled:
    """A selector with live reservations, some of which end while others are booked."""

    def __init__(self, live: int, blocks: int) -> None:
        self._rng = random.Random(1)
        self._blocks = blocks
        settings = RouterSettings(use_kv_events=False)
        self.selector = Selector(settings, _NoSources(), self._rng)
        for worker_id in range(WORKERS):
            spec = WorkerSpec(worker_id=worker_id, endpoint=f"http://w{worker_id}", block_size=16)
            self.selector.upsert_worker(spec, 0.0)
        self._prefixes = [self._rng.randbytes(8 * SHARED_BLOCKS) for _ in range(8)]
        self._number = 0
        self._ids: list[str] = []
        for _ in range(live):
            self._book()

    def _book(self) -> None:
        self._number += 1
        request_id = f"request-{self._number:032d}"
        own = self._rng.randbytes(8 * max(0, self._blocks - SHARED_BLOCKS))
        hashes = (self._rng.choice(self._prefixes) + own)[: 8 * self._blocks]
        booking = Booking(request_id, self._number % WORKERS, 0, prefill_tokens=16 * self._blocks)
        now = time.monotonic()
        live = LiveBooking("default", "default", 16, 0, booking, hashes, False, now)
        assert restore_booking(self.selector, live, None)
        self._ids.append(request_id)

    def turn_over(self) -> None:
        """One lifecycle: the end of a request, and another."""
        at = self._rng.randrange(len(self._ids))
        self._ids[at], self._ids[-1] = self._ids[-1], self._ids[at]
        self.selector.free(self._ids.pop(), time.monotonic())
        self._book()


class _NoSources:
    def subscribe(self, *_: object) -> None: ...

    def unsubscribe(self, *_: object) -> None: ...


class Round:
    """So much processor time a second; how late the timer was, in milliseconds; and what the
    thread of the loop ran itself between two of them at most, whatever else the machine did."""

    def __init__(self, cpu_percent: float, late_ms: list[float], ran_ms: float) -> None:
        self.cpu_percent = cpu_percent
        self.late_ms = sorted(late_ms)
        self.ran_ms = ran_ms

    def late(self, share: float) -> float:
        return self.late_ms[min(len(self.late_ms) - 1, int(share * len(self.late_ms)))]


async def measured(filled: Filled, rate: float, seconds: float) -> Round:
    late_ms: list[float] = []
    began, cpu = time.perf_counter(), time.process_time()
    ends, done, ran_ms, ran = began + seconds, 0, 0.0, time.thread_time()
    while (due := time.perf_counter() + PROBE_S) < ends:
        await asyncio.sleep(PROBE_S)
        now = time.perf_counter()
        late_ms.append(1000 * (now - due))
        before, ran = ran, time.thread_time()
        ran_ms = max(ran_ms, 1000 * (ran - before))
        while done < rate * (now - began):
            filled.turn_over()
            done += 1
    percent = 100 * (time.process_time() - cpu) / (time.perf_counter() - began)
    return Round(percent, late_ms, ran_ms)


async def play(live: int, blocks: int, rate: float, seconds: float, rounds: int) -> None:
    filled = Filled(live, blocks)
    catalog = SelectorCatalog(filled.selector, PeersByHttp(None, (), tuple))
    path = tempfile.mkdtemp(prefix="state-cost-")
    print(
        f"{form()} form, {live} live reservations of {blocks} blocks, {rate:g} lifecycles a second,"
        f" every {INTERVAL_S:g} s to {path}; {rounds} rounds of {seconds:g} s"
    )
    without, kept, costs = list[Round](), list[Round](), list[float]()
    try:
        for number in range(rounds):
            without.append(await measured(filled, rate, seconds))
            directory = StateDirectory(path)
            directory.take()
            lives = LiveBookings(lambda: established(filled.selector.catalog, None, None), 0, int)
            persister = Persister(directory, catalog, lives, INTERVAL_S, lambda fault: None)
            persister.begin_with(None)
            persister.start()
            await asyncio.sleep(2 * INTERVAL_S)  # the first text of each reservation
            spent_s, writes = persister.spent_s(), persister.writes[RESERVATIONS]
            kept.append(await measured(filled, rate, seconds))
            costs.append(100 * (persister.spent_s() - spent_s) / seconds)
            writes = persister.writes[RESERVATIONS] - writes
            size_mb = persister.size(RESERVATIONS) / 1e6
            await persister.close()
            print(
                f"round {number + 1}: without {without[-1].cpu_percent:.2f} % of a core, with "
                f"{kept[-1].cpu_percent:.2f} %; {writes} files of {size_mb:.1f} MB, by its own "
                f"count {costs[-1]:.2f} %; late at most {without[-1].late(1):.2f} ms without, "
                f"{kept[-1].late(1):.2f} ms with"
            )
    finally:
        shutil.rmtree(path, ignore_errors=True)
    differences = [b.cpu_percent - a.cpu_percent for a, b in zip(without, kept, strict=True)]
    print(
        f"cost: median {statistics.median(differences):.2f} % of a core "
        f"({min(differences):.2f} to {max(differences):.2f}); by its own count "
        f"{statistics.median(costs):.2f} %"
    )
    for name, each in (("without", without), ("with", kept)):
        late = Round(0.0, [ms for one in each for ms in one.late_ms], max(o.ran_ms for o in each))
        print(
            f"timer late {name}: median {late.late(0.5):.3f} ms, 99 % {late.late(0.99):.3f} ms, "
            f"99.9 % {late.late(0.999):.3f} ms, most {late.late(1):.3f} ms; the loop ran at most "
            f"{late.ran_ms:.3f} ms at a time"
        )


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=int, default=10_000)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    uvloop.run(play(given.live, given.blocks, given.rate, given.seconds, given.rounds))


if __name__ == "__main__":
    main()
