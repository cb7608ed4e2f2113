"""What runs for each discovery, seen from outside."""

import asyncio
import itertools
import socket

from lean_selector.workers.discoveries import Discoveries, Surroundings
from lean_selector.workers.finders import SocketAddress
from lean_selector.workers.particulars import peer_target_of
from lean_selector.workers.peer_roster import PeerRoster
from tests.support.on_loop import on_loop, until


class NoMesh:
    """Takes every peer."""

    def peers(self) -> list[str]:
        return []

    def register_peer(self, endpoint: str) -> bool:
        return True

    def deregister_peer(self, endpoint: str) -> bool:
        return True

    def catch_up_from(self, urls: list[str]) -> None:
        pass


@on_loop
async def test_a_finder_that_fails_of_a_bug_is_failing_until_it_finds_again() -> None:
    tries = itertools.count()
    mended = asyncio.Event()

    async def resolve(name: str, port: int) -> list[SocketAddress]:
        if next(tries) == 0:
            raise RuntimeError("a bug")
        await mended.wait()
        return [(socket.AF_INET, ("10.0.0.1", port))]

    discoveries = Discoveries(Surroundings(resolve, 0.001, None, "", None))
    discoveries.find_peers([peer_target_of("dns:peers:9092")], PeerRoster(NoMesh(), 0, None, 0, 0))
    discoveries.start()

    def seen() -> tuple[str, str | None, int]:
        found = discoveries.report().discoveries[0]
        return found.state, found.last_error, found.failures

    await until(lambda: seen() == ("failing", "RuntimeError: a bug", 1))
    mended.set()
    await until(lambda: seen() == ("watching", None, 1))
    await discoveries.close()
