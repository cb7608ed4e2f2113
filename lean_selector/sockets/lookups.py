"""What the resolver keeps: the names that it is looking up, and the answers that hold."""

import asyncio
from typing import Any

import msgspec

# (ip, port), (ip, port, flow, scope) of IPv6, a path of a UNIX socket
SocketAddress = tuple[Any, ...] | bytes

Address = tuple[int, SocketAddress]  # with its family


class LookingUp(msgspec.Struct, eq=False):
    name: str
    done: "asyncio.Future[list[Address]]"
    is_slow: bool
    began: float = 0.0  # monotonic


class Answer(msgspec.Struct):
    until: float  # monotonic
    addresses: list[Address]
    error: OSError | None
    was_slow: bool
