"""The services under comparison as child processes: their command lines, their life, their cost.

How a child is started, asked and ended is `loadtest.child_service`; `accounting` has the figures.
"""

import contextlib
import functools
import http.client
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

import lean_selector
from lean_selector.form import COMPILED, PURE, form
from lean_selector.tools.service_process import HOST, START_TIMEOUT_S
from loadtest.child_service import JSON, ROOT, ChildService, free_port, plain_environment
from loadtest.duel.accounting import Footprint, cpu_ns, footprint
from loadtest.reference import NotInstalled, interpreter

RESERVATION_ID = "reservation_id"  # of what is booked, until 1.3
SELECTION_ID = "selection_id"  # and since 1.6


class TargetError(Exception):
    """A service cannot be installed, does not start, or does not answer. A readable line."""


class Target(msgspec.Struct, frozen=True):
    """One column of the tables.

    command: `{port}` stands for the port. log: DYN_LOG; None leaves it at its default. path: where
    Python finds the package, if not where the interpreter has it. options: more of the environment.
    """

    name: str
    command: list[str]
    is_ours: bool = False
    log: str | None = None
    path: str | None = None
    options: dict[str, str] = {}

    def with_options(self, options: dict[str, str]) -> "Target":
        """Run with these in its environment."""
        return msgspec.structs.replace(self, options=options)

    def environment(self) -> dict[str, str]:
        log = {} if self.log is None else {"DYN_LOG": self.log}
        path = {} if self.path is None else {"PYTHONPATH": self.path}
        return plain_environment(**log, **path, **self.options)


def ours(python: str = sys.executable, path: str | None = None) -> Target:
    """The service that an interpreter has, named for its version and form. Raises TargetError."""
    # Without -P the folder in which it is started comes first, and that may be a checkout.
    command = [python, "-P", "-m", "lean_selector"]
    target = Target("lean-selector", command, is_ours=True, path=path)
    try:
        done = subprocess.run(
            [*command, "--version"],
            env=target.environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        raise TargetError(f"cannot start {python}: {error}") from None
    told = re.fullmatch(r"(lean-selector \S+) \((.*)\)\n", done.stdout)
    if done.returncode or told is None:
        raise TargetError(f"{python} has no lean-selector: {done.stderr.strip()[-300:]}")
    return Target(
        f"{told[1]} {told[2]}",
        [*command, "--host", HOST, "--port", "{port}"],
        is_ours=True,
        path=path,
    )


def forms(compiled: str | None, folder: Path) -> list[Target]:
    """Ours: the compiled form, where there is one, and then the pure one. Raises TargetError.

    compiled: an interpreter in whose environment the compiled wheel is; None when that may be the
    one that runs us. Then the pure form's sources, which are in the wheel, are copied to `folder`.
    """
    if compiled is not None:
        found = [ours(compiled), ours()]
    elif form() != PURE:
        home = Path(lean_selector.__file__).parent
        without = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(home, folder / home.name, ignore=without)
        found = [ours(), ours(path=str(folder))]
    else:
        return [ours()]
    for target, wanted in zip(found, (COMPILED, PURE), strict=True):
        if not target.name.endswith(f" {wanted}"):
            raise TargetError(f"{target.command[0]} has {target.name}, where it should be {wanted}")
    return found


def run_beside(target: Target, program: str, *arguments: str) -> str:
    """What a program prints that is run with our package as the target has it."""
    done = subprocess.run(
        [target.command[0], "-P", program, *arguments],
        env=target.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise TargetError(f"{target.name}: {Path(program).name}: {done.stderr.strip()[-300:]}")
    return done.stdout


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


class Service(ChildService):
    """A target that runs and answers."""

    def __init__(
        self, target: Target, flags: Sequence[str] = (), cpus: Collection[int] = ()
    ) -> None:
        """Start it; `wait` for its first answer. Raises TargetError when it cannot be started."""
        self.target = target
        port = free_port()
        command = [part.replace("{port}", str(port)) for part in target.command]
        self.uds = os.path.join(tempfile.gettempdir(), f"versus-{port}.sock")
        if target.is_ours:
            command += ["--uds", self.uds]
        try:
            super().__init__([*command, *flags], port, env=target.environment(), cpus=cpus)
        except OSError as error:
            raise TargetError(f"{target.name}: cannot start {command[0]}: {error}") from error
        self.pid = self.process.pid
        self.headers = JSON  # of `call`

    def wait(self) -> None:
        """Return when /health answers 200. Raises TargetError."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.is_healthy():
            self.check()
            if time.monotonic() > deadline:
                raise TargetError(f"{self.target.name}: no /health in {START_TIMEOUT_S:.0f} s")
            time.sleep(0.02)

    def check(self) -> None:
        """Raises TargetError, with its last words, once the process has ended."""
        code = self.process.poll()
        if code is not None:
            words = self.log().strip().splitlines()[-1:]
            raise TargetError(f"{self.target.name} ended with {code}: {' '.join(words)}")

    def call(self, method: str, path: str, body: object = None) -> bytes:
        """The body of a 2xx answer; raises TargetError otherwise."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            status, answer = self.request(method, path, data, self.headers)
        except (OSError, http.client.HTTPException) as error:
            self.check()
            raise TargetError(f"{self.target.name}: {method} {path}: {error}") from error
        if not 200 <= status < 300:
            text = answer.decode(errors="replace")[:300]
            raise TargetError(f"{self.target.name}: {method} {path}: {status} {text}")
        return answer

    @functools.cached_property
    def id_field(self) -> str:
        """In which a body names what it books. Raises TargetError."""
        try:
            status, answer = self.request("POST", "/reservations", b"{}", self.headers)
        except (OSError, http.client.HTTPException) as error:
            self.check()
            raise TargetError(f"{self.target.name}: POST /reservations: {error}") from error
        is_missed = status == 422 and SELECTION_ID.encode() in answer
        return SELECTION_ID if is_missed else RESERVATION_ID

    def cpu_ns(self) -> int:
        return cpu_ns(self.pid)

    def footprint(self) -> Footprint:
        return footprint(self.pid)

    def stop(
        self, signal_number: signal.Signals | int = signal.SIGKILL, patience_s: float = 0.0
    ) -> int:
        """End it, and take away its socket, which a service that is killed leaves behind."""
        status = super().stop(signal_number, patience_s)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.uds)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()  # nothing in it is wanted any more
