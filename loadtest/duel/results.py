"""Drives one service with a list of whole requests, and keeps the figures of all rounds."""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from statistics import median

import msgspec

from lean_selector.tools.service_process import ServiceError
from lean_selector.tools.traffic import percentile
from loadtest.child_service import start

# -- load on one service ---------------------------------------------------------------------------
# By wrk under closed load, or by our client; both send every request once, in order, and neither
# shares a process with the engines.

# Enough to keep either service busy, as a gateway beside it would. Connecting is in a round, and
# with 32 a round of long prompts was a measure of that.
CONNECTIONS = 8
OPEN_CONNECTIONS = 64  # at 1 000 requests a second: none waits for one unless all of 64 ms are slow
_LIMIT_S = 120  # of one run; each is made for about a second
_NUDGE_S = 0.2

_WRK_SCRIPT = Path(__file__).with_name("replay.lua").read_text()


class Load(msgspec.Struct):
    """What a run came to. latencies_us and late_us only under open load."""

    requests: int
    seconds: float
    bad: int
    p50_us: float = 0.0
    p99_us: float = 0.0
    latencies_us: list[int] = []
    late_us: list[int] = []


_decode = msgspec.json.Decoder(Load).decode


class RequestFile(AbstractContextManager["RequestFile"]):
    """Requests in files, as the senders read them; gone when the context ends.

    One lane is shared by all connections, so that its requests are sent in order, but may be
    answered in another. Of several lanes each has a connection of its own.
    """

    def __init__(self, *lanes: Sequence[bytes]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="versus-")
        self.folder = Path(self._directory.name)
        self.count = sum(map(len, lanes))
        self.lanes = len(lanes)
        self.connections = CONNECTIONS if self.lanes == 1 else self.lanes
        for number, requests in enumerate(lanes):
            (self.folder / f"requests.{number}").write_bytes(b"".join(requests))
            lengths = "".join(f"{len(request)}\n" for request in requests)
            (self.folder / f"lengths.{number}").write_text(lengths)
        script = _WRK_SCRIPT.replace("LANES", str(self.lanes))
        script = script.replace("CONNECTIONS", str(self.connections // self.lanes))
        self.script.write_text(script)

    @property
    def script(self) -> Path:
        return self.folder / "replay.lua"

    def __exit__(self, *_: object) -> None:
        self._directory.cleanup()


def closed_load(port: int, file: RequestFile, cpus: Collection[int] = ()) -> Load:
    """Send all requests, each connection's next one as soon as its last one is answered."""
    wrk = shutil.which("wrk")
    if wrk is None:
        return client_load(str(port), file, cpus)
    (file.folder / "ended").unlink(missing_ok=True)
    command = [wrk, f"-t{file.lanes}", f"-c{file.connections}", f"-d{_LIMIT_S}s"]
    command += ["-s", str(file.script), f"http://127.0.0.1:{port}/", "--", str(file.folder)]
    ended = file.folder / "ended"

    def is_answered() -> bool:
        return ended.exists() and ended.stat().st_size >= file.lanes

    output = _run(command, cpus, is_answered)
    result = output.partition("\nRESULT ")[2].partition("\n")[0]
    if not result:
        raise ServiceError(f"wrk says: {output[-300:]}")
    load = _decode(result)
    if load.requests != file.count:
        raise ServiceError(f"wrk had {load.requests} answers to {file.count} requests")
    return load


def client_load(address: str, file: RequestFile, cpus: Collection[int] = ()) -> Load:
    """The same by our own client; `address` is a port or the path of a UNIX socket."""
    return _client(address, file, ["--connections", str(file.connections)], cpus)


def open_load(port: int, file: RequestFile, rate: float, count: int | None = None) -> Load:
    """Send requests at a fixed rate per second, from the first again if count says so."""
    flags = ["--connections", str(OPEN_CONNECTIONS), "--rate", str(rate)]
    if count is not None:
        flags += ["--count", str(count)]
    return _client(str(port), file, flags, ())


def _client(address: str, file: RequestFile, flags: list[str], cpus: Collection[int]) -> Load:
    command = [sys.executable, "-m", "loadtest.duel.client", address]
    command += [str(file.folder), str(file.lanes), *flags]
    load = _decode(_run(command, cpus))
    ordered = sorted(load.latencies_us)
    load.p50_us, load.p99_us = percentile(ordered, 0.5), percentile(ordered, 0.99)
    return load


def _run(
    command: list[str], cpus: Collection[int], has_ended: Callable[[], bool] = lambda: False
) -> str:
    """What a program prints. Once `has_ended()`, it is interrupted until it ends: wrk misses an
    interrupt of its own script that comes before its main thread sleeps."""
    with start(command, cpus, output=subprocess.PIPE, errors=subprocess.PIPE) as process:
        give_up_at = time.monotonic() + _LIMIT_S
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=_NUDGE_S)
                    break
                except subprocess.TimeoutExpired as error:
                    if time.monotonic() >= give_up_at:
                        raise ServiceError(f"{command[0]}: not done in {_LIMIT_S} s") from error
                    if has_ended():
                        process.send_signal(signal.SIGINT)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
    if process.returncode:
        words = (errors or output).decode(errors="replace")
        raise ServiceError(f"{command[0]}: {words[-300:].strip()}")
    return output.decode()


# -- the figures -----------------------------------------------------------------------------------

STARTED = time.monotonic()
FAILURES = (ServiceError, OSError, ValueError)


def say(text: str) -> None:
    """Tells what is measured now."""
    print(f"{time.monotonic() - STARTED:5.0f} s  {text}", file=sys.stderr, flush=True)


class Results(msgspec.Struct):
    """rounds[case][target][metric] lists the values in the order of the rounds.

    own: our forms, the first of which is compared with every reference."""

    own: list[str]
    references: list[str]  # the first is the one that targets are of
    rounds: dict[str, dict[str, dict[str, list[float]]]] = {}
    notes: list[str] = []  # what a reader must know to trust or doubt a figure
    skipped: dict[str, str] = {}  # case -> why
    failures: list[str] = []  # what ended a part of the run

    @property
    def targets(self) -> list[str]:
        return [*self.own, *self.references]

    @property
    def comparisons(self) -> list[tuple[str, str]]:
        """One of ours and a reference: the first with all of them, the others with the first."""
        first = [(self.own[0], reference) for reference in self.references]
        return first + [(ours, other) for ours in self.own[1:] for other in self.references[:1]]

    def form_of(self, ours: str) -> str:
        """By which its ratios are called."""
        return ours.rpartition(" ")[2] if ours in self.own[1:] else "ours"

    def add(self, case: str, target: str, bad: int = 0, /, **metrics: float) -> None:
        """The values of one round, unless answers were not 2xx: what it costs to refuse is compared
        with nothing."""
        if bad:
            self.note(
                f"{case}: {bad} answers of {target} in a round were not 2xx: it has no figure"
            )
            return
        kept = self.rounds.setdefault(case, {}).setdefault(target, {})
        for metric, value in metrics.items():
            kept.setdefault(metric, []).append(value)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @contextmanager
    def keep(self, cases: Collection[str]) -> Iterator[None]:
        """What fails inside ends these cases alone: those without a figure are skipped for it."""
        try:
            yield
        except FAILURES as error:
            reason = str(error)
            if reason not in self.failures:
                self.failures.append(reason)
            for case in cases:
                if case in self.rounds:
                    self.note(f"{case}: not all rounds: {reason}")
                else:
                    self.skipped.setdefault(case, f"skipped: {reason}")

    def value(self, case: str, target: str, metric: str) -> float | None:
        """Median over the rounds; None when it was not measured."""
        values = self.rounds.get(case, {}).get(target, {}).get(metric)
        return median(values) if values else None

    def ratio(self, case: str, metric: str, reference: str, ours: str = "") -> float | None:
        """Our median over that of a reference; None where `quotient` is."""
        return self.quotient(case, ours or self.own[0], case, reference, metric)

    def quotient(
        self, case: str, target: str, other_case: str, other_target: str, metric: str
    ) -> float | None:
        """One median over another; None when one is missing, or the other is 0."""
        value = self.value(case, target, metric)
        other = self.value(other_case, other_target, metric)
        return None if value is None or not other else value / other


def latencies(microseconds: Sequence[int]) -> dict[str, float]:
    """Percentiles of single latencies, as metrics."""
    ordered = sorted(microseconds)
    return {
        "open_p50_us": percentile(ordered, 0.5),
        "open_p99_us": percentile(ordered, 0.99),
        "open_p999_us": percentile(ordered, 0.999),
        "open_max_us": ordered[-1] if ordered else 0.0,
    }
