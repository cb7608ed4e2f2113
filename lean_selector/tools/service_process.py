"""Runs the selection service as a child process: starts, queries and stops it."""

import argparse
import asyncio
import math
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from typing import IO, TypeVar

import msgspec

from lean_selector.http.client import ClientConnection, Upstream
from lean_selector.http.outbound import (
    MOST_BODY_BYTES,
    Exchange,
    OutboundFailed,
    SocketAddress,
    connect,
)

# -- asking it -------------------------------------------------------------------------------------

# Longer than any answer should take; a request in the service's queue may come close.
ANSWER_TIMEOUT_S = 60.0


class ServiceError(Exception):
    """The service gave no answer, or an unexpected status. The message has one line."""


Number = TypeVar("Number", int, float)


def within(
    kind: Callable[[str], Number], least: Number, most: float = math.inf
) -> Callable[[str], Number]:
    """Return a parser for a command-line argument: a finite number from `least` to `most`."""

    def read(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"`{text}` is no number") from None
        if not (least <= value <= most and math.isfinite(value)):
            end = f" and at most {most:g}" if math.isfinite(most) else ""
            raise argparse.ArgumentTypeError(f"must be at least {least:g}{end}, got {text}")
        return value

    return read


class HttpClient:
    """Sends requests to one service. Concurrent requests use separate connections."""

    def __init__(self, url: str) -> None:
        """`url` has the form `http://127.0.0.1:port`."""
        self._upstream = Upstream(url)
        self._head_end = b" HTTP/1.1\r\n" + self._upstream.host_line + b"\r\n"

    async def call(self, method: str, path: str, body: object = None) -> bytes:
        """Sends a request, with a body as JSON. Return the body of a 2xx answer; otherwise, and if
        there is no answer, raises ServiceError."""
        content = b"" if body is None else msgspec.json.encode(body)
        head = method.encode() + b" " + path.encode() + self._head_end
        if content:
            head += b"content-type: application/json\r\n"
        if content or method == "POST":
            head += b"content-length: %d\r\n" % len(content)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                connection = self._upstream.kept()
                if connection is None:
                    connection = ClientConnection(self._upstream)
                    await connect(connection, _resolve, None, ANSWER_TIMEOUT_S)
                try:
                    exchange = Exchange(connection)
                    connection.send(head + b"\r\n", content, exchange)
                    await exchange.head()
                    answer = await exchange.body(MOST_BODY_BYTES)
                except BaseException:
                    connection.drop()  # a late answer is not wanted
                    raise
        except TimeoutError as error:
            raise ServiceError(f"{method} {path}: no answer in {ANSWER_TIMEOUT_S:.0f} s") from error
        except (OSError, OutboundFailed) as error:
            raise ServiceError(f"{method} {path}: {error}") from error
        if not 200 <= exchange.status < 300:
            text = answer.decode(errors="replace")[:300]
            raise ServiceError(f"{method} {path}: {exchange.status} {text}")
        return answer

    def close(self) -> None:
        """Closes the connections. No request may be running."""
        self._upstream.close()


async def _resolve(address: str, port: int) -> list[SocketAddress]:
    return [(socket.AF_INET, (address, port))]


# -- the process -----------------------------------------------------------------------------------

HOST = "127.0.0.1"
START_TIMEOUT_S = 30.0  # a cold interpreter on a busy machine takes a few seconds
STOP_TIMEOUT_S = 8.0  # the service drains for up to 5 s on SIGTERM


# Systems give no port below 32 768 to an outgoing connection, so one that is free stays free.
_PORTS = range(31_000, 32_768)


def check_port(port: int) -> int:
    """Return `port`, or a free port if `port` is 0. Raises ServiceError if `port` is in use."""
    if not port:
        for candidate in random.sample(_PORTS, 100):
            with suppress(ServiceError):
                return check_port(candidate)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the service binds
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise ServiceError(f"cannot use port {port}: {error}") from error
        free: int = probe.getsockname()[1]
        return free


class ServiceProcess:
    """A child process. Its output goes to a file, so that the child need not wait for a reader."""

    def __init__(self, process: asyncio.subprocess.Process, output: IO[bytes]) -> None:
        self._process = process
        self._output = output

    def check(self) -> None:
        """Raises ServiceError, with the child's last line of output, if the child has ended."""
        code = self._process.returncode
        if code is not None:
            end = self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, end - 4_096))
            lines = self._output.read().decode(errors="replace").split("\n")
            last = next((line.strip() for line in reversed(lines) if line.strip()), None)
            words = f": {last[:300]}" if last else ", without a word"
            raise ServiceError(f"the service ended with exit code {code}{words}")

    async def stop(self) -> None:
        """Sends SIGTERM to the child's process group, waits some seconds, then sends SIGKILL.

        Leaves nothing running, even if `stop` is cancelled."""
        self._signal(signal.SIGTERM)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
        finally:
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        # The process group, which exists even if the child has ended before its children.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@asynccontextmanager
async def running_service(command: Sequence[str]) -> AsyncIterator[ServiceProcess]:
    """Starts `command`, which Ctrl-C does not reach. Stops the process when the context ends."""
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
            # A broken connection is often noticed before its cause: report the cause.
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await process.wait()
            service.check()
            raise
        finally:
            await service.stop()


@asynccontextmanager
async def answering_service(
    port: int, stopping: Callable[[], bool]
) -> AsyncIterator[tuple[HttpClient, ServiceProcess]]:
    """Starts lean-selector on 127.0.0.1. Waits until GET /health answers 200, or `stopping()` is
    true. Raises ServiceError if the service ends, or does not answer in time."""
    command = [sys.executable, "-m", "lean_selector", "--host", HOST, "--port", str(port)]
    client, is_healthy = HttpClient(f"http://{HOST}:{port}"), False
    async with running_service(command) as service:
        with closing(client):
            deadline = time.monotonic() + START_TIMEOUT_S
            while not is_healthy and not stopping():
                service.check()
                try:
                    await client.call("GET", "/health")
                    is_healthy = True
                except ServiceError as error:
                    if time.monotonic() > deadline:
                        raise ServiceError(f"the service does not answer: {error}") from error
                    await asyncio.sleep(0.05)
            yield client, service
