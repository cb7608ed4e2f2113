"""RemoteSelectionService: what only a selector behind a network can do to its caller."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from lean_selector import RemoteSelectionService, SelectionServiceError
from lean_selector.inprocess import remote
from tests.inprocess.services import FIRST, ask, rows, shows, worker
from tests.support.on_loop import on_loop, until
from tests.support.running_service import RunningService, free_port


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a service with the flags that the test is parametrized with."""
    with RunningService(*getattr(request, "param", ())) as running:
        yield f"http://127.0.0.1:{running.port}"


def pending(service: RemoteSelectionService) -> int:
    return sum(int(partition["pending_count"]) for partition in service.loads())


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        *((each, ValueError) for each in ("localhost:8092", "unix:", "tcp://h:1")),
        *((each, TypeError) for each in (None, 5, b"http://h")),
    ],
)
def test_a_url_of_another_kind_is_refused(bad: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="unix"):
        RemoteSelectionService(bad)


@on_loop
async def test_nobody_there_is_said_so() -> None:
    service = RemoteSelectionService(f"http://127.0.0.1:{free_port()}")
    asked: list[Any] = [service.select(ask()), service.select_and_reserve(ask("a"))]
    for each in asked:
        with pytest.raises(SelectionServiceError) as caught:
            await each
        assert (caught.value.status_code, caught.value.kind) == (503, "unreachable")
    with pytest.raises(SelectionServiceError):
        service.loads()
    await service.shutdown_async()


@on_loop
async def test_output_blocks_are_told_in_the_background_and_lost_ones_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "MAX_UNTOLD", 3)
    service = RemoteSelectionService(f"http://127.0.0.1:{free_port()}")
    for _ in range(5):
        service.add_output_block("a")
    assert service.lost_output_blocks == 2
    await until(lambda: service.lost_output_blocks == 5)
    await service.shutdown_async()


def test_output_blocks_are_told_at_once_where_there_is_no_loop(url: str) -> None:
    service = RemoteSelectionService(url)
    with pytest.raises(SelectionServiceError) as caught:
        service.add_output_block("never")
    assert caught.value.status_code == 404
    service.shutdown()


@pytest.mark.parametrize("url", [("--queue-threshold", "0.001")], indirect=True)
@on_loop
async def test_who_is_cancelled_while_it_waits_leaves_the_queue(url: str) -> None:
    service = RemoteSelectionService(url)
    await service.upsert_worker(worker())
    await service.select_and_reserve(ask("first"))
    waiting = asyncio.create_task(service.select_and_reserve(ask("second")))
    await until(lambda: pending(service) == 1)
    waiting.cancel()
    await until(lambda: pending(service) == 0)
    await service.free_reservation("first")
    await shows(service, {FIRST: (0, 0, 0)})
    await service.shutdown_async()


@on_loop
async def test_who_is_cancelled_at_any_moment_leaves_no_booking(url: str) -> None:
    service = RemoteSelectionService(url)
    await service.upsert_worker(worker())
    for turns in range(40):
        booking = asyncio.create_task(service.select_and_reserve(ask(f"r{turns}")))
        for _ in range(turns):
            await asyncio.sleep(0.0002)
        if not booking.cancel():
            await service.free_reservation(f"r{turns}")
        await asyncio.wait({booking})
    await service.shutdown_async()  # waits for what is taken back
    with pytest.raises(SelectionServiceError, match="shutting down"):
        service.loads()
    seen = RemoteSelectionService(url)  # the service itself goes on
    assert rows(seen) == {FIRST: (0, 0, 0)}
    await seen.shutdown_async()


@pytest.mark.parametrize("url", [("--replica-sync-port", str(free_port()))], indirect=True)
@on_loop
async def test_peers_of_the_service_come_and_go(url: str) -> None:
    service, peer = RemoteSelectionService(url), "tcp://127.0.0.1:1"
    assert [await service.register_replica_peer(peer) for _ in range(2)] == [True, False]
    assert service.list_replica_peers() == [peer]
    with pytest.raises(ValueError, match="zz"):
        await service.register_replica_peer("zz")
    assert [await service.deregister_replica_peer(peer) for _ in range(2)] == [True, False]
    with pytest.raises(NotImplementedError, match="--indexer-peers"):
        await service.recover_indexer_from_peers([url])
    await service.shutdown_async()
