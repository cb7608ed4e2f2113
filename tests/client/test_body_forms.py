"""How a prompt travels: as MessagePack, and as JSON to a service that takes nothing else."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from lean_selector import KvRouter, SyncKvRouter, block_hashes, sequence_hashes
from tests.support.running_service import RunningService

TOKENS = list(range(40))
ANSWER = {
    "worker_id": 1,
    "dp_rank": 0,
    "endpoint": "http://w",
    "block_size": 16,
    "overlap": {"longest_matched": 16, "gpu": 16, "dp": {"0": 16}, "cpu": 16, "disk": 16},
    "effective_prefill_tokens": 24,
}


class JsonOnly(BaseHTTPRequestHandler):
    """A service as the reference is: any other body than JSON is 415."""

    protocol_version = "HTTP/1.1"
    bodies: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        kind = self.headers["content-type"]
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append((kind, body))
        status = 200 if kind == "application/json" else 415
        answer = json.dumps(ANSWER if status == 200 else {"error": "not JSON"}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def json_only() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    bodies: list[tuple[str, bytes]] = []
    handler = type("Handler", (JsonOnly,), {"bodies": bodies})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()
        thread.join()


def signed(hashes: list[int]) -> list[int]:
    return [value - 2**64 if value >= 2**63 else value for value in hashes]


def test_a_service_that_takes_json_only_is_asked_again_once_and_then_in_json(
    json_only: tuple[str, list[tuple[str, bytes]]],
) -> None:
    endpoint, bodies = json_only
    with SyncKvRouter(endpoint, block_size=16, model_name="m") as router:
        for _ in range(2):
            assert router.best_worker(TOKENS) == (1, 0, 1)
    kinds = [kind for kind, _ in bodies]
    assert kinds == ["application/msgpack", "application/json", "application/json"]
    local = block_hashes(TOKENS, 16)
    packed = msgspec.msgpack.decode(bodies[0][1])
    assert packed["block_hashes"] == b"".join(h.to_bytes(8, "little") for h in local)
    fields = json.loads(bodies[1][1])
    assert fields["block_hashes"] == signed(local)
    assert fields["sequence_hashes"] == signed(sequence_hashes(local))
    assert {**fields, "block_hashes": 0, "sequence_hashes": 0} == {
        **packed,
        "block_hashes": 0,
        "sequence_hashes": 0,
    }


def test_calls_at_the_same_time_are_all_asked_again(
    json_only: tuple[str, list[tuple[str, bytes]]],
) -> None:
    async def main() -> None:
        async with KvRouter(json_only[0], block_size=16, model_name="m") as router:
            answers = await asyncio.gather(*(router.best_worker(TOKENS) for _ in range(8)))
            assert answers == [(1, 0, 1)] * 8

    asyncio.run(main())


def test_our_service_books_the_same_blocks_either_way() -> None:
    with RunningService("--use-kv-events", "false") as service:
        worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 16}
        assert service.post("/workers", worker)[0] == 201
        with SyncKvRouter(f"http://127.0.0.1:{service.port}", block_size=16) as router:
            router.best_worker(TOKENS, request_id="packed")
            service.post("/select_and_reserve", {"token_ids": TOKENS, "reservation_id": "tokens"})
            (row,) = service.get("/loads")[1][0]["loads"]
            assert (row["active_requests"], row["potential_decode_blocks"]) == (2, 2)
            router.free("packed")
