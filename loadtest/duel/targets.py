"""The services under comparison as child processes: their command lines, their life, their cost.

How a child is started, asked and ended is `loadtest.child_service`; `accounting` has the figures.
"""

import http.client
import re
import shlex
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from lean_selector import __version__
from lean_selector.demo.service_process import START_TIMEOUT_S, service_command
from loadtest.child_service import JSON, ChildService, free_port, plain_environment
from loadtest.duel.accounting import Footprint, cpu_ns, footprint
from loadtest.reference import NotInstalled, interpreter


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


class Service(ChildService):
    """A target that runs and answers."""

    def __init__(
        self, target: Target, flags: Sequence[str] = (), cpus: Collection[int] = ()
    ) -> None:
        """Start it; `wait` for its first answer. Raises TargetError when it cannot be started."""
        self.target = target
        port = free_port()
        command = [part.replace("{port}", str(port)) for part in target.command]
        env = plain_environment(**({} if target.log is None else {"DYN_LOG": target.log}))
        try:
            super().__init__([*command, *flags], port, env=env, cpus=cpus)
        except OSError as error:
            raise TargetError(f"{target.name}: cannot start {command[0]}: {error}") from error
        self.pid = self.process.pid

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
            status, answer = self.request(method, path, data, JSON)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()  # nothing in it is wanted any more
