"""A service of ours as a child process, for tests that go over real sockets."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

DEADLINE_S = 20.0  # generous: nothing here is expected to take a second


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Polls an observable; fails naming what did not happen."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {deadline_s} s")
        time.sleep(0.01)


class RunningService:
    """Starts on entering, answers requests, and is stopped on leaving."""

    def __init__(
        self, *flags: str, module: str = "lean_selector", env: dict[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self._module = module
        self._flags = flags
        self._log = ""
        self._env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("DYN_")},
            **(env or {}),
        }

    def __enter__(self) -> "RunningService":
        self._start()
        try:
            wait_until(self._is_up, "the service is up")
        except BaseException:
            self.process.kill()
            self.stop()
            raise
        return self

    def _start(self) -> None:
        command = [sys.executable, "-m", self._module, "--port", str(self.port), *self._flags]
        # Into a file: a pipe that nobody reads fills, and then the service waits for its reader.
        handle, self._log_path = tempfile.mkstemp(prefix="lean-selector-test-")
        self.process = subprocess.Popen(command, env=self._env, stderr=handle)
        os.close(handle)

    def _is_up(self) -> bool:
        if self.process.poll() is not None:
            log = self.log()
            if f"Address already in use (os error 98): 0.0.0.0:{self.port}" not in log:
                raise AssertionError(f"the service ended: {log}")
            self._forget_log()
            self.port = free_port()  # somebody was faster
            self._start()
        with contextlib.suppress(OSError):
            return self.request("GET", "/health")[0] == 200
        return False

    def log(self) -> str:
        """All that the service has logged so far."""
        return Path(self._log_path).read_text() if self._log_path else self._log

    def _forget_log(self) -> None:
        os.unlink(self._log_path)
        self._log_path = ""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self, signal_number: int = signal.SIGTERM) -> tuple[int, str]:
        """Ends the process; returns its exit status and what it logged."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        try:
            self.process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._log_path:
            self._log = self.log()
            self._forget_log()
        return self.process.returncode, self._log

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """One request on a connection of its own; the body of the answer parsed as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            content = raw if body is None else json.dumps(body).encode()
            if headers is None:
                headers = {} if content is None else {"content-type": "application/json"}
            connection.request(method, path, body=content, headers=headers)
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else None
        finally:
            connection.close()

    def post(self, path: str, body: object) -> tuple[int, Any]:
        return self.request("POST", path, body)

    def get(self, path: str) -> tuple[int, Any]:
        return self.request("GET", path)
