"""Replica sync with the reference services as peers, in both directions."""

import asyncio
import contextlib
import os
import random
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import zmq.asyncio

from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import ReplicaApplier, ReplicaEvents, Verdict
from lean_selector.core.replication.shapes import ReplicaEvent
from lean_selector.replicas.mesh import ReplicaSync
from tests.support.bookings import book
from tests.support.on_loop import on_loop
from tests.support.running_service import free_port

pytestmark = pytest.mark.reference

DEADLINE_S = 30.0
HASHES = [101, -22, 303]
PROMPT = struct.pack("<3q", *HASHES)


async def until(seen: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await seen():  # noqa: ASYNC110 - what is waited for has no event to set
            await asyncio.sleep(0.02)


class Ours:
    """A replica of ours that holds the same worker as the reference."""

    model_name, tenant_id, block_size = "llama", "t1", 16

    def __init__(self, context: zmq.asyncio.Context, peer: str) -> None:
        router_id = random.getrandbits(64) | 1
        self.slots = Slots()
        self.slots.add_rank(7, 0)
        self.slots.add_rank(7, 1)
        self.applier = ReplicaApplier(router_id, lambda *scope: self if scope == SCOPE else None)
        self.heard: list[str] = []  # request ids
        self.sync = ReplicaSync(
            context, "tcp://127.0.0.1:*", [peer], self.hear, router_id=router_id
        )
        self.events = ReplicaEvents(router_id, self.sync.publish)
        self.sync.start()

    def hear(self, event: ReplicaEvent, now: float) -> Verdict:
        self.heard.append(event.booking.request_id)
        return self.applier.apply(event, now)

    def loads(self) -> list[tuple[int, int]]:
        return [
            (rank.active_prefill_tokens, rank.active_decode_blocks)
            for _key, rank in sorted(self.slots.ranks.items())
        ]

    def add(self, request_id: str, dp_rank: int) -> None:
        reservation = book(self.slots, request_id, 7, dp_rank, PROMPT, 48, 0.0)
        self.events.booked(self, reservation, PROMPT)


SCOPE = (Ours.model_name, Ours.tenant_id)


class Reference:
    """A running reference service, as its HTTP clients see it."""

    def __init__(self, client: httpx.AsyncClient, service: str) -> None:
        self.client = client
        self.service = service

    async def post(self, path: str, **body: object) -> None:
        answer = await self.client.post(
            path, json={"model_name": "llama", "tenant_id": "t1", "routing_group": "t1", **body}
        )
        assert answer.is_success, answer.text

    async def register(self) -> None:
        if self.service == "slot_tracker":
            await self.post("/register", worker_id=7, block_size=16, dp_start=0, dp_size=2)
        else:
            await self.post(
                "/workers",
                worker_id=7,
                endpoint="http://worker:8000",
                block_size=16,
                data_parallel_start_rank=0,
                data_parallel_size=2,
                max_num_batched_tokens=8192,
                total_kv_blocks=1000,
                kv_events_endpoints={"0": "tcp://127.0.0.1:1", "1": "tcp://127.0.0.1:1"},
            )

    async def add(self, request_id: str, dp_rank: int) -> None:
        where = {"worker_id": 7, "dp_rank": dp_rank, "sequence_hashes": HASHES}
        if self.service == "slot_tracker":
            await self.post("/add", request_id=request_id, new_isl_tokens=48, **where)
        else:
            await self.post(
                "/reservations",
                reservation_id=request_id,
                selection_id=request_id,
                isl_tokens=48,
                effective_prefill_tokens=48,
                **where,
            )

    async def complete(self, request_id: str) -> None:
        if self.service == "slot_tracker":
            await self.post("/prefill_complete", request_id=request_id)
        else:
            await self.post(f"/reservations/{request_id}/prefill_complete")

    async def free(self, request_id: str) -> None:
        if self.service == "slot_tracker":
            await self.post("/free", request_id=request_id)
        else:
            answer = await self.client.delete(f"/reservations/{request_id}")
            assert answer.is_success

    async def loads(self) -> list[tuple[int, int]]:
        rows: list[dict[str, Any]] = (await self.client.get("/loads")).json()
        if rows and "loads" in rows[0]:
            rows = rows[0]["loads"]
        kind = "active" if self.service == "slot_tracker" else "potential"
        return [
            (row[f"{kind}_prefill_tokens"], row[f"{kind}_decode_blocks"])
            for row in sorted(rows, key=lambda row: int(row["dp_rank"]))
        ]


@contextlib.asynccontextmanager
async def pair(
    python: Path, service: str, log: IO[bytes] | None = None
) -> AsyncIterator[tuple[Ours, Reference]]:
    """One of ours and one reference that hear each other and know worker 7.

    The reference's warnings and worse go to `log`.
    """
    port, sync_port = free_port(), free_port()
    context = zmq.asyncio.Context()
    ours = Ours(context, f"tcp://127.0.0.1:{sync_port}")
    flags = {
        "--port": str(port),
        "--replica-sync-port": str(sync_port),
        "--replica-sync-peers": ours.sync.bound_endpoint,
    }
    command = [str(python), "-m", f"dynamo.{service}", *(part for f in flags.items() for part in f)]
    process = subprocess.Popen(  # noqa: ASYNC220 - starting it does not wait
        command,
        env={**os.environ, "DYN_LOG": "error" if log is None else "warn"},
        stdout=log,
        stderr=log,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            reference = Reference(client, service)

            async def is_up() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get("/health")).is_success
                return False

            await until(is_up)
            await reference.register()
            await meet(ours, reference)
            yield ours, reference
    finally:
        process.kill()
        process.wait()
        await ours.sync.close()
        context.term()


async def meet(ours: Ours, reference: Reference) -> None:
    """Wait until each hears the other; leave no load behind."""
    n = 0

    async def hears_us() -> bool:
        nonlocal n
        n += 1
        ours.add(f"ours-{n}", 0)
        loads = await reference.loads()  # none until it has taken in what was registered
        return bool(loads) and any(loads[0])

    async def is_heard() -> bool:
        nonlocal n
        n += 1
        await reference.add(f"theirs-{n}", 1)
        await reference.free(f"theirs-{n}")
        return bool(ours.heard)

    await until(hears_us)
    await until(is_heard)
    for request_id in list(ours.slots.reservations):
        freed = ours.slots.free(request_id)
        assert freed is not None
        ours.events.freed(ours, freed)

    async def idle() -> bool:
        return await reference.loads() == ours.loads() == [(0, 0), (0, 0)]

    await until(idle)


@pytest.mark.parametrize("service", ["slot_tracker", "select_service"])
@pytest.mark.parametrize("version", ["131", "161"])
@on_loop
async def test_requests_admitted_on_either_side_load_both_and_end_on_both(
    version: str, service: str, request: pytest.FixtureRequest
) -> None:
    python: Path = request.getfixturevalue(f"reference_{version}")
    async with pair(python, service) as (ours, reference):

        async def both(*loads: tuple[int, int]) -> None:
            async def equal() -> bool:
                return await reference.loads() == ours.loads() == list(loads)

            await until(equal)

        ours.add("a", 1)
        await both((0, 0), (48, 3))
        completed = ours.slots.prefill_complete("a", 0.0)
        assert completed is not None
        ours.events.prefill_completed(ours, completed[0])
        await both((0, 0), (0, 3))
        await reference.add("b", 0)
        await both((48, 3), (0, 3))
        await reference.complete("b")
        await both((0, 3), (0, 3))
        await reference.free("a")  # what we admitted
        await both((0, 3), (0, 0))
        freed = ours.slots.free("b")  # what it admitted
        assert freed is not None
        ours.events.freed(ours, freed)
        await both((0, 0), (0, 0))
        assert ours.sync.undecodable == 0
        counts = [sum(of_kind) for of_kind in zip(*ours.applier.counts, strict=True)]
        assert counts[Verdict.OWN] == counts[Verdict.WORKER_MISMATCH] == 0


@pytest.mark.parametrize("service", ["slot_tracker", "select_service"])
@pytest.mark.parametrize("version", ["131", "161"])
@on_loop
async def test_a_reference_applies_numbered_events_and_says_nothing_of_heartbeats(
    version: str,
    service: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    python: Path = request.getfixturevalue(f"reference_{version}")
    monkeypatch.setattr("lean_selector.replicas.mesh.HEARTBEAT_S", 0.001)
    with (tmp_path / "log").open("wb") as log:
        async with pair(python, service, log) as (ours, reference):
            before = ours.sync.sequence
            for n in range(50):
                ours.add(f"r{n}", n % 2)
                await asyncio.sleep(0.001)  # so that heartbeats come between

            async def all_booked() -> bool:
                return await reference.loads() == [(25 * 48, 3), (25 * 48, 3)]

            await until(all_booked)
            assert ours.sync.sequence == before + 50
    said = (tmp_path / "log").read_text().splitlines()
    assert [line for line in said if "Adding worker" not in line] == []


@on_loop
async def test_a_pipelining_1_3_peer_that_reorders_leaves_no_load_here(reference_131: Path) -> None:
    async with pair(reference_131, "slot_tracker") as (ours, reference):
        requests = 200
        port = reference.client.base_url.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for n in range(requests):
            scope = f'"model_name":"llama","tenant_id":"t1","request_id":"p{n}"'
            add = f'{{{scope},"worker_id":7,"dp_rank":0,"sequence_hashes":[{n}]}}'
            for path, body in (
                ("add", add),
                ("prefill_complete", f"{{{scope}}}"),
                ("free", f"{{{scope}}}"),
            ):
                writer.write(
                    f"POST /{path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(body)}\r\n\r\n{body}".encode()
                )
        for _ in range(3 * requests):
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
            await reader.readexactly(int(length))
        writer.close()

        async def all_heard() -> bool:
            return sum(heard.startswith("p") for heard in ours.heard) == 3 * requests

        await until(all_heard)
        assert ours.loads() == [(0, 0), (0, 0)]
        assert not ours.slots.reservations
