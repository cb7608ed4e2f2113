"""The services under comparison as child processes: their command lines, their life, their cost.

A child dies with this process however that ends, SIGKILL included. `accounting` has the figures.
"""

import contextlib
import ctypes
import fcntl
import http.client
import itertools
import os
import random
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from lean_selector import __version__
from lean_selector.demo.http_client import ServiceError
from lean_selector.demo.service_process import HOST, START_TIMEOUT_S, check_port, service_command
from loadtest.duel.accounting import Footprint, cpu_ns, footprint
from loadtest.reference import NotInstalled, interpreter

ROOT = Path(__file__).resolve().parents[2]
ANSWER_TIMEOUT_S = 60.0
# Below those that the system hands out for connections and engines' sockets, from 32 768 on: one of
# them could take a port between our look and the service's bind.
PORTS = (21_000, 31_000)
_PR_SET_PDEATHSIG = 1
ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_libc = ctypes.CDLL(None)


class TargetError(Exception):
    """A service cannot be installed, does not start, or does not answer. A readable line."""


class Target(msgspec.Struct, frozen=True):
    """One column of the tables.

    command: `{port}` stands for the port. log: DYN_LOG; None leaves it at its default.
    """

    name: str
    command: list[str]
    is_ours: bool = False
    log: str | None = None


def ours() -> Target:
    """The service of this checkout, run by the interpreter that runs us."""
    command = ["{port}" if part == "0" else part for part in service_command(0)]
    return Target(f"lean-selector {__version__}", command, is_ours=True)


def references(text: str) -> list[Target]:
    """A version or a command line, once quiet and once with its default logging."""
    if re.fullmatch(r"\d+(\.\w+)+", text):
        try:
            python = str(interpreter(text))
        except NotInstalled as error:
            raise TargetError(str(error)) from None
        name, command = text, [python, "-m", "dynamo.select_service", "--port", "{port}"]
    else:
        command = shlex.split(text)
        name = Path(command[0]).name
        if not any("{port}" in part for part in command):
            raise TargetError(f"the command of a reference must name {{port}}: {text}")
    return [Target(f"{name} warn", command, log="warn"), Target(f"{name} default log", command)]


# Runs at the same time begin at different places.
_candidates = itertools.cycle(random.sample(range(*PORTS), PORTS[1] - PORTS[0]))


def free_port() -> int:
    """A port that nothing has, and that the system will not give to anyone by itself."""
    for _ in range(*PORTS):
        with contextlib.suppress(ServiceError):
            return check_port(next(_candidates))
    raise TargetError(f"no free port from {PORTS[0]} to {PORTS[1]}")


def start(
    command: Sequence[str],
    cpus: Collection[int] = (),
    *,
    output: int | IO[bytes],
    errors: int | IO[bytes],
    env: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Run a program in ROOT, in a session of its own, on these CPUs if any; it dies with us.

    Signals wait meanwhile: Python drops an exception that comes from its own hooks after a fork.
    """

    parent = os.getpid()

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # it died before it was asked for
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
        if cpus:
            os.sched_setaffinity(0, cpus)

    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            preexec_fn=prepare,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)


class Service:
    """A target that runs and answers."""

    def __init__(
        self, target: Target, flags: Sequence[str] = (), cpus: Collection[int] = ()
    ) -> None:
        """Start it; `wait` for its first answer. Raises TargetError when it cannot be started."""
        self.target = target
        self.port = free_port()
        command = [part.replace("{port}", str(self.port)) for part in target.command]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
        if target.log is not None:
            environ["DYN_LOG"] = target.log
        # A file, as logs are, but without a name; appended to, so that it can be emptied meanwhile.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        fcntl.fcntl(self._log, fcntl.F_SETFL, os.O_APPEND)
        try:
            self._process = start(
                [*command, *flags], cpus, output=self._log, errors=self._log, env=environ
            )
        except OSError as error:
            self._log.close()
            raise TargetError(f"{target.name}: cannot start {command[0]}: {error}") from error
        self.pid = self._process.pid

    def wait(self) -> None:
        """Return when /health answers 200. Raises TargetError."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", "/health")[0] == 200:
                    return
            self.check()
            if time.monotonic() > deadline:
                raise TargetError(f"{self.target.name}: no /health in {START_TIMEOUT_S:.0f} s")
            time.sleep(0.02)

    def check(self) -> None:
        """Raises TargetError, with its last words, once the process has ended."""
        code = self._process.poll()
        if code is not None:
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - 2_000))
            words = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
            raise TargetError(f"{self.target.name} ended with {code}: {' '.join(words)}")

    def request(
        self, method: str, path: str, body: bytes = b"", content: str = "application/json"
    ) -> tuple[int, bytes]:
        """One request on a connection of its own. Raises OSError and HTTPException."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(method, path, body or None, {"content-type": content})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def call(self, method: str, path: str, body: object = None) -> bytes:
        """The body of a 2xx answer; raises TargetError otherwise."""
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            status, answer = self.request(method, path, data)
        except (OSError, http.client.HTTPException) as error:
            self.check()
            raise TargetError(f"{self.target.name}: {method} {path}: {error}") from error
        if not 200 <= status < 300:
            text = answer.decode(errors="replace")[:300]
            raise TargetError(f"{self.target.name}: {method} {path}: {status} {text}")
        return answer

    def cpu_ns(self) -> int:
        return cpu_ns(self.pid)

    def footprint(self) -> Footprint:
        return footprint(self.pid)

    def empty_log(self) -> None:
        """A default log writes a line per selection; a long run would fill the disk."""
        self._log.truncate(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill it: nothing in it is wanted any more."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()
