"""How a prompt and a booking's id travel to services that speak otherwise than ours does."""

import asyncio
import json

import msgspec

from lean_selector import KvRouter, block_hashes, sequence_hashes
from tests.support.on_loop import on_loop
from tests.support.outbound_server import response, serving
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


def signed(hashes: list[int]) -> list[int]:
    return [value - 2**64 if value >= 2**63 else value for value in hashes]


def kind_and_body(request: bytes) -> tuple[str, bytes]:
    head, _, body = request.partition(b"\r\n\r\n")
    return head.lower().split(b"content-type: ")[1].split(b"\r\n")[0].decode(), body


async def asked(batches: int, at_once: int) -> list[tuple[str, bytes]]:
    """What a service gets that takes JSON alone, as the reference does: other bodies are 415."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind, _body = kind_and_body(served.requests[-1])
        status = "200 OK" if kind == "application/json" else "415 No"
        writer.write(response(json.dumps(ANSWER).encode(), status, "connection: close\r\n"))

    async with serving(serve) as served:
        async with KvRouter(served.url, 16, model_name="m") as router:
            for _ in range(batches):
                found = await asyncio.gather(*(router.best_worker(TOKENS) for _ in range(at_once)))
                assert set(found) == {(1, 0, 1)}
        return [kind_and_body(request) for request in served.requests]


@on_loop
async def test_a_service_that_takes_json_only_is_asked_again_once_and_then_in_json() -> None:
    bodies = await asked(2, 1)
    kinds = [kind for kind, _ in bodies]
    assert kinds == ["application/msgpack", "application/json", "application/json"]
    local = block_hashes(TOKENS, 16)
    packed, fields = msgspec.msgpack.decode(bodies[0][1]), json.loads(bodies[1][1])
    assert packed.pop("block_hashes") == b"".join(h.to_bytes(8, "little") for h in local)
    assert fields.pop("block_hashes") == signed(local)
    assert fields.pop("sequence_hashes") == signed(sequence_hashes(local))
    packed.pop("sequence_hashes")
    assert fields == packed


@on_loop
async def test_calls_at_the_same_time_are_all_asked_again() -> None:
    await asked(1, 8)


@on_loop
async def test_what_the_client_books_of_a_1_6_selector_it_can_free() -> None:
    with RunningService("--api", "1.6", "--use-kv-events=off") as service:
        service.post("/workers", {"worker_id": 1, "endpoint": "http://w", "block_size": 4})
        async with KvRouter(f"http://127.0.0.1:{service.port}", block_size=4) as router:
            assert await router.best_worker(TOKENS, request_id="mine") == (1, 0, 0)
            assert service.active() == 1
            await router.mark_prefill_complete("mine")
            await router.free("mine")
        assert service.active() == 0
