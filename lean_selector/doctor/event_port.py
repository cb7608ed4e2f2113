"""Who listens at a ZMQ endpoint, as seen from here: the first bytes of a connection tell.

Either side of ZMTP greets at once. An HTTP server waits for a request, and answers ours, which no
ZMQ socket takes for a greeting.
"""

import asyncio
import contextlib
from typing import Final

from lean_selector.doctor.findings import Finding, Level
from lean_selector.outbound.client import Resolve

# The first ten bytes of ZMTP 2.0 and later: 0xff, eight that do not matter, 0x7f (spec 23/ZMTP).
_SIGNATURE_BYTES: Final = 10
_HTTP_REQUEST: Final = b"GET / HTTP/1.0\r\n\r\n"
_HTTP_ANSWER: Final = b"HTTP/"


async def judge_port(
    resolve: Resolve, subject: str, field: str, endpoint: str, timeout_s: float
) -> Finding:
    """Whether ZMQ listens at `endpoint`, which stands in the worker's `field`."""
    place = _place(endpoint)
    if place is None:
        if endpoint.startswith("ipc://"):
            return Finding(Level.NOTE, subject, f"{field} {endpoint}: not looked at from here")
        return Finding(
            Level.ERROR,
            subject,
            f"{field} {endpoint} is no address that can be connected to",
            "register tcp://HOST:PORT, with the host as the selector reaches it",
        )
    host, port = place
    try:
        async with asyncio.timeout(timeout_s):
            said = await _first_words(resolve, host, port)
    except TimeoutError:
        return _bad(subject, field, endpoint, f"no connection in {timeout_s:g} s")
    except OSError as error:
        return _bad(subject, field, endpoint, error.strerror or str(error))
    if said[:1] == b"\xff" and said[9:10] == b"\x7f":
        return Finding(Level.OK, subject, f"{field} {endpoint}: ZMQ listens")
    if said.startswith(_HTTP_ANSWER):
        return Finding(
            Level.ERROR,
            subject,
            f"{field} {endpoint}: an HTTP server listens there, no ZMQ",
            "the port of --kv-events-config is meant (vLLM: 5557), not that of the API",
        )
    return Finding(
        Level.ERROR,
        subject,
        f"{field} {endpoint}: what listens there is no ZMQ",
        "register the port of the engine's --kv-events-config",
    )


def _place(endpoint: str) -> tuple[str, int] | None:
    if not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host in ("", "*", "0.0.0.0", "::") or not (port.isascii() and port.isdigit()):
        return None
    return (host, int(port)) if 1 <= int(port) <= 0xFFFF else None


async def _first_words(resolve: Resolve, host: str, port: int) -> bytes:
    """What comes by itself, or for an HTTP request where nothing does."""
    failure = OSError("the name has no addresses")
    for _, address in await resolve(host, port):
        ip, at = str(address[0]), int(address[1])
        try:
            said = await _heard(ip, at, b"")
            return said or await _heard(ip, at, _HTTP_REQUEST)
        except OSError as error:
            failure = error
    raise failure


async def _heard(ip: str, port: int, request: bytes, patience_s: float = 0.5) -> bytes:
    reader, writer = await asyncio.open_connection(ip, port)
    try:
        writer.write(request)
        heard = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(patience_s):
                while len(heard) < _SIGNATURE_BYTES and (
                    more := await reader.read(_SIGNATURE_BYTES - len(heard))
                ):
                    heard += more
        return heard
    finally:
        writer.transport.abort()


def _bad(subject: str, field: str, endpoint: str, why: str) -> Finding:
    return Finding(
        Level.ERROR,
        subject,
        f"{field} {endpoint}: {why}",
        "start the engine with KV events on that port, or register where it publishes them",
    )
