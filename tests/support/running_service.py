"""A service of ours as a child process, for tests that go over real sockets."""

import http.client
import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from loadtest.child_service import JSON, ChildService, free_port, plain_environment
from tests.support.asked import Asked
from tests.support.on_loop import DEADLINE_S

__all__ = ["DEADLINE_S", "RunningService", "free_port", "unix_connection", "wait_until"]


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Polls an observable; fails naming what did not happen."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {deadline_s} s")
        time.sleep(0.01)


def unix_connection(path: str) -> http.client.HTTPConnection:
    """A client's, to a UNIX socket."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(DEADLINE_S)
    connection.sock.connect(path)
    return connection


class RunningService(Asked):
    """Starts on entering, answers requests, and is stopped on leaving; it may be entered again."""

    shares_connection = False  # by all requests; else each has one of its own

    def __init__(
        self, *flags: str, module: str = "lean_selector", env: dict[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self._module = module
        self._flags = flags
        self._env = plain_environment(**(env or {}))
        self.token: str | None = None  # sent with every request that names no headers of its own

    def __enter__(self) -> Self:
        self._start()
        try:
            wait_until(self._is_up, "the service is up")
        except BaseException:
            self._child.stop()
            raise
        return self

    def _start(self) -> None:
        command, shares = self._command(), self.shares_connection
        self._child = ChildService(command, self.port, env=self._env, keep_alive=shares)
        self.process = self._child.process

    def _command(self) -> list[str]:
        return [sys.executable, "-m", self._module, "--port", str(self.port), *self._flags]

    def _is_up(self) -> bool:
        assert self.process.poll() is None, f"the service ended: {self.log()}"
        return self.is_healthy()

    def is_healthy(self) -> bool:
        return self._child.is_healthy()

    def log(self) -> str:
        """All that the service has logged so far."""
        return self._child.log()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, signal_number: int = signal.SIGTERM) -> tuple[int, str]:
        """Ends the process; returns its exit status and what it logged."""
        status = self._child.stop(signal_number, DEADLINE_S)
        return status, self.log()

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """One request; the body of the answer parsed as JSON."""
        content = raw if body is None else json.dumps(body).encode()
        if headers is None:
            headers = {} if content is None else dict(JSON)
            if self.token is not None:
                headers["authorization"] = f"Bearer {self.token}"
        status, text = self._child.request(method, path, content, headers)
        return status, json.loads(text) if text else None
