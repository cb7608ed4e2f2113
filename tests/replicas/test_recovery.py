"""Start-up recovery from scripted peers: which is used, what becomes of its blocks, and when."""

import asyncio
import json
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lean_selector.core.hashing import local_hashes
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier, Watermark
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.events.subscriptions import KvSubscriptions
from lean_selector.http.outbound import OutboundClient
from lean_selector.links.links import Links
from lean_selector.links.names import Resolver
from lean_selector.publisher import KvEventPublisher
from lean_selector.replicas import recovery
from lean_selector.replicas.recovery import Recovery, log_discarded
from tests.support.blocks import matches, remove_blocks, store_blocks
from tests.support.on_loop import inside, on_loop, until
from tests.support.outbound_server import Serve, hangs, response, says, serving
from tests.support.replaying_engine import BLOCK_SIZE as SIZE
from tests.support.replaying_engine import SERVED, Engine
from tests.support.running_service import DEADLINE_S, RunningService, free_port
from tests.support.tuned import TUNED

KEY = ("m", "t")
LONG_S = 3600.0  # never over; a test that waits for it has failed long before
NO_ENGINE = "tcp://127.0.0.1:1"


# -- peers -----------------------------------------------------------------------------------------


@asynccontextmanager
async def peer_that(serve: Serve) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A peer's base URL, and the requests that it got."""
    async with serving(serve) as served:
        yield served.url, served.requests


def dumps(dump: object) -> Serve:
    return says(response(json.dumps(dump).encode()))


def let_share_pass(monkeypatch: pytest.MonkeyPatch, peer: str) -> None:
    """The share of the time of `peer`, which hangs, is over at once."""
    fetched = recovery.fetched

    async def briefly(client: OutboundClient, url: str, left_s: float, *more: Any) -> Any:
        return await fetched(client, url, 0.0 if url.startswith(peer) else left_s, *more)

    monkeypatch.setattr(recovery, "fetched", briefly)


# -- dumps -----------------------------------------------------------------------------------------


def event(data: object, worker_id: int = 1, tier: str = "device", dp_rank: int = 0) -> object:
    inner = {"event_id": 0, "data": data, "dp_rank": dp_rank}
    return {"worker_id": worker_id, "storage_tier": tier, "event": inner}


def stored(*hashes: int, parent: int | None = None, **where: Any) -> object:
    blocks = [{"block_hash": name, "tokens_hash": name + 1000} for name in hashes]
    return event({"stored": {"parent_hash": parent, "blocks": blocks}}, **where)


def dump_of(*events: object, block_size: int = SIZE, **more: Any) -> dict[str, object]:
    more.setdefault("learned", {rank: {} for rank in more.get("watermarks", ())})
    return {"m:t": {"block_size": block_size, "events": list(events), **more}}


def at(seq: int, unknown: int = 0) -> Watermark:
    return Watermark(seq, seq, unknown)


def prompt(*hashes: int) -> bytes:
    return b"".join((name + 1000).to_bytes(8, "little") for name in hashes)


# -- ours ------------------------------------------------------------------------------------------


class Service:
    """A catalog and its subscriptions, without HTTP."""

    def __init__(self) -> None:
        self.subscriptions = KvSubscriptions(Links())
        self.catalog = Catalog(
            RouterSettings(use_kv_events=True),
            self.subscriptions,
            new_partition=lambda key, size, eagle: Partition(*key, size, eagle, KvIndex(size)),
            on_dropped=lambda partition, dropped: None,
            on_discarded=log_discarded,
        )

    def register(
        self,
        worker_id: int = 1,
        block_size: int = SIZE,
        endpoint: str = NO_ENGINE,
        replay_endpoint: str | None = None,
    ) -> None:
        spec = WorkerSpec(
            worker_id=worker_id,
            model_name=KEY[0],
            tenant_id=KEY[1],
            endpoint="http://worker",
            kv_events_endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            block_size=block_size,
        )
        assert not self.catalog.upsert(spec).reasons

    def follow(self, engine: Engine) -> None:
        self.register(endpoint=engine.endpoint, replay_endpoint=engine.replay_endpoint)

    @property
    def partition(self) -> Partition:
        return self.catalog.partitions[KEY]

    @property
    def index(self) -> KvIndex:
        return self.partition.index

    def blocks(self, worker_id: int = 1, tier: Tier = Tier.DEVICE, dp_rank: int = 0) -> int:
        if KEY not in self.catalog.partitions:
            return 0
        return self.index.blocks(worker_id, dp_rank, tier)

    def recovery(self, *peers: str, timeout_s: float = DEADLINE_S) -> Recovery:
        client = OutboundClient(Resolver().resolve)
        return Recovery(self.catalog, self.subscriptions, peers, client, timeout_s)


@asynccontextmanager
async def service() -> AsyncIterator[Service]:
    of = Service()
    try:
        yield of
    finally:
        await of.subscriptions.close()


async def recovered(of: Service, *events: object, **entry: Any) -> Recovery:
    """`of` after recovery from a peer with these events."""
    async with peer_that(dumps(dump_of(*events, **entry))) as (peer, _):
        recovery = of.recovery(peer)
        assert await recovery.run()
        return recovery


# -- which peer ------------------------------------------------------------------------------------


CUT_SHORT = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"
BAD_PEERS = {
    "hangs": hangs,
    "hangs up": says(b""),
    "no http": says(b"\x00\x01\x02 garbage\r\n\r\n"),
    "not found": says(response(b'{"error":"route not found"}', "404 Not Found")),
    "recovers itself": says(response(b'{"error":"recovering"}', "503 Service Unavailable")),
    "redirects": says(response(b"", "302 Found")),
    "garbage": says(response(b"<html>")),
    "cut short": says(CUT_SHORT + b'{"m:t":{"block_size":4,"events":[]}}'),
    "error entry": dumps({"m:t": {"error": "index unavailable"}}),
    "error text": dumps({"error": "index unavailable"}),
    "bad events only": dumps(dump_of({"worker_id": -1}, 7)),
}


@pytest.mark.parametrize("name", BAD_PEERS)
@on_loop
async def test_a_peer_that_cannot_be_used_leaves_it_to_the_next(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        peer_that(BAD_PEERS[name]) as (bad, _),
        peer_that(dumps(dump_of(stored(1, 2)))) as (good, asked),
        peer_that(dumps(dump_of(stored(9)))) as (spare, unasked),
        service() as of,
    ):
        if name == "hangs":
            let_share_pass(monkeypatch, bad)
        peers = ("http://no.such.host.invalid", bad, good + "/base", spare)
        assert await of.recovery(*peers, timeout_s=LONG_S).run()
        assert of.blocks() == 2
        assert asked[0].startswith(b"GET /base/dump?detail=true HTTP/1.1\r\n")
        assert not unasked
        assert f"no recovery from {bad}" in caplog.text


@inside(service)
async def test_without_a_usable_peer_the_index_stays_empty(
    of: Service, caplog: pytest.LogCaptureFixture
) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    assert not await of.recovery(dead, "http://127.0.0.1:bad", "http://").run()
    assert not of.catalog.partitions
    assert "no reachable indexer peer; starting with an empty index" in caplog.text


@on_loop
async def test_peers_that_hang_take_no_longer_than_the_timeout() -> None:
    async with peer_that(hangs) as (one, _), peer_that(hangs) as (two, asked), service() as of:
        async with asyncio.timeout(DEADLINE_S):
            assert not await of.recovery(one, two, timeout_s=0.2).run()
        assert asked


@on_loop
async def test_a_slow_peer_that_keeps_sending_may_use_the_others_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each piece extends its time by a share, up to that of all peers together."""
    body = json.dumps(dump_of(stored(*range(20)))).encode()
    step = -(-len(body) // 20)
    limits = defaultdict[asyncio.Timeout, list[float]](list)
    reschedule = asyncio.Timeout.reschedule

    def noted(limit: asyncio.Timeout, when: float | None) -> None:
        if when is not None:
            limits[limit].append(when)
        reschedule(limit, when)

    def longest() -> list[float]:
        return max(limits.values(), key=len)

    async def trickles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        for at in range(0, len(body), step):
            came = len(longest())
            writer.write(body[at : at + step])
            await until(lambda came=came: len(longest()) > came, "it was taken")  # type: ignore[misc]

    empty = dumps({})
    async with (
        peer_that(trickles) as (slow, _),
        peer_that(empty) as (spare, unasked),
        service() as of,
    ):
        monkeypatch.setattr(asyncio.Timeout, "reschedule", noted)
        began = asyncio.get_running_loop().time()
        assert await of.recovery(slow, *[spare] * 3, timeout_s=LONG_S).run()
        assert of.blocks() == 20
        assert not unasked
    *shares, end = longest()
    assert len(shares) > 20
    assert shares == sorted(shares)
    assert began + LONG_S / 4 - 1 < shares[0] < shares[-1] < began + LONG_S / 2
    assert began + LONG_S - 1 < end < began + LONG_S + DEADLINE_S


@on_loop
async def test_a_dump_beyond_the_limit_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery, "MAX_DUMP_BYTES", 100)
    async with peer_that(dumps(dump_of(stored(1)))) as (peer, _), service() as of:
        assert not await of.recovery(peer).run()
        assert "more than 100 bytes" in caplog.text


@on_loop
async def test_a_recovery_that_is_cancelled_ends_at_once() -> None:
    async with peer_that(hangs) as (peer, asked), service() as of:
        task = asyncio.create_task(of.recovery(peer, timeout_s=3600.0).run())
        await until(lambda: bool(asked), "the peer is asked")
        task.cancel()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({task})
        assert task.cancelled()
        assert of.subscriptions.notes_of_ends == []


# -- what becomes of the blocks --------------------------------------------------------------------


@inside(service)
async def test_blocks_of_all_tiers_and_ranks_wait_for_their_worker(of: Service) -> None:
    await recovered(
        of,
        stored(1, 2),
        stored(3, parent=2, tier="host_pinned"),
        stored(4, parent=3, tier="disk"),
        stored(5, parent=4, tier="external"),
        stored(1, dp_rank=1),
        stored(1, 2, worker_id=8),
    )
    index, was_established = of.index, of.partition.established
    held = matches(of.index, prompt(1, 2, 3, 4, 5, 6))
    assert {rank: (m.device, m.host, m.disk) for rank, m in held.items()} == {
        (1, 0): (2, 1, 2),
        (1, 1): (1, 0, 0),
        (8, 0): (2, 0, 0),
    }
    of.register()
    assert (was_established, of.partition.established) == (False, True)
    assert of.index is index


@inside(service)
async def test_a_child_may_come_before_its_parent_and_one_without_is_counted(of: Service) -> None:
    recovery = await recovered(
        of,
        stored(5, 6, parent=4),
        stored(3, 4, parent=2),
        stored(9, parent=99),
        stored(1, 2),
        stored(1, 1),  # no chain at all
        7,
    )
    assert matches(of.index, prompt(1, 2, 3, 4, 5, 6))[1, 0].device == 6
    assert (recovery.blocks, recovery.skipped_events) == (6, 3)


@pytest.mark.parametrize("registers_first", [False, True])
@inside(service)
async def test_blocks_of_another_size_than_the_workers_are_dropped(
    of: Service, registers_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if registers_first:
        of.register(block_size=8)
    await recovered(of, stored(1, 2), watermarks={"1:0": 5})
    of.register(block_size=8)
    assert of.index.block_size == 8
    assert of.index.is_empty
    assert not of.partition.watermarks
    assert "recovered blocks of model=m tenant=t dropped: block size 2" in caplog.text


@on_loop
async def test_entries_that_name_one_partition_with_two_sizes_keep_the_first() -> None:
    names = {"model_name": "m", "tenant_id": "t"}
    body = {
        "one:t": {"block_size": 4, "events": [stored(1)], **names},
        "two:t": {"block_size": 8, "events": [stored(2, 3)], **names},
    }
    async with peer_that(dumps(body)) as (peer, _), service() as of:
        assert await of.recovery(peer).run()
        assert (of.index.block_size, of.blocks()) == (4, 1)


@inside(service)
async def test_a_worker_that_registered_first_gets_its_blocks_too(of: Service) -> None:
    of.register()
    await recovered(of, stored(1, 2), watermarks={"1:0": 5})
    assert of.blocks() == 2
    assert not of.partition.watermarks  # its source may be behind the dump: it starts afresh


@on_loop
async def test_a_rank_whose_engine_spoke_is_left_alone() -> None:
    with KvEventPublisher(kv_block_size=SIZE, endpoint="tcp://127.0.0.1:*") as engine:
        async with service() as of:
            of.register(endpoint=engine.endpoint)

            def is_heard() -> bool:
                engine.publish_stored(None, [1, 2], None, [77])
                return of.blocks() == 1

            await until(is_heard, "the engine is heard")
            recovery = await recovered(
                of, stored(1, 2), stored(1, 2, worker_id=2), watermarks={"1:0": 0, "2:0": 3}
            )
            assert (of.blocks(1), of.blocks(2)) == (1, 2)
            assert recovery.skipped_ranks == 1
            assert of.partition.watermarks == {(2, 0): at(3)}


@on_loop
async def test_a_worker_removed_meanwhile_gets_no_more_of_its_blocks() -> None:
    events = [stored(block, parent=block - 1 or None) for block in range(1, 20_001)]
    body = dump_of(*events, watermarks={"1:0": 5})
    async with peer_that(dumps(body)) as (peer, _), service() as of:
        of.register(1)
        of.register(2)
        task = asyncio.create_task(of.recovery(peer).run())
        while not of.blocks():  # noqa: ASYNC110 - every turn of the loop counts
            await asyncio.sleep(0)
        assert of.blocks() < 20_000
        of.catalog.remove(1)
        assert await task
        assert of.blocks() == 0
        assert not of.partition.watermarks


# -- watermarks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", [0, 2])
@inside(service)
async def test_a_recovered_rank_asks_only_for_what_came_after_its_watermark(
    of: Service, missed: int
) -> None:
    async with Engine(SERVED) as engine:
        await engine.store(*range(3 + missed))  # nobody listens yet
        await recovered(of, stored(0), stored(1), stored(2), watermarks={"1:0": 2})
        assert of.subscriptions.watermarks(of.partition) == {(1, 0): at(2)}
        of.follow(engine)
        assert not of.partition.watermarks
        assert of.subscriptions.watermarks(of.partition) == {(1, 0): at(2)}
        await engine.subscribed()
        await until(lambda: engine.requests, "it asks for what it missed, if anything")
        last = 2 + missed
        await until(lambda: of.subscriptions.watermarks(of.partition) == {(1, 0): at(last)}, "all")
        await engine.store(last + 1)
        await until(lambda: of.blocks() == last + 2, "and what follows")
        assert engine.asked == [2]


@pytest.mark.parametrize("can_replay", [True, False])
@on_loop
async def test_a_worker_that_registers_meanwhile_is_followed_behind_the_dump(
    can_replay: bool,
) -> None:
    """Its engine cannot tell the first two batches any more, and is idle."""
    body = json.dumps(dump_of(stored(0), stored(1), stored(2), watermarks={"1:0": 2})).encode()
    may_answer = asyncio.Event()

    async def later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        writer.write(response(body))
        await writer.drain()

    async with (
        peer_that(later) as (peer, asked),
        service() as of,
        Engine(SERVED if can_replay else "") as engine,
    ):
        await engine.store(*range(5))
        for _ in range(2):
            engine.buffer.popleft()
        recovering = asyncio.ensure_future(of.recovery(peer).run())
        await until(lambda: asked, "the peer is asked")
        of.follow(engine)
        if not can_replay:
            await engine.subscribed()  # or what it publishes would be lost
        may_answer.set()
        assert await recovering
        if can_replay:
            await engine.subscribed()
            await until(
                lambda: of.subscriptions.statuses()[0].state == "live", "all it tells is heard"
            )
            assert of.blocks() == 5  # the dump, and what came after it
            assert engine.asked == [2]
        else:
            assert of.blocks() == 3


@on_loop
async def test_a_recovery_that_takes_long_does_not_keep_workers_from_being_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "MAX_HOLD_S", 0.0)
    async with peer_that(hangs) as (peer, asked), service() as of, Engine(SERVED) as engine:
        await engine.store(0)
        recovering = asyncio.ensure_future(of.recovery(peer, timeout_s=LONG_S).run())
        await until(lambda: asked, "the peer is asked")
        of.follow(engine)
        await until(lambda: of.blocks() == 1, "what the engine replays")
        recovering.cancel()
        await asyncio.wait({recovering})


@inside(service)
async def test_a_source_with_lost_batches_gives_no_watermark(of: Service) -> None:
    async with Engine() as engine:
        await engine.store(0, 1, 2)
        of.follow(engine)
        await engine.subscribed()
        await engine.store(3)
        await until(lambda: of.blocks() == 1, "the fourth batch is heard")
        # What came before it is unknown, but nothing of what came since is missing.
        assert of.subscriptions.watermarks(of.partition) == {(1, 0): at(3, 3)}
        await engine.store(4, lost=True)
        await engine.store(5)
        await until(lambda: of.blocks() == 2, "the sixth batch is heard")
        assert of.subscriptions.watermarks(of.partition) == {}


@inside(service)
async def test_a_worker_that_goes_takes_its_watermarks_along(of: Service) -> None:
    await recovered(of, stored(1), watermarks={"1:0": 2, "1:5": 3, "2:0": 4})
    of.register(1)
    of.register(3)
    of.catalog.remove(1)
    assert of.subscriptions.watermarks(of.partition) == {(2, 0): at(4)}


# -- without a watermark ---------------------------------------------------------------------------

STALE = 9  # a block that the engine does not have


def as_engine(*blocks: int) -> list[object]:
    """The engine's blocks in a dump."""
    events = []
    for block in blocks:
        local = int.from_bytes(local_hashes([block] * SIZE, SIZE), "little")
        chain = {"parent_hash": None, "blocks": [{"block_hash": block, "tokens_hash": local}]}
        events.append(event({"stored": chain}))
    return events


@pytest.mark.parametrize("learned", [{}, {"1:0": {}}])
@pytest.mark.parametrize("engine_stores", [(), (0, 1, 1, 2)])
@inside(service)
async def test_the_engines_whole_replay_replaces_what_was_recovered(
    of: Service, engine_stores: tuple[int, ...], learned: dict[str, object]
) -> None:
    """No block counts twice for it, and none stays that the engine does not have. A watermark alone
    is not enough: a dump that says no more lacks what was learned of the blocks."""
    async with Engine(SERVED) as engine:
        marks = {} if learned else {"1:0": 3}
        await engine.store(*engine_stores)
        await recovered(of, *as_engine(0, 1, 2, STALE), watermarks=marks, learned=learned)
        assert of.blocks() == 4
        of.follow(engine)
        await engine.subscribed()
        state = "live" if engine_stores else "silent"
        await until(lambda: of.subscriptions.statuses()[0].state == state, "all is replayed")
        assert of.blocks() == len(engine.blocks)
        for block in (*engine_stores, 5):
            await (engine.store(block) if block == 5 else engine.remove(block))
        await until(lambda: of.blocks() == len(engine.blocks) == 1, "what is removed is gone")
        assert engine.asked == [0]


@pytest.mark.parametrize("replays", [SERVED, ""])
@inside(service)
async def test_without_a_whole_replay_the_blocks_stay_until_removed_once(
    of: Service, replays: str
) -> None:
    async with Engine(replays) as engine:
        await engine.store(0, 1, 2)
        engine.buffer.clear()
        await recovered(of, *as_engine(0, 1, STALE), learned={})
        of.follow(engine)
        await engine.subscribed()
        await engine.store(1, 3)
        await engine.remove(1)
        state = "partial" if replays else "no_replay"
        await until(lambda: of.subscriptions.statuses()[0].messages == 3, "all came")
        await until(lambda: of.subscriptions.statuses()[0].state == state, "it is not exact")
        assert of.blocks() == 3  # 3 came, and 1 went at once
        assert of.subscriptions.watermarks(of.partition) == {}


@inside(service)
async def test_copies_of_a_dump_without_a_watermark_do_not_count(of: Service) -> None:
    """Nobody would tell if the engine had dropped one since."""
    (block,) = as_engine(1)
    assert isinstance(block, dict)
    await recovered(of, block | {"learned": {"again": [[1, 1]]}})
    assert remove_blocks(of.index, (1, 0), Tier.DEVICE, [1]) == 1


@inside(service)
async def test_the_first_batch_of_an_engine_drops_what_was_recovered(of: Service) -> None:
    async with Engine() as engine:
        await recovered(of, *as_engine(0, 1, STALE))
        of.follow(engine)
        await engine.subscribed()
        await engine.store(1)
        await until(lambda: of.blocks() == 1, "it has just begun")
        assert of.subscriptions.statuses()[0].state == "live"


@inside(service)
async def test_a_source_whose_events_name_another_rank_says_so_and_gives_no_watermark(
    of: Service,
) -> None:
    with KvEventPublisher(kv_block_size=SIZE, endpoint="tcp://127.0.0.1:*", dp_rank=5) as engine:
        of.register(endpoint=engine.endpoint)

        def is_heard() -> bool:
            engine.publish_stored(None, [1, 2], None, [77])
            return of.blocks(dp_rank=5) == 1

        await until(is_heard, "the engine is heard")
        (source,) = of.subscriptions.statuses()
        assert source.state == "mismatch"
        assert "name rank 5" in (source.problem or "")
        assert of.subscriptions.watermarks(of.partition) == {}
        of.register(endpoint=NO_ENGINE)
        assert of.index.is_empty


@inside(service)
async def test_blocks_of_batches_that_came_during_the_dump_count_once(of: Service) -> None:
    """The peer had applied batch 1 when the dump began, and batch 3 when it ended."""
    async with Engine(SERVED) as engine:
        await engine.store(0, 1, 2, 3)
        learned = {"1:0": {"until": 3}}
        await recovered(of, *as_engine(0, 1, 2), watermarks={"1:0": 1}, learned=learned)
        of.follow(engine)
        await engine.subscribed()
        await engine.store(0)
        await until(lambda: of.subscriptions.watermarks(of.partition) == {(1, 0): at(4)}, "all")
        for block in range(4):
            await engine.remove(block)
        await until(lambda: of.blocks() == 1, "block 0 alone is there twice")
        assert engine.blocks == {0}
        assert engine.asked == [1]


@inside(service)
async def test_what_was_unknown_to_the_peer_is_unknown_here(of: Service) -> None:
    async with Engine(SERVED) as engine:
        await engine.store(0, 1, 2)
        learned = {"1:0": {"unknown": 2, "until": 2}}
        await recovered(of, *as_engine(0), watermarks={"1:0": 1}, learned=learned)
        of.follow(engine)
        await engine.subscribed()
        mark = Watermark(2, 2, 2)
        await until(lambda: of.subscriptions.watermarks(of.partition) == {(1, 0): mark}, "all")
        assert of.subscriptions.statuses()[0].state == "partial"


# -- the process -----------------------------------------------------------------------------------


def test_while_it_recovers_the_service_is_up_and_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        peer = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        with RunningService("--indexer-peers", peer, module=TUNED) as running:
            status, body = running.get("/ready")
            assert (status, body["recovering"]) == (503, True)
            assert running.get("/dump")[0] == 503
            worker = {
                "worker_id": 1,
                "endpoint": "http://worker",
                "block_size": 4,
                "kv_events_endpoint": NO_ENGINE,
            }
            assert running.post("/workers", worker)[0] == 201
            status, body = running.get("/ready")
            assert (status, body["recovering"]) == (200, True)
            began = time.monotonic()
            status, _ = running.stop()
            assert status == 0
            assert time.monotonic() - began < DEADLINE_S


@inside(service)
async def test_blocks_of_workers_that_never_register_are_forgotten_after_a_while(
    of: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    marks = {"1:0": 5, "8:0": 6, "9:0": 7}
    recovery = await recovered(
        of, stored(1, 2), stored(1, 2, worker_id=8), stored(3, worker_id=8), watermarks=marks
    )
    of.register()
    store_blocks(
        of.index, (1, 5), Tier.DEVICE, None, [1], prompt(1)
    )  # a rank that its worker does not have
    await recovery.forget_unclaimed(0.0)
    assert of.index.ranks() == [(1, 0)]
    assert of.blocks() == 2
    assert [run.worker_id for runs in of.index.dump() for run in runs] == [1]
    assert not of.partition.watermarks  # one that came now would not go on behind nothing
    assert "dropped 3 recovered blocks of 2 workers that did not register in 0 s" in caplog.text


@inside(service)
async def test_a_partition_that_waited_for_workers_in_vain_is_forgotten(of: Service) -> None:
    recovery = await recovered(of, stored(1, 2), watermarks={"1:0": 5})
    await recovery.forget_unclaimed(0.0)
    assert not of.catalog.partitions
    of.register(block_size=8)
    assert of.index.block_size == 8
