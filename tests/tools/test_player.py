"""The demo's traffic: what its player does with answers that it did not hope for, and its turns."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from lean_selector.tools.service_process import HttpClient
from lean_selector.tools.simulated_engines import EngineSpeed, SimulatedEngine, make_request
from lean_selector.tools.traffic import Player
from tests.support.outbound_server import response, serving

REQUEST = make_request("a/b", list(range(48)), 32, 1, 16)
OK = (200, b'{"status":"ok"}')


@pytest.fixture
def engine() -> Iterator[SimulatedEngine]:
    engine = SimulatedEngine(1, 100, 16, EngineSpeed(), None)
    yield engine
    engine.close()


def selection(worker_id: int) -> tuple[int, bytes]:
    return 200, msgspec.json.encode({"worker_id": worker_id, "overlap": {"gpu": 16}})


GOOD = {
    "POST /workers": (201, b'{"worker_id":1,"lifecycle":"schedulable"}'),
    "POST /select_and_reserve": selection(1),
    "POST /reservations/a%2Fb/prefill_complete": OK,
    "POST /reservations/a%2Fb/output_block": OK,
    "DELETE /reservations/a%2Fb": OK,
    "POST /workers/1/report": OK,
}


class ScriptedService:
    """Answers each "METHOD /path" from a table, 404 otherwise."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = dict(GOOD)
        self.requests: list[tuple[str, bytes]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The URL at which it listens."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head, _, body = served.requests[-1].partition(b"\r\n\r\n")
            call = b" ".join(head.split(b" ", 2)[:2]).decode()
            self.requests.append((call, body))
            status, text = self.answers.get(call, (404, b'{"error":"route not found"}'))
            writer.write(response(text, f"{status} X", "connection: close\r\n"))

        async with serving(serve) as served:
            yield served.url


@pytest.fixture
def scripted() -> ScriptedService:
    """One that answers well."""
    return ScriptedService()


def play(scripted: ScriptedService, engine: SimulatedEngine, stopping: bool = False) -> Player:
    async def main() -> Player:
        async with scripted.running() as url:
            client = HttpClient(url)
            player = Player(client, {1: engine}, lambda: stopping, "m")
            try:
                await player.register_workers()
                await player.play(REQUEST)
            finally:
                client.close()
        return player

    return asyncio.run(main())


def test_a_request_goes_through_its_whole_lifecycle(
    scripted: ScriptedService, engine: SimulatedEngine
) -> None:
    player = play(scripted, engine)
    assert [call for call, _ in scripted.requests] == list(scripted.answers)
    body = msgspec.json.decode(scripted.requests[1][1])
    assert body == {
        "model_name": "m",
        "reservation_id": "a/b",
        "block_hashes": list(REQUEST.block_hashes[:2]),
        "sequence_hashes": list(REQUEST.sequence_hashes[:2]),
        "isl_tokens": 32,
    }
    assert (player.finished, player.calls, player.error_count) == (1, 5, 0)
    assert player.expected_blocks == 1
    assert engine.active == 0
    assert any("0 errors" in line for line in player.report())


def test_a_refused_step_is_counted_and_the_reservation_still_freed(
    scripted: ScriptedService, engine: SimulatedEngine
) -> None:
    scripted.answers["POST /reservations/a%2Fb/prefill_complete"] = (404, b"lost")
    player = play(scripted, engine)
    assert scripted.requests[-1][0] == "DELETE /reservations/a%2Fb"
    assert (player.finished, player.error_count, engine.active) == (0, 1, 0)
    assert any("404 lost" in line for line in player.report())
