"""Name resolution in threads, with a cache of the answers."""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from lean_selector.tasks import in_thread

# (ip, port); for IPv6 (ip, port, flow, scope); for a UNIX socket its path
SocketAddress = tuple[Any, ...] | bytes

Address = tuple[int, SocketAddress]  # (family, socket address)


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


# -- resolver ------------------------------------------------------------------------------------
# Resolves names off the loop, so that a name that hangs in DNS delays only those who need it.
# getaddrinfo blocks while the DNS servers do not answer, often for 30 s. It runs in daemon threads,
# which nothing waits for, not even the exit of the process. Concurrent look-ups of a name share one
# call, and the answer is cached briefly. Names that hang may not occupy all threads. A numeric
# address needs no thread.

LookUp = Callable[[str], list[Address]]  # blocks; the port is 0; raises OSError

MAX_THREADS = 64
MAX_SLOW_THREADS = 16  # for names that hung before
# A look-up that takes longer than this no longer counts as one of the ordinary threads.
SLOW_S = 1.0
# Lifetime of cached answers and failures. Names are resolved only to connect, so an engine that
# moved is found at most this much later; 4 096 ranks of one host still share one look-up.
HOLDS_S = 5.0
_MAX_ANSWERS = 4096  # above this, expired answers are dropped


def look_up(name: str) -> list[Address]:
    """Return the IPv4 and IPv6 addresses of `name`, in the system's order. Raises OSError."""
    found: list[Address] = []
    try:
        answers = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError("not a host name") from None
    for family, _, _, _, address in answers:
        if family in (socket.AF_INET, socket.AF_INET6):
            found.append((family, address))
    return found


class Resolver:
    """Resolves host names. One per process, used only on the event loop's thread."""

    def __init__(self, look_up: LookUp = look_up) -> None:
        """`look_up(name)` may block, because it is called in a thread."""
        self._look_up = look_up
        self._answers: dict[str, Answer] = {}
        self._in_flight: dict[str, LookingUp] = {}
        self._waiting: dict[bool, deque[LookingUp]] = {False: deque(), True: deque()}
        self._running = {False: 0, True: 0}  # number of threads, by is_slow

    async def resolve(self, host: str, port: int) -> list[Address]:
        """Return the addresses of `host`, at least one, in the order to try. Raises OSError."""
        known = numeric(host)
        if known is not None:
            return [_at(port, known)]
        addresses = await self._named(host)
        if not addresses:
            raise OSError("the name has no addresses")
        return [_at(port, address) for address in addresses]

    async def _named(self, name: str) -> list[Address]:
        answer = self._answers.get(name)
        if answer is not None and time.monotonic() < answer.until:
            if answer.error is not None:
                raise answer.error
            return answer.addresses
        looking_up = self._in_flight.get(name)
        if looking_up is None:
            looking_up = LookingUp(
                name,
                asyncio.get_running_loop().create_future(),
                answer is not None and answer.was_slow,
            )
            self._in_flight[name] = looking_up
            self._waiting[looking_up.is_slow].append(looking_up)
            self._start_waiting()
        return await asyncio.shield(looking_up.done)

    def _start_waiting(self) -> None:
        """Start queued look-ups while threads are free. Names that were slow before come last."""
        for is_slow, limit in ((False, MAX_THREADS), (True, MAX_SLOW_THREADS)):
            waiting = self._waiting[is_slow]
            while (
                waiting
                and self._running[is_slow] < limit
                and sum(self._running.values()) < MAX_THREADS
            ):
                self._start(waiting.popleft())

    def _start(self, looking_up: LookingUp) -> None:
        looking_up.began = time.monotonic()
        self._running[looking_up.is_slow] += 1
        try:
            looking = in_thread("look-up", lambda: self._look_up(looking_up.name))
        except RuntimeError as error:  # the system has no more threads
            self._finish(looking_up, [], OSError(str(error)))
            return
        looking.add_done_callback(lambda done: self._take(looking_up, done))
        if not looking_up.is_slow:
            asyncio.get_running_loop().call_later(SLOW_S, self._note_slow, looking_up)

    def _note_slow(self, looking_up: LookingUp) -> None:
        if self._in_flight.get(looking_up.name) is looking_up:
            self._running[False] -= 1
            self._running[True] += 1
            looking_up.is_slow = True
            self._start_waiting()

    def _take(self, looking_up: LookingUp, done: "asyncio.Future[list[Address]]") -> None:
        error = done.exception()
        if error is None or isinstance(error, OSError):
            self._finish(looking_up, [] if error else done.result(), error)
        else:
            self._finish(looking_up, [], OSError(f"{type(error).__name__}: {error}"))

    def _finish(
        self, looking_up: LookingUp, addresses: list[Address], error: OSError | None
    ) -> None:
        del self._in_flight[looking_up.name]
        self._running[looking_up.is_slow] -= 1
        now = time.monotonic()
        was_slow = now - looking_up.began >= SLOW_S
        if len(self._answers) >= _MAX_ANSWERS:
            self._answers = {
                name: answer for name, answer in self._answers.items() if now < answer.until
            }
        self._answers[looking_up.name] = Answer(now + HOLDS_S, addresses, error, was_slow)
        if error is None:
            looking_up.done.set_result(addresses)
        else:
            looking_up.done.set_exception(error)
            looking_up.done.exception()  # retrieve the exception: no caller may be waiting
        self._start_waiting()


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
