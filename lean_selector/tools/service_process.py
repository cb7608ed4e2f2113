"""The selection service as a child process: start it, learn when it answers, stop it for sure."""

import asyncio
import os
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from typing import IO

from lean_selector.tools.http_client import HttpClient, ServiceError

HOST = "127.0.0.1"
START_TIMEOUT_S = 30.0  # a cold interpreter on a busy machine takes a few
STOP_TIMEOUT_S = 8.0  # the service drains for up to 5 s on SIGTERM


def service_command(port: int) -> list[str]:
    """The command line of our own service on loopback."""
    return [sys.executable, "-m", "lean_selector", "--host", HOST, "--port", str(port)]


def check_port(port: int) -> int:
    """The port itself, or one that the system finds free for 0. Raises ServiceError if taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the service binds
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise ServiceError(f"cannot use port {port}: {error}") from error
        free: int = probe.getsockname()[1]
        return free


class ServiceProcess:
    """A running child. Its output goes to a file, so that it can never block on a pipe."""

    def __init__(self, process: asyncio.subprocess.Process, output: IO[bytes]) -> None:
        self._process = process
        self._output = output

    def check(self) -> None:
        """Raises ServiceError, with the child's last line, once it has ended."""
        code = self._process.returncode
        if code is not None:
            end = self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, end - 4_096))
            lines = self._output.read().decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), None)
            words = f": {last[:300]}" if last else ", without a word"
            raise ServiceError(f"the service ended with exit code {code}{words}")

    async def stop(self) -> None:
        """SIGTERM to the child and its own children, SIGKILL to what takes too long.

        Also when cancelled meanwhile: nothing is left running.
        """
        self._signal(signal.SIGTERM)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
        finally:
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        # The group, which outlives a leader that died before its children.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@asynccontextmanager
async def running_service(command: Sequence[str]) -> AsyncIterator[ServiceProcess]:
    """Start a child in a process group of its own, so that Ctrl-C reaches us alone."""
    with tempfile.TemporaryFile() as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as error:
            raise ServiceError(f"cannot start {command[0]}: {error}") from error
        service = ServiceProcess(process, output)
        try:
            yield service
        except ServiceError:
            # A broken connection is often seen before its cause: say the cause.
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await process.wait()
            service.check()
            raise
        finally:
            await service.stop()


@asynccontextmanager
async def answering_service(
    port: int, template: str | None, *flags: str, stopping: Callable[[], bool] = lambda: False
) -> AsyncIterator[tuple[HttpClient, ServiceProcess]]:
    """A service on this port that answers, or `stopping`: ours with flags, or a command line with
    {port} in it."""
    command = shlex.split((template or "").replace("{port}", str(port)))
    async with running_service(command or [*service_command(port), *flags]) as service:
        with closing(HttpClient(f"http://{HOST}:{port}")) as client:
            await wait_until_healthy(client, service, stopping)
            yield client, service


async def wait_until_healthy(
    client: HttpClient, service: ServiceProcess | None, stopping: Callable[[], bool]
) -> None:
    """Return when /health says 200, or when stopping() says so. Raises ServiceError otherwise."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_TIMEOUT_S
    while not stopping():
        if service is not None:
            service.check()
        try:
            status, _ = await client.request("GET", "/health")
        except ServiceError as error:
            if service is None or loop.time() > deadline:
                raise ServiceError(f"the service does not answer: {error}") from error
        else:
            if status == 200:
                return
            raise ServiceError(f"this is no selection service: /health answers {status}")
        await asyncio.sleep(0.05)
