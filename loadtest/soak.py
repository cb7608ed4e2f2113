"""A long life under bad conditions: lifecycles by the million, and everything around them failing.

    python -m loadtest.soak [--lifecycles 10_000_000 | --seconds 90] [--python PYTHON]

Runs one selector with the flags of production, two peers (a second selector, a slot tracker),
engines that publish KV events, clients that behave and clients that do not, peers that speak
nonsense, and injects faults one after the other. Prints a table; exit status 1 when a verdict in it
fails. With `--seconds`, a run for a machine that others use too, times and memory decide nothing.
"""

import argparse
import asyncio
import contextlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from lean_selector.tools.service_process import ServiceError
from loadtest.duel.targets import machine, ours
from loadtest.soaking.faults import Faults, continue_all
from loadtest.soaking.fleet import EXPIRY_S, Fleet, Preload, Program, preloaded
from loadtest.soaking.lanes import Report
from loadtest.soaking.mischief import Mischief, Rogues
from loadtest.soaking.verdict import Memory, Outcome, holds, stalls, table
from loadtest.soaking.watch import Late

MARKS = (0.1, 0.5, 1.0)  # of the run: when memory is noted
MARK_SAMPLES = 10
HELD_SAMPLES, HELD_SAMPLE_S = 24, 0.5  # looks of a mark, each once memory was handed back
SAMPLE_S = 1.0
PRINT_S = 30.0
DRAIN_S = 180.0
# Copies of what a killed peer had reserved go that long after the expiry, and then some.
COPIES_S = 60.0 + 60.0
TRACEBACK = "Traceback (most recent call last)"

T = TypeVar("T")


class Sampler:
    """What the clients that behave have come to, and the memory of the measured process."""

    def __init__(
        self,
        fleet: Fleet,
        lanes: Program,
        faults: Faults,
        preload: Preload | str,
        goal: int | None,
        seconds: float,
    ) -> None:
        self.report = Report()
        self.samples: list[tuple[int, float]] = []
        self.marks: list[Memory] = []
        self._fleet, self._lanes, self._faults, self._preload = fleet, lanes, faults, preload
        self._goal, self._seconds = goal, seconds
        self._began = time.monotonic()

    def share(self) -> float:
        """How much of the run is done."""
        if self._goal is not None:
            return self.report.lifecycles / self._goal
        return (time.monotonic() - self._began) / self._seconds

    async def _mark(self) -> None:
        resident = statistics.median(mb for _, mb in self.samples[-MARK_SAMPLES:])
        done, held = self.report.lifecycles, None
        if isinstance(self._preload, Preload):
            async with self._faults.rest:
                held = await self._held(self._preload)
        self.marks.append(Memory(done, resident, held))

    async def _held(self, preload: Preload) -> float | None:
        """The least of some looks: at others it holds answers that are being made, and what waited
        for a peer that stood still. One look where memory decides nothing."""
        held = []
        for _ in range(1 if self._goal is None else HELD_SAMPLES):
            preload.ask_for_memory()
            await asyncio.sleep(HELD_SAMPLE_S)
            self._fleet.check()
            if preload.handed == preload.asked:
                held.append(self._fleet.measured.rss_mb())
        return min(held, default=None)

    async def run(self, injecting: asyncio.Task[None]) -> None:
        """Until the run is done: by time, also until each kind of fault was injected. Raises
        ServiceError when somebody ended that should not."""
        told_at = self._began
        while not self.report.ended and not (self.share() >= 1.0 and injecting.done()):
            await asyncio.sleep(SAMPLE_S)
            if injecting.done():
                injecting.result()
            self._fleet.check()
            self.report = last(self._lanes.output, Report) or self.report
            resident = self._fleet.measured.rss_mb()
            self.samples.append((self.report.lifecycles, resident))
            if len(self.marks) < len(MARKS) - 1 and self.share() >= MARKS[len(self.marks)]:
                await self._mark()
            if (now := time.monotonic()) - told_at >= PRINT_S:
                told_at += PRINT_S
                told = f"{self.report.lost} lost, {self.report.wrong} wrong, {resident:.1f} MB"
                done = f"{now - self._began:6.0f} s: {self.report.lifecycles:,} lifecycles"
                print(f"{done}, {told}", flush=True)
        await self._mark()


def last(path: Path, kind: type[T]) -> T | None:
    """The last whole line of a file, as JSON."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 32_768))
        lines = file.read().split(b"\n")[:-1]
    return msgspec.json.decode(lines[-1], type=kind) if lines else None


def all_lines(path: Path, kind: type[T]) -> list[T]:
    """Each whole line, as JSON."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=kind) for line in lines]


async def live(
    args: argparse.Namespace, form: str, fleet: Fleet, faults: Faults, preload: Preload | str
) -> Outcome:
    """One run. Raises what is no ServiceError; that is a problem of the outcome."""
    rogues = Rogues(fleet.rogue_peer, fleet.sync_ports[0], args.seed)
    port, problem = str(fleet.ports[0]), ""
    await rogues.begin(fleet.names_hosts)
    mischief = Mischief(fleet.ports[0], args.seed, rogues.sources)
    probe = fleet.program("watch", "probe", port)
    control = fleet.program("watch", "control", str(fleet.measured.pid), beside_measured=True)
    own = ["--seed", str(args.seed)]
    goal = [] if args.seconds else ["--lifecycles", str(args.lifecycles)]
    lanes = fleet.program("lanes", port, "--uds", fleet.uds, *goal, *own)
    second = ["--tolerant", "--pause", "0.05", "--lanes", "2", "--prefix", "b-"]
    beside = fleet.program("lanes", str(fleet.ports[1]), *second, *own)
    began, pid = time.monotonic(), fleet.measured.pid
    lifecycles = None if args.seconds else args.lifecycles
    sampler = Sampler(fleet, lanes, faults, preload, lifecycles, args.seconds)

    stop = asyncio.Event()
    others = [asyncio.create_task(each.run(stop)) for each in (mischief, rogues)]
    injecting = asyncio.create_task(faults.run(lambda: sampler.share() >= 1.0, args.faults))
    try:
        await sampler.run(injecting)
        await injecting
        seconds = time.monotonic() - began
        stop.set()
        await asyncio.gather(*others)
        for program in (lanes, beside):
            program.end(DRAIN_S)
            fleet.programs.remove(program)
        fleet.check()
        await faults.settle()
        left = await _loads_left(fleet)
    except ServiceError as error:
        problem, left, seconds = f"ServiceError: {error}", [], 0.0
    finally:
        stop.set()
        injecting.cancel()
        await asyncio.gather(injecting, *others, return_exceptions=True)
        continue_all(fleet)
        rogues.close()
    measured = fleet.measured
    survived = measured.process.poll() is None and measured.pid == pid
    # Before the probe notices that we stop the process.
    late, kept = (all_lines(each.output, Late) for each in (probe, control))
    failures = -1
    with contextlib.suppress(OSError, ServiceError):
        failures = int(measured.metric("lean_selector_task_failures_total"))
    status = measured.stop(signal.SIGTERM, DRAIN_S)
    log = measured.log()
    (fleet.folder / "measured.log").write_text(log)
    if (first := log.find(TRACEBACK)) >= 0:
        print(log[max(0, first - 1_000) : first + 6_000], file=sys.stderr)
    return Outcome(
        machine=f"{time.strftime('%Y-%m-%d')}, {machine()}",
        form=form,
        seconds=seconds,
        report=last(lanes.output, Report) or sampler.report,
        beside=last(beside.output, Report) or Report(),
        stalls=stalls(late, kept, faults.stops, faults.times),
        memory=sampler.marks,
        samples=sampler.samples,
        faults=[each for each in faults.injected.values() if each.done or each.skipped],
        acts=dict(mischief.acts),
        nonsense=dict(rogues.sent),
        acts_wrong=mischief.wrong[:20],
        loads=left,
        survived=survived,
        status=status,
        task_failures=failures,
        tracebacks=log.count(TRACEBACK),
        judges_times=not args.seconds,
        problem=problem,
    )


async def _loads_left(fleet: Fleet) -> list[str]:
    """What is not zero when everything was freed, or had the time to expire."""
    deadline = time.monotonic() + EXPIRY_S + COPIES_S
    while left := list(_loads(fleet)):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.5)
    return left


def _loads(fleet: Fleet) -> Iterator[str]:
    if live := fleet.measured.metric("lean_selector_reservations"):
        yield f"measured: {live:.0f} reservations"
    for name, service in (("measured", fleet.measured), ("second", fleet.second)):
        for model in service.call("GET", "/loads"):
            for row in model["loads"]:
                told = {key: row[key] for key in row if key not in ("worker_id", "dp_rank")}
                if any(told.values()):
                    yield f"{name}, worker {row['worker_id']}: {told}"


def soak(args: argparse.Namespace) -> Outcome:
    """Raises ServiceError when it cannot begin."""
    form = ours(args.python).name
    with contextlib.ExitStack() as stack:
        folder = args.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        preload = preloaded(folder)
        environment = {} if isinstance(preload, str) else preload.environment
        fleet = Fleet(args, folder, environment, stack)
        faults = Faults(fleet, preload, args.seed)
        return asyncio.run(live(args, form, fleet, faults, preload))


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--lifecycles", type=int, default=10_000_000)
    length.add_argument("--seconds", type=float, default=0.0, help="times and memory do not decide")
    parser.add_argument("--python", default=sys.executable, help="that runs the services")
    parser.add_argument("--fault", action="append", dest="faults", default=[], help="only these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pin", action="store_true", help="one CPU for the measured process alone")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--keep", type=Path, help="a folder for the files of all processes")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    args = _arguments(words)
    # As Ctrl-C does: the way out passes every `finally`, which ends all processes.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcome = soak(args)
    except ServiceError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    print(table(outcome))
    for trouble in [*outcome.report.troubles, *outcome.acts_wrong]:
        print(trouble)
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
    return 0 if holds(outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
