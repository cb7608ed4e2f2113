"""Workers or peers behind a name: its addresses with a port, or what its SRV records name."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

from lean_selector.discovery.particulars import Place
from lean_selector.discovery.sighting import OnPlaces, Sighting

SocketAddress = tuple[int, tuple[Any, ...] | bytes]
Resolve = Callable[[str, int], Awaitable[list[SocketAddress]]]
AskService = Callable[[str], Awaitable[list[tuple[str, int]]]]  # target and port; raises OSError

MOST_PLACES: Final = 4096


class DnsFinder:
    """Looks up a name again and again. An answer without addresses is a failure, as a name that
    is not known is: DNS cannot say that nobody is there."""

    def __init__(
        self,
        sighting: Sighting,
        name: str,
        port: int | None,
        is_secure: bool,
        interval_s: float,
        resolve: Resolve,
        ask_service: AskService | None,
        on_places: OnPlaces,
    ) -> None:
        """With a `port` addresses are looked up, without one SRV records."""
        self._sighting = sighting
        self._name = name
        self._port = port
        self._is_secure = is_secure
        self._interval_s = interval_s
        self._resolve = resolve
        self._ask_service = ask_service
        self._on_places = on_places

    async def run(self) -> None:
        while True:
            try:
                places = await self._look()
            except OSError as error:
                self._sighting.failed(error.strerror or str(error))
            else:
                self._sighting.found(len(places))
                self._on_places(places, ())
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> list[Place]:
        if self._port is None:
            assert self._ask_service is not None
            services = await self._ask_service(self._name)
            found = {Place(host, port, self._is_secure) for host, port in services}
        else:
            addresses = await self._resolve(self._name, self._port)
            # Of one that has both it is the same worker: the older family stands for it.
            families = {family for family, _ in addresses}
            wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
            found = {
                Place(str(address[0]), self._port, self._is_secure)
                for family, address in addresses
                if family == wanted and isinstance(address, tuple)
            }
        if not found:
            raise OSError("the answer names nobody")
        if len(found) > MOST_PLACES:
            raise OSError(f"the answer names {len(found)}, more than {MOST_PLACES}")
        return sorted(found)
