"""The demo's traffic: what its player does with answers that it did not hope for, and its turns."""

import asyncio
from contextlib import closing

import msgspec

from lean_selector.tools.service_process import HttpClient
from lean_selector.tools.simulated_engines import EngineSpeed, SimulatedEngine, make_request
from lean_selector.tools.traffic import Player
from tests.support.outbound_server import response, serving

REQUEST = make_request("a/b", list(range(48)), 32, 1, 16)
OK = (200, b'{"status":"ok"}')


GOOD = {
    "POST /workers": (201, b'{"worker_id":1,"lifecycle":"schedulable"}'),
    "POST /select_and_reserve": (200, b'{"worker_id":1,"overlap":{"gpu":16}}'),
    "POST /reservations/a%2Fb/prefill_complete": OK,
    "POST /reservations/a%2Fb/output_block": OK,
    "DELETE /reservations/a%2Fb": OK,
    "POST /workers/1/report": OK,
}


def play(answers: dict[str, tuple[int, bytes]]) -> tuple[Player, SimulatedEngine, list[str]]:
    """One request, of a service that answers each `METHOD /path` from a table, otherwise 404; what
    it was asked, in order."""
    calls: list[str] = []

    async def main() -> Player:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # Connections are not kept, and one request is under way at a time.
            method, path, _ = served.requests[-1].decode().split(" ", 2)
            calls.append(f"{method} {path}")
            status, text = answers.get(calls[-1], (404, b"lost"))
            writer.write(response(text, f"{status} X", "connection: close\r\n"))

        async with serving(serve) as served:
            with closing(HttpClient(served.url)) as client:
                player = Player(client, {1: engine}, lambda: False, "m")
                await player.register_workers()
                await player.play(REQUEST)
        body = served.requests[1].partition(b"\r\n\r\n")[2]
        assert msgspec.json.decode(body) == {
            "model_name": "m",
            "reservation_id": "a/b",
            "block_hashes": list(REQUEST.block_hashes[:2]),
            "sequence_hashes": list(REQUEST.sequence_hashes[:2]),
            "isl_tokens": 32,
        }
        return player

    with closing(SimulatedEngine(1, 100, 16, EngineSpeed(), None)) as engine:
        return asyncio.run(main()), engine, calls


def test_a_request_goes_through_its_whole_lifecycle() -> None:
    player, engine, calls = play(GOOD)
    assert calls == list(GOOD)
    assert (player.finished, player.calls, player.error_count) == (1, 5, 0)
    assert (player.expected_blocks, engine.active) == (1, 0)
    assert any("0 errors" in line for line in player.report())


def test_a_refused_step_is_counted_and_the_reservation_still_freed() -> None:
    step = "POST /reservations/a%2Fb/prefill_complete"
    player, engine, calls = play({call: answer for call, answer in GOOD.items() if call != step})
    assert calls[-1] == "DELETE /reservations/a%2Fb"
    assert (player.finished, player.error_count, engine.active) == (0, 1, 0)
    assert any("404 lost" in line for line in player.report())
