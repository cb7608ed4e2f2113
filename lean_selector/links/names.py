"""Name resolution in threads, with a cache of the answers."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from lean_selector.tasks import in_thread, watched

# (ip, port); for IPv6 (ip, port, flow, scope); for a UNIX socket its path
SocketAddress = tuple[Any, ...] | bytes

Address = tuple[int, SocketAddress]  # (family, socket address)

LookUp = Callable[[str], list[Address]]  # blocks; the port is 0; raises OSError

# Look-ups at a time, each of another name: one that hangs holds a thread for up to 30 s.
MAX_THREADS = 256
# Lifetime of answers and failures. Names are resolved only to connect, so an engine that moved is
# found at most this much later; 4 096 ranks of one host still share one look-up.
HOLDS_S = 5.0


def look_up(name: str) -> list[Address]:
    """Return the IPv4 and IPv6 addresses of `name`, in the system's order. Raises OSError."""
    try:
        answers = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError("not a host name") from None
    inet = (socket.AF_INET, socket.AF_INET6)
    return [(family, address) for family, _, _, _, address in answers if family in inet]


class Resolver:
    """Resolves host names off the loop, because getaddrinfo blocks while DNS servers do not answer.
    It runs in daemon threads, which nothing waits for, not even the exit of the process. One per
    process, used only on the event loop's thread."""

    def __init__(self, look_up: LookUp = look_up) -> None:
        """`look_up(name)` may block, because it is called in a thread."""
        self._look_up = look_up
        self._look_ups: dict[str, asyncio.Task[list[Address] | OSError]] = {}  # and answers
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def resolve(self, host: str, port: int) -> list[Address]:
        """Return the addresses of `host`, at least one, in the order to try. Raises OSError."""
        known = numeric(host)
        if known is not None:
            return [_at(port, known)]
        looking_up = self._look_ups.get(host)
        if looking_up is None:
            looking_up = self._look_ups[host] = watched("look-up", self._looked_up(host))
        found = await asyncio.shield(looking_up)
        if isinstance(found, OSError):
            raise type(found)(*found.args)
        return [_at(port, address) for address in found]

    async def _looked_up(self, name: str) -> list[Address] | OSError:
        try:
            async with self._threads:
                found = await in_thread("look-up", lambda: self._look_up(name))
            return found or OSError("the name has no addresses")
        except OSError as error:
            return error
        except Exception as error:
            return OSError(f"{type(error).__name__}: {error}")
        finally:
            asyncio.get_running_loop().call_later(HOLDS_S, self._look_ups.pop, name, None)


def numeric(host: str) -> Address | None:
    """Return the address if `host` is an IP address; None if `host` is a name."""
    text = host[1:-1] if host.startswith("[") else host
    try:
        found = socket.getaddrinfo(text, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return None
    family, _, _, _, address = found[0]
    return family, address


def _at(port: int, address: Address) -> Address:
    family, (ip, _, *rest) = address
    return family, (ip, port, *rest)
