"""Why there is no connection to an address: what libzmq does not say is asked there once more.

Each probe is one TCP or UNIX connection of at most a second.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

from lean_selector.sockets.lookups import Address

_PROBE_S = 1.0
# What ZMTP 3 begins with, signature and version; then come mechanism, side and filler. A client
# that sends so much is sent all; one that asks for another mechanism may be cut off first.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
_GREETING_BYTES = 64


async def why_unreachable(address: Address) -> str | None:
    """The system's own reason why nothing listens there; None where something does."""
    try:
        async with _probed(address):
            return None
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error_text(error)


async def why_no_handshake(address: Address, *, is_curve: bool, is_vague: bool) -> str | None:
    """A better reason, where the listener gives one. `is_vague`: it may be its mechanism."""
    with contextlib.suppress(OSError):  # a time-out is one
        async with _probed(address) as probe:
            await asyncio.get_running_loop().sock_sendall(probe, b"HEAD / HTTP/1.0\r\n\r\n")
            if (await _read(probe, 5)) == b"HTTP/":
                return "it speaks HTTP, not ZMQ"
    if not is_vague:
        return None
    with contextlib.suppress(OSError):
        async with _probed(address) as probe:
            await asyncio.get_running_loop().sock_sendall(probe, _GREETING)
            greeting = await _read(probe, _GREETING_BYTES)
            if len(greeting) == _GREETING_BYTES and greeting[:1] == _GREETING[:1]:
                mechanism = greeting[12:32].rstrip(b"\0")
                if (mechanism == b"CURVE") is not is_curve:
                    return other_mechanism(is_curve=is_curve)
    return None


def other_mechanism(*, is_curve: bool) -> str:
    if is_curve:
        return "it does not encrypt, and keys are given for it"
    return "it asks for keys (CURVE), and none are given for it"


def error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # of a look-up, whose numbers are of another kind
    return str(error) or type(error).__name__


@contextlib.asynccontextmanager
async def _probed(address: Address) -> AsyncIterator[socket.socket]:
    """A connection. Raises OSError, and TimeoutError where all within takes more than a second."""
    family, where = address
    probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with probe:
        async with asyncio.timeout(_PROBE_S):
            await asyncio.get_running_loop().sock_connect(probe, where)
            yield probe


async def _read(probe: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer before its end."""
    read = b""
    while len(read) < size:
        data = await asyncio.get_running_loop().sock_recv(probe, size - len(read))
        if not data:
            break
        read += data
    return read
