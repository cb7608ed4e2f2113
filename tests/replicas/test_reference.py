"""Replica sync with the reference services as peers, where our side must be seen from within.

What each service shows of the others' requests is in tests/interop/test_replica_mesh.py.
"""

import asyncio
import contextlib
import itertools
import random
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq.asyncio

from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import ReplicaApplier, ReplicaEvents, Verdict
from lean_selector.core.replication.shapes import ReplicaEvent
from lean_selector.replicas.mesh import ReplicaSync
from tests.support.bookings import book
from tests.support.on_loop import on_loop, until
from tests.support.replica_member import HASHES, IDLE, TOKENS, Member
from tests.support.running_service import free_port

pytestmark = pytest.mark.reference

PROMPT = struct.pack("<3q", *HASHES)


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


@contextlib.asynccontextmanager
async def pair(python: Path, kind: str) -> AsyncIterator[tuple[Ours, Member]]:
    """One of ours and one reference that hear each other and know worker 7."""
    sync_port = free_port()
    context = zmq.asyncio.Context()
    ours = Ours(context, f"tcp://127.0.0.1:{sync_port}")
    peers = [ours.sync.bound_endpoint]
    reference = Member(kind, python=python, peers=peers, sync_port=sync_port, log_level="warn")
    try:
        with reference:
            reference.register()
            await meet(ours, reference)
            yield ours, reference
    finally:
        await ours.sync.close()
        context.term()


async def meet(ours: Ours, reference: Member) -> None:
    """Wait until each hears the other; leave no load behind."""
    numbers = itertools.count()

    def hears_us() -> bool:
        ours.add(f"ours-{next(numbers)}", 0)
        loads = reference.loads()  # none until it has taken in what was registered
        return bool(loads) and any(loads[0])

    def is_heard() -> bool:
        name = f"theirs-{next(numbers)}"
        reference.add(name, 1)
        reference.free(name)
        return bool(ours.heard)

    await until(hears_us)
    await until(is_heard)
    for request_id in list(ours.slots.reservations):
        freed = ours.slots.free(request_id)
        assert freed is not None
        ours.events.freed(ours, freed)
    await until(lambda: reference.loads() == ours.loads() == IDLE)


@pytest.mark.parametrize("kind", ["tracker", "selector"])
@pytest.mark.parametrize("version", ["131", "161"])
@on_loop
async def test_a_reference_applies_numbered_events_and_says_nothing_of_heartbeats(
    version: str, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    python: Path = request.getfixturevalue(f"reference_{version}")
    monkeypatch.setattr("lean_selector.replicas.mesh.HEARTBEAT_S", 0.001)
    async with pair(python, kind) as (ours, reference):
        before = ours.sync.sequence
        for n in range(50):
            ours.add(f"r{n}", n % 2)
            await asyncio.sleep(0.001)  # so that heartbeats come between
        booked = (25 * TOKENS, len(HASHES))
        await until(lambda: reference.loads() == [booked, booked])
        assert ours.sync.sequence == before + 50
        assert ours.sync.undecodable == 0
        counts = [sum(of_kind) for of_kind in zip(*ours.applier.counts, strict=True)]
        assert counts[Verdict.OWN] == counts[Verdict.WORKER_MISMATCH] == 0
        said = reference.log().splitlines()
    assert [line for line in said if "Adding worker" not in line] == []


@on_loop
async def test_a_pipelining_1_3_peer_that_reorders_leaves_no_load_here(reference_131: Path) -> None:
    async with pair(reference_131, "tracker") as (ours, reference):
        requests = 200
        reader, writer = await asyncio.open_connection("127.0.0.1", reference.port)
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
        await until(lambda: sum(name.startswith("p") for name in ours.heard) == 3 * requests)
        assert ours.loads() == [(0, 0), (0, 0)]
        assert not ours.slots.reservations
