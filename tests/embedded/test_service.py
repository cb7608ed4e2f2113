"""SelectionService: what a selector inside another program must take care of besides."""

import asyncio
import contextlib
import gc
import os
import socket
import weakref
from typing import Any

import pytest

from lean_selector import SelectionService, SelectionServiceError
from lean_selector.embedded.dialect import SelectionCacheConfig
from lean_selector.publisher import KvEventPublisher
from tests.embedded.services import FIRST, SECOND, ask, in_process, printed_by, rows, shows, worker
from tests.support.on_loop import on_loop, until
from tests.support.running_service import RunningService, free_port, wait_until


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DYN_")]:
        monkeypatch.delenv(name)


Cache = SelectionCacheConfig


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "named"),
    [
        ({"replica_sync_peers": ["tcp://h:1"]}, ValueError, "replica_sync_peers"),
        ({"replica_sync_port": 0}, ValueError, "replica_sync_port"),
        ({"indexer_threads": -1}, ValueError, "^indexer_threads: "),
        ({"indexer_peers": ["elsewhere"]}, ValueError, "indexer_peers"),
        ({"session_affinity_ttl_secs": 0.5}, ValueError, "session_affinity_ttl_secs"),
        ({"selection_cache": Cache(ttl_secs=-1)}, ValueError, r"^selection_cache\.ttl_secs: "),
        ({"selection_cache": Cache(max_entries=-1)}, ValueError, r"\.max_entries: .* `-1`"),
        ({"selection_cache": Cache(max_bytes=-1)}, ValueError, r"\.max_bytes: .* `-1`"),
        ({"indexer_peers": "http://h"}, TypeError, "^indexer_peers: .* str$"),
        ({"indexer_peers": ["http://h", 5]}, TypeError, r"^indexer_peers\[1\]: .* int$"),
        (
            {"replica_sync_peers": "tcp://h:1", "replica_sync_port": 9},
            *(TypeError, "^replica_sync_peers: .* str$"),
        ),
        ({"selection_cache": {}}, TypeError, "^selection_cache: .* dict$"),
        ({"replica_sync_port": True}, ValueError, "^replica_sync_port: "),
    ],
)
def test_a_bad_argument_is_named(
    arguments: dict[str, Any], kind: type[Exception], named: str
) -> None:
    with pytest.raises(kind, match=named):
        SelectionService(**arguments)


@pytest.mark.parametrize("peers", ["http://h", None, [5]])
@in_process
async def test_so_are_peers_to_recover_from(service: SelectionService, peers: Any) -> None:
    with pytest.raises(TypeError, match="peers"):
        await service.recover_indexer_from_peers(peers)


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ROUTER_TEMPERATURE", "warm")
    with pytest.raises(ValueError, match="DYN_ROUTER_TEMPERATURE"):
        SelectionService()


@pytest.fixture
def _no_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ROUTER_TRACK_PREFILL_TOKENS", "false")


@pytest.mark.usefixtures("_no_prefill")
@in_process
async def test_router_settings_come_from_the_environment(service: SelectionService) -> None:
    await service.upsert_worker(worker())
    selection = await service.select_and_reserve(ask("a"))
    assert selection["track_prefill_tokens"] is False
    assert rows(service)[FIRST][0] == 0


@on_loop
async def test_a_selection_cache_of_no_entries_keeps_nothing() -> None:
    service = SelectionService(selection_cache=Cache(max_entries=0))
    await service.upsert_worker(worker())
    await service.select(ask("kept"))
    with pytest.raises(SelectionServiceError) as caught:
        await service.create_reservation({"selection_id": "kept"})
    assert caught.value.status_code == 404
    await service.shutdown_async()


# What Python's values can say and JSON cannot: lone surrogates, and floats that are no number.
@pytest.mark.parametrize(
    ("method", "field", "value"),
    [
        ("upsert_worker", "model_name", "\ud800"),
        ("upsert_worker", "taints", ["good", "\ud800"]),
        ("upsert_worker", "kv_events_endpoints", {0: "tcp://\ud800:1"}),
        ("upsert_worker", "kv_transfer_preferred_weight", float("nan")),
        ("select_and_reserve", "selection_id", "\ud800"),
        ("select_and_reserve", "routing_constraints", {"required_taints": ["\udfff"]}),
        *(
            ("select_and_reserve", "priority_jump", value)
            for value in (float("nan"), float("inf"), -float("inf"))
        ),
    ],
)
@in_process
async def test_what_json_cannot_say_is_refused_before_anything_is_changed(
    service: SelectionService, method: str, field: str, value: object
) -> None:
    await service.upsert_worker(worker())
    given = worker(SECOND) if method == "upsert_worker" else ask("a")
    with pytest.raises(ValueError, match=field):
        await getattr(service, method)({**given, field: value})
    assert rows(service) == {FIRST: (0, 0, 0)}


# -- waiting ---------------------------------------------------------------------------------------


@pytest.fixture
def _queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_ROUTER_QUEUE_THRESHOLD", "0.001")


def pending(service: SelectionService) -> int:
    return sum(int(partition["pending_count"]) for partition in service.loads())


async def one_waits(service: SelectionService, *names: str) -> list[asyncio.Task[Any]]:
    """A worker that is busy with `first`, and bookings that wait for it."""
    await service.upsert_worker(worker())
    await service.select_and_reserve(ask("first"))
    waiting = [asyncio.create_task(service.select_and_reserve(ask(name))) for name in names]
    await until(lambda: pending(service) == len(names))
    return waiting


@pytest.mark.usefixtures("_queue")
@in_process
async def test_who_waits_is_let_go_by_a_free(service: SelectionService) -> None:
    (waiting,) = await one_waits(service, "second")
    await service.free_reservation("first")
    assert (await waiting)["selection_id"] == "second"


@pytest.mark.usefixtures("_queue")
@pytest.mark.parametrize("is_freed_first", [True, False])
@in_process
async def test_who_is_cancelled_as_it_is_let_go_leaves_no_booking(
    service: SelectionService, is_freed_first: bool
) -> None:
    (waiting,) = await one_waits(service, "second")
    freeing = service.free_reservation("first")
    if is_freed_first:
        await freeing
        waiting.cancel()
    else:
        waiting.cancel()
        await freeing
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert rows(service) == {FIRST: (0, 0, 0)}
    assert pending(service) == 0


@pytest.mark.usefixtures("_queue")
@in_process
async def test_shutdown_refuses_those_who_wait(service: SelectionService) -> None:
    waiting = await one_waits(service, "second", "third")
    service.shutdown()
    for each in waiting:
        with pytest.raises(SelectionServiceError) as caught:
            await each
        assert caught.value.status_code == 503


# -- the loop and the process ----------------------------------------------------------------------


def test_it_is_made_before_there_is_a_loop_and_starts_on_the_first() -> None:
    service = SelectionService()
    assert service.ready() == {"ready": False, "schedulable_workers": 0, "workers": []}
    assert [service.list_workers(), service.loads(), service.list_replica_peers()] == [[], [], []]
    with pytest.raises(SelectionServiceError):
        service.add_output_block("never")

    async def story() -> None:
        await service.upsert_worker(worker())
        assert service.ready()["ready"] is True
        await service.shutdown_async()

    asyncio.run(story())


@pytest.mark.usefixtures("_queue")
@pytest.mark.parametrize("is_answered", [True, False])
@in_process
async def test_who_is_cancelled_on_another_loop_leaves_no_booking(
    service: SelectionService, is_answered: bool
) -> None:
    """While it waits, and when the answer is on its way to its loop."""

    async def elsewhere() -> None:
        asking = asyncio.create_task(service.select_and_reserve(ask("second")))
        await asyncio.sleep(0)
        while not (rows(service)[FIRST][2] if is_answered else pending(service)):
            pass  # this loop does nothing else meanwhile
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    await one_waits(service)
    if is_answered:
        await service.free_reservation("first")
    await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
    if not is_answered:
        await service.free_reservation("first")
    await until(lambda: rows(service) == {FIRST: (0, 0, 0)})
    assert pending(service) == 0


def test_a_loop_that_ended_is_not_replaced_by_another() -> None:
    service = SelectionService()

    async def first() -> None:
        await service.upsert_worker(worker())

    async def second() -> None:
        with pytest.raises(RuntimeError, match="has stopped"):
            await service.select(ask())

    asyncio.run(first())
    asyncio.run(second())
    assert rows(service) == {FIRST: (0, 0, 0)}  # what does not wait needs no loop
    service.shutdown()


@on_loop
async def test_after_shutdown_what_is_booked_can_still_be_seen_and_freed() -> None:
    service = SelectionService(replica_sync_port=free_port())
    await service.upsert_worker(worker())
    await service.select_and_reserve(ask("a"))
    await service.shutdown_async()
    assert rows(service) == {FIRST: (10, 2, 1)}
    await service.prefill_complete("a")
    await service.free_reservation("a")
    assert rows(service) == {FIRST: (0, 0, 0)}
    await service.delete_worker(FIRST)
    assert service.list_workers() == []


@on_loop
async def test_what_is_dropped_is_stopped() -> None:
    port = free_port()
    # Not while the service is made: an error in it would keep the frames that it passed.
    gc.collect()
    service = SelectionService(replica_sync_port=port)
    gone = weakref.ref(service)
    del service
    gc.collect()
    assert gone() is None

    successors = []

    def is_free() -> bool:
        with contextlib.suppress(OSError):
            successors.append(SelectionService(replica_sync_port=port))
        return bool(successors)

    await until(is_free, "the port of the dropped service is free")
    await successors[0].shutdown_async()


@on_loop
async def test_a_taken_replica_port_is_an_error_of_the_constructor() -> None:
    port = free_port()
    first = SelectionService(replica_sync_port=port)
    with pytest.raises(OSError, match=str(port)):
        SelectionService(replica_sync_port=port)
    await first.shutdown_async()
    await SelectionService(replica_sync_port=port).shutdown_async()  # it is free again


@pytest.mark.parametrize("ending", ["pass", "await service.shutdown_async()", "sys.exit(0)"])
def test_a_program_ends_when_it_ends_whatever_became_of_the_service(ending: str) -> None:
    program = f"""
import asyncio, sys
from lean_selector import SelectionService
async def main():
    service = SelectionService(replica_sync_port={free_port()})
    await service.upsert_worker({worker()!r})
    await service.select_and_reserve({ask("a")!r})
    await asyncio.sleep(0.05)
    {ending}
asyncio.run(main())
"""
    assert printed_by(program) == ""


@pytest.mark.parametrize(
    "end", ["loop.close()", "service.me = service, loop; loop.close()", "pass"]
)
def test_a_loop_that_leaves_its_tasks_behind_hangs_no_collection(end: str) -> None:
    program = f"""
import asyncio, gc
from lean_selector import KvEventPublisher, SelectionService
engines = [KvEventPublisher(kv_block_size=4, endpoint="tcp://127.0.0.1:*") for _ in range(4)]
def one(pause):
    async def main():
        service = SelectionService()
        for number, engine in enumerate(engines):
            named = {{"worker_id": number, "replay_endpoint": engine.endpoint}}
            heard = {{"kv_events_endpoints": {{0: engine.endpoint}}}}
            await service.upsert_worker({worker()!r} | named | heard)
        await asyncio.sleep(pause)
        return service
    loop = asyncio.new_event_loop()
    service = loop.run_until_complete(main())
    {end}
for pause in (0, 0.05) * 5:
    one(pause)
    gc.collect()
print("collected")
"""
    assert printed_by(program, is_silent=False) == "collected"


@pytest.mark.parametrize("ending", ["service.shutdown()", "del service"])
@pytest.mark.parametrize("moment", ["none is begun", "all shake hands", "all are there"])
def test_a_loop_that_ends_takes_any_number_of_connections_along(moment: str, ending: str) -> None:
    """More than have their turn to be closed before it has ended."""
    program = """
import asyncio, gc, os, sys
from lean_selector import SelectionService
def descriptors():
    return set(os.listdir("/proc/self/fd"))
async def main():
    service = SelectionService(replica_sync_port=int(sys.argv[2]))
    for number in range(COUNT):
        described = {**WORKER, "worker_id": number, "kv_events_endpoints": {0: sys.argv[1]}}
        await service.upsert_worker(described)
    statuses = service._running.parts.core.subscriptions.statuses
    while not MOMENT:
        await asyncio.sleep(0.01)
    del statuses
    ENDING
before = descriptors()
asyncio.run(main())
gc.collect()
print(descriptors() - before)
"""
    moments = {
        "none is begun": "True",
        "all shake hands": "len(descriptors()) > 3 * COUNT",  # each with its monitor
        "all are there": "all(source.connection == 'connected' for source in statuses())",
    }
    for name, said in {
        "MOMENT": moments[moment],
        "ENDING": ending,
        "WORKER": repr(worker()),
    }.items():
        program = program.replace(name, said)
    with contextlib.ExitStack() as stack:
        if moment == "all are there":
            port = free_port()
            publisher = KvEventPublisher(kv_block_size=4, endpoint=f"tcp://127.0.0.1:{port}")
            stack.callback(publisher.close)
        else:
            silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1_000))
            port = silent.getsockname()[1]
        program = program.replace("COUNT", "200")
        assert printed_by(program, f"tcp://127.0.0.1:{port}", str(free_port())) == "set()"


# -- beside others ---------------------------------------------------------------------------------


@on_loop
async def test_two_in_one_process_and_a_service_share_their_loads() -> None:
    ports = [free_port() for _ in range(3)]
    endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
    first = SelectionService(replica_sync_port=ports[0], replica_sync_peers=[endpoints[1]])
    second = SelectionService(replica_sync_port=ports[1])
    flags = ("--replica-sync-port", str(ports[2]), "--replica-sync-peers", endpoints[0])

    async def hears(service: SelectionService, other: SelectionService) -> None:
        """Once a booking of the other shows, the connection is there."""
        shown = 0
        while not shown:
            name = (await other.select_and_reserve(ask()))["selection_id"]
            await asyncio.sleep(0.05)
            shown = rows(service)[FIRST][2]
            await other.free_reservation(name)

    with RunningService(*flags) as third:
        try:
            assert await second.register_replica_peer(endpoints[0]) is True
            assert await second.register_replica_peer(endpoints[0]) is False
            assert await first.register_replica_peer(endpoints[2]) is True
            assert first.list_replica_peers() == sorted(endpoints[1:])
            for service in (first, second):
                await service.upsert_worker(worker())
            described = {**worker(), "kv_events_endpoints": {"0": "tcp://h:1"}}
            await asyncio.to_thread(third.post, "/workers", described)
            await hears(second, first)
            await hears(first, second)
            await shows(first, {FIRST: (0, 0, 0)})
            await shows(second, {FIRST: (0, 0, 0)})
            await first.select_and_reserve(ask("shared"))
            await shows(second, {FIRST: (10, 2, 1)})
            await second.free_reservation("shared")
            await shows(first, {FIRST: (0, 0, 0)})
            assert await second.deregister_replica_peer(endpoints[0]) is True
            assert await second.deregister_replica_peer(endpoints[0]) is False
        finally:
            await first.shutdown_async()
            await second.shutdown_async()


@on_loop
async def test_an_index_is_recovered_from_a_peer_that_serves_one() -> None:
    engine = KvEventPublisher(kv_block_size=4, endpoint="tcp://127.0.0.1:0")
    with engine as publisher, RunningService() as peer:
        described = {**worker(SECOND), "kv_events_endpoints": {"0": publisher.endpoint}}
        assert peer.post("/workers", described)[0] == 201

        def is_indexed() -> bool:
            publisher.publish_stored(
                token_ids=list(range(8)), num_block_tokens=[4, 4], block_hashes=[1, 2]
            )
            return bool(peer.get("/dump")[1]["default:default"]["events"])

        wait_until(is_indexed, "the peer has the blocks")
        service = SelectionService()
        url = f"http://127.0.0.1:{peer.port}"
        assert await service.recover_indexer_from_peers([url]) is True
        await service.upsert_worker(worker(SECOND))
        scores = await service.overlap_scores({"token_ids": list(range(8))})
        assert [row["device_blocks"] for row in scores["workers"]] == [2]
        await service.shutdown_async()
