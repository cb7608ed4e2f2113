"""A service as a child process of a test or a load test: started, asked, read, ended.

Synchronous, and at home with any command line that takes a port, ours or another's. A child that
the main thread starts dies with this process, however that ends, SIGKILL included. The demo, which
is of the product, has an asynchronous one (`lean_selector.tools.service_process`).
"""

import contextlib
import ctypes
import fcntl
import functools
import http.client
import itertools
import os
import random
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from lean_selector.tools.service_process import HOST, ServiceError, check_port

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 120.0  # of a busy machine's
ANSWER_TIMEOUT_S = 60.0
POLL_S = 0.02  # 50 polls a second of some 30 us each: below the noise of what is measured
LAST_LINES = 10  # of a log, in an error
# Below those that the system hands out for connections and engines' sockets, from 32 768 on: one of
# them could take a port between our look and the service's bind.
PORTS = (21_000, 31_000)
JSON = {"content-type": "application/json"}
ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

# Runs at the same time begin at different places.
_candidates = itertools.cycle(random.sample(range(*PORTS), PORTS[1] - PORTS[0]))
# And what one of them has taken is no other's, also before it is bound and while who had it starts
# anew: the byte of that number is locked in a file, for so many of the last ports of each process.
TAKEN = Path(tempfile.gettempdir()) / f"lean-selector-ports-{os.getuid()}"
KEPT = 500
_taken: deque[int] = deque()
_lock = threading.Lock()


@functools.cache
def _taken_file() -> int:
    """Never closed: that would let go of all."""
    return os.open(TAKEN, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def free_port() -> int:
    """A port that nothing has, that the system will not give to anyone by itself, and that no other
    process gets here for a while."""
    with _lock:
        for _ in range(*PORTS):
            port = next(_candidates)
            with contextlib.suppress(ServiceError, BlockingIOError):
                fcntl.lockf(_taken_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
                _taken.append(port)
                if len(_taken) > KEPT:
                    fcntl.lockf(_taken_file(), fcntl.LOCK_UN, 1, _taken.popleft())
                return check_port(port)
    raise OSError(f"no free port from {PORTS[0]} to {PORTS[1]}")


def plain_environment(**more: str) -> dict[str, str]:
    """Ours and `more`, but nothing by which the environment would configure a service."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith("DYN_")}, **more}


def start(
    command: Sequence[str],
    cpus: Collection[int] = (),
    *,
    output: int | IO[bytes],
    errors: int | IO[bytes],
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Run a program in ROOT, in a session of its own, on these CPUs if any; it dies with us.

    Signals wait meanwhile: Python drops an exception that comes from its own hooks after a fork.
    """
    parent = os.getpid()
    # It would die with the thread that started it, and another may end long before us.
    dies_with_us = threading.current_thread() is threading.main_thread()

    def prepare() -> None:
        if dies_with_us:
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


# clockid of another process's CPU time, as glibc's clock_getcpuclockid() makes it:
# the complement of the pid, and CPUCLOCK_SCHED in the low bits.
_CPUCLOCK_SCHED = 2


def cpu_ns(pid: int) -> int:
    """User and system time of all threads of a process, those that ended included.

    Raises ProcessLookupError when there is no such process.
    """
    try:
        return time.clock_gettime_ns((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        raise ProcessLookupError(f"there is no process {pid}") from None


def rss_mb(pid: int) -> float:
    """Resident memory. Raises OSError when there is no such process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def wait_until(condition: Callable[[], bool], what: str, within_s: float) -> None:
    """Polls an observable. Raises ServiceError."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise ServiceError(f"{what}: not within {within_s:.0f} s")
        time.sleep(POLL_S)


class ChildService:
    """A service on `port` of the loopback address, in a process of its own.

    Its output goes to a file, as logs do, and not to a pipe: one that nobody reads fills, and then
    the service waits for its reader.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        *,
        env: Mapping[str, str] | None = None,
        cpus: Collection[int] = (),
        keep_alive: bool = False,
        health: str = "/health",
    ) -> None:
        """Start it; `wait` for its first answer. Raises OSError when it cannot be started.

        env: the whole environment. keep_alive: all requests share a connection,
        and one thread asks them. health: the path that is answered 200 once it serves.
        """
        self.port = port
        self._health = health
        self.name = " ".join(command[:4])  # in errors
        self.headers: Mapping[str, str] = JSON  # of `call`
        self._shared = _connection_to(port) if keep_alive else None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        self._last_log = ""
        try:
            self.process = start(command, cpus, output=self._log, errors=self._log, env=env)
        except OSError:
            self._log.close()
            raise

    def is_healthy(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.request("GET", self._health)[0] == 200
        return False

    def wait(self) -> None:
        """Return when it is healthy. Raises ServiceError when it ended, or takes too long."""

        def is_up() -> bool:
            self.check()
            return self.is_healthy()

        wait_until(is_up, f"{self.name}: {self._health} is answered", START_TIMEOUT_S)

    def check(self) -> None:
        """Raises ServiceError, with its last words, once the process has ended."""
        code = self.process.poll()
        if code is not None:
            words = self.log().strip().splitlines()[-LAST_LINES:]
            raise ServiceError(f"{self.name} ended with {code}: {' | '.join(words)}")

    def cpu_ns(self) -> int:
        return cpu_ns(self.process.pid)

    def rss_mb(self) -> float:
        return rss_mb(self.process.pid)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def log(self) -> str:
        """All that it has written so far; also after its end."""
        if self._log.closed:
            return self._last_log
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Status and body. On the shared connection once more, where that had been closed.

        Raises OSError and HTTPException.
        """
        shared = self._shared
        if shared is None:
            return asked(self.port, method, path, body, headers)
        with contextlib.suppress(http.client.HTTPException, ConnectionError):
            return _asked_on(shared, method, path, body, headers)
        return _asked_on(shared, method, path, body, headers)

    def call(self, method: str, path: str, body: object = None) -> Any:
        """The answer to a JSON request, parsed. Raises ServiceError where it is not 2xx."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            status, answer = self.request(method, path, data, self.headers)
        except (OSError, http.client.HTTPException) as error:
            self.check()
            raise ServiceError(f"{self.name}: {method} {path}: {error}") from error
        if not 200 <= status < 300:
            text = answer.decode(errors="replace")[:300]
            raise ServiceError(f"{self.name}: {method} {path}: {status} {text}")
        return msgspec.json.decode(answer) if answer else None

    def metric(self, name: str) -> float:
        """The sum over a metric's series."""
        status, answer = self.request("GET", "/metrics")
        if status != 200:
            raise ServiceError(f"/metrics: {status}")
        rows = [row for row in answer.decode().splitlines() if row.startswith(name)]
        return sum(float(row.rpartition(" ")[2]) for row in rows if row[len(name)] in "{ ")

    def stop(
        self, signal_number: signal.Signals | int = signal.SIGKILL, patience_s: float = 0.0
    ) -> int:
        """End it and its own children, with SIGKILL what takes longer; its exit status.

        What it has logged stays to be read.
        """
        if self._log.closed:
            return self.process.wait()
        if self._shared is not None:
            self._shared.close()
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        self._last_log = self.log()
        self._log.close()
        return status

    def __enter__(self) -> Self:
        """Once it is healthy. Raises ServiceError."""
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()  # nothing in it is wanted any more


def asked(
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    """Status and body of one request on a connection of its own. Raises OSError, HTTPException."""
    with contextlib.closing(_connection_to(port)) as connection:
        return _asked_on(connection, method, path, body, headers)


def _connection_to(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(HOST, port, timeout=ANSWER_TIMEOUT_S)


def _asked_on(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str] | None,
) -> tuple[int, bytes]:
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (http.client.HTTPException, ConnectionError):
        connection.close()
        raise
