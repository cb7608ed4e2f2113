"""The services under comparison as child processes: command lines, life, cost, and peers."""

import contextlib
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from lean_selector.build_info import COMPILED, PURE
from lean_selector.tools.service_process import HOST, START_TIMEOUT_S, ServiceError
from loadtest.child_service import ROOT, ChildService, free_port, plain_environment, wait_until
from loadtest.duel.prompts import MODEL_NAME
from loadtest.reference import NotInstalled, interpreter


def machine() -> str:
    """One line that names the processor, how many of it may be used, and the system."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(models, os.uname().machine)
    uname = os.uname()
    return f"{model}, {len(os.sched_getaffinity(0))} CPUs, {uname.sysname} {uname.release}"


class Target(msgspec.Struct, frozen=True):
    """One column of the tables.

    command: `{port}` stands for the port. options: more of the environment.
    """

    name: str
    command: list[str]
    is_ours: bool = False
    options: dict[str, str] = {}


def ours(python: str = sys.executable) -> Target:
    """The service that an interpreter has, named for its version and form. Raises ServiceError."""
    # Without -P the folder in which it is started comes first, and that may be a checkout.
    command = [python, "-P", "-m", "lean_selector"]
    try:
        done = subprocess.run(
            [*command, "--version"],
            env=plain_environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise ServiceError(f"cannot start {python}: {error}") from None
    told = re.fullmatch(r"(lean-selector \S+) \((.*)\)\n", done.stdout)
    if done.returncode or told is None:
        raise ServiceError(f"{python} has no lean-selector: {done.stderr.strip()[-300:]}")
    return Target(
        f"{told[1]} {told[2]}",
        [*command, "--host", HOST, "--port", "{port}"],
        is_ours=True,
    )


def forms(compiled: str | None) -> list[Target]:
    """Ours: this interpreter's form, and before it the compiled one, if an interpreter that has it
    is named. Raises ServiceError."""
    if compiled is None:
        return [ours()]
    found = [ours(compiled), ours()]
    for target, wanted in zip(found, (COMPILED, PURE), strict=True):
        if not target.name.endswith(f" {wanted}"):
            raise ServiceError(
                f"{target.command[0]} has {target.name}, where it should be {wanted}"
            )
    return found


def reference(text: str) -> Target:
    """By its version, or by a command line. Raises ServiceError."""
    if re.fullmatch(r"\d+(\.\w+)+", text):
        try:
            python = str(interpreter(text))
        except NotInstalled as error:
            raise ServiceError(str(error)) from None
        return Target(text, [python, "-m", "dynamo.select_service", "--port", "{port}"])
    command = shlex.split(text)
    if not any("{port}" in part for part in command):
        raise ServiceError(f"the command of a reference must name {{port}}: {text}")
    return Target(Path(command[0]).name, command)


class Service(ChildService):
    """A target that runs, on a socket of its own too where it is ours."""

    def __init__(
        self, target: Target, flags: Sequence[str] = (), cpus: Collection[int] = ()
    ) -> None:
        """Start it; `wait` for its first answer. Raises ServiceError when it cannot be started."""
        self.target = target
        port = free_port()
        command = [part.replace("{port}", str(port)) for part in target.command]
        self.uds = os.path.join(tempfile.gettempdir(), f"versus-{port}.sock")
        if target.is_ours:
            command += ["--uds", self.uds]
        environment = plain_environment(DYN_LOG="warn", **target.options)
        try:
            super().__init__([*command, *flags], port, env=environment, cpus=cpus)
        except OSError as error:
            raise ServiceError(f"{target.name}: cannot start {command[0]}: {error}") from error
        self.name = target.name

    @functools.cached_property
    def id_field(self) -> str:
        """In which a body names what it books: until 1.3 `reservation_id`."""
        try:
            self.call("POST", "/reservations", {})
        except ServiceError as error:  # it names what is missing
            return "selection_id" if "selection_id" in str(error) else "reservation_id"
        raise ServiceError(f"{self.name} books nothing under no name")

    def book(self, name: str, worker_id: int, load: int = 0, blocks: Sequence[int] = ()) -> None:
        """A reservation on a worker. `load` is of its prefill."""
        body = {
            "model_name": MODEL_NAME,
            self.id_field: name,
            "worker_id": worker_id,
            "dp_rank": 0,
            "isl_tokens": 8 * load + 1,
            "effective_prefill_tokens": 7 * load + 1,
            "block_hashes": blocks,
            "sequence_hashes": blocks,
        }
        self.call("POST", "/reservations", body)

    def footprint(self) -> dict[str, float]:
        """Memory, threads and open descriptors now."""
        threads = len(os.listdir(f"/proc/{self.process.pid}/task"))
        return {"rss_mb": self.rss_mb(), "threads": threads, "descriptors": self.descriptors()}

    def stop(
        self, signal_number: signal.Signals | int = signal.SIGKILL, patience_s: float = 0.0
    ) -> int:
        """End it, and take away its socket, which a service that is killed leaves behind."""
        status = super().stop(signal_number, patience_s)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.uds)
        return status


# -- a service and its peer ------------------------------------------------------------------------

_LINK_TIMEOUT_S = 20.0


class Pair(contextlib.AbstractContextManager["Pair"]):
    """`main` gets the load; `peer` only hears of it."""

    def __init__(self, target: Target, replicated: bool, cpus: Collection[int]) -> None:
        """Start one or both. Raises ServiceError."""
        self.peer: Service | None = None
        if not replicated:
            self.main = Service(target, cpus=cpus)
            return
        here, there = free_port(), free_port()
        self.main = Service(target, _flags(here, there), cpus)
        try:
            self.peer = Service(target, _flags(there, here), cpus)
        except BaseException:
            self.main.stop()
            raise

    @property
    def services(self) -> list[Service]:
        return [self.main] if self.peer is None else [self.main, self.peer]

    def peer_cpu_ns(self) -> int:
        return 0 if self.peer is None else self.peer.cpu_ns()

    def wait_until_linked(self) -> None:
        """Return when the peer hears of reservations; they are freed again. Raises ServiceError."""
        if self.peer is None:
            return
        peer, booked = self.peer, list[str]()

        def is_heard() -> bool:
            booked.append(f"link-{len(booked)}")
            self.main.book(booked[-1], 1)
            return _active(peer) > 0

        wait_until(is_heard, f"{self.main.name}: the replicas hear each other", _LINK_TIMEOUT_S)
        for name in booked:
            self.main.call("DELETE", f"/reservations/{name}")
        self.wait_until_equal()

    def wait_until_equal(self) -> None:
        """Return when the peer counts as many active requests as main does. Raises ServiceError."""
        if self.peer is None:
            return
        peer, what = self.peer, f"{self.main.name}: its peer counts as many active requests"
        wait_until(lambda: _active(self.main) == _active(peer), what, _LINK_TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        for service in self.services:
            service.stop()


def _active(service: Service) -> int:
    parts = service.call("GET", "/loads")
    return sum(row["active_requests"] for part in parts for row in part["loads"])


def _flags(port: int, peer_port: int) -> list[str]:
    peer = f"tcp://127.0.0.1:{peer_port}"
    return ["--replica-sync-port", str(port), "--replica-sync-peers", peer]
