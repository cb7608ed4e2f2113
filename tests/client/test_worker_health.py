"""The clients tell how workers did, and who is killed gets no more requests until it is back."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lean_selector import KvRouter, SyncKvRouter
from lean_selector.client.errors import NotFound, WorkerError, WorkerStreamBroken
from tests.client.fleet import MODEL, Fleet
from tests.client.worker_process import WorkerProcess
from tests.support.prometheus_tools import parsed, scrape, value
from tests.support.running_service import wait_until

PROMPT = list(range(16))


def reports(fleet: Fleet, worker_id: int) -> dict[str, int]:
    """The outcomes that the service was told of."""
    samples = parsed(scrape(fleet.service.port))
    name = "lean_selector_worker_reports_total"
    return {
        outcome: int(value(samples, name, worker_id=str(worker_id), outcome=outcome))
        for outcome in ("ok", "failed", "refused")
        if value(samples, name, worker_id=str(worker_id), outcome=outcome)
    }


def health(fleet: Fleet, worker_id: int) -> Any:
    workers = fleet.service.get("/workers?detail=true")[1]
    return next(each["health"] for each in workers if each["worker_id"] == worker_id)


def told(fleet: Fleet) -> Counter[str]:
    return sum((Counter(reports(fleet, number)) for number in fleet.workers), Counter[str]())


async def finished(router: KvRouter, **fake: Any) -> int:
    """Reads one generation to its end; returns its worker."""
    options = {"max_tokens": 2, "fake": fake}
    stream = await router.generate(PROMPT, MODEL, options)
    async for _ in stream:
        pass
    return stream.worker_id


def test_a_stream_that_ends_well_is_told_with_what_the_engine_had_cached(fleet: Fleet) -> None:
    async def run() -> int:
        async with KvRouter(fleet.endpoint) as router:
            return await finished(router, cached=8)

    worker_id = asyncio.run(run())
    assert reports(fleet, worker_id) == {"ok": 1}
    samples = parsed(scrape(fleet.service.port))
    name = "lean_selector_worker_cached_tokens_total"
    assert value(samples, name, worker_id=str(worker_id)) == 8


@pytest.mark.parametrize(
    ("fake", "outcomes"),
    [
        ({"break_after": 1}, {"failed": 1}),
        ({"error_after": 1}, {"failed": 1}),
        ({"status": 500}, {"failed": 1}),
        ({"status": 400}, {"ok": 1}),
    ],
)
def test_what_goes_wrong_is_told_as_it_is(
    router_of: Callable[..., Any], fleet: Fleet, fake: dict[str, int], outcomes: dict[str, int]
) -> None:
    async def run() -> None:
        async with router_of(fleet.endpoint) as router:
            with contextlib.suppress(WorkerError):
                await finished(router, **fake)

    asyncio.run(run())
    assert told(fleet) == outcomes


def test_a_stream_that_its_reader_gave_up_tells_nothing(fleet: Fleet) -> None:
    async def run() -> None:
        async with KvRouter(fleet.endpoint) as router:
            options = {"max_tokens": 4, "fake": {"stall_after": 1}}
            async with await router.generate(PROMPT, MODEL, options) as stream:
                await anext(stream)

    asyncio.run(run())
    fleet.wait_until_free()
    assert told(fleet) == {}


def test_who_sends_requests_himself_tells_how_they_went(fleet: Fleet) -> None:
    with SyncKvRouter(fleet.endpoint) as router:
        router.report(1, "failed", ttft_ms=3.0)
        with pytest.raises(NotFound):
            router.report(99, "ok")
        router.best_worker(PROMPT, request_id="mine")
        router.free("mine", "ok", cached_tokens=4)
        with router.reserve(PROMPT) as placement:
            placement.went("refused")
    assert told(fleet) == {"failed": 1, "ok": 1, "refused": 1}


# -- kill -9 --------------------------------------------------------------------------------------


@contextlib.contextmanager
def four_processes(*flags: str) -> Iterator[tuple[Fleet, dict[int, WorkerProcess]]]:
    with Fleet(0, *flags) as fleet, contextlib.ExitStack() as stack:
        workers = {number: WorkerProcess() for number in (1, 2, 3, 4)}
        for number, worker in workers.items():
            stack.enter_context(worker)
            fleet.register(number, worker.endpoint)
        yield fleet, workers


async def placed_together(router: KvRouter, count: int) -> list[int]:
    """Where so many requests go that are all active at once."""
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(router.reserve(PROMPT)) for _ in range(count)]
        return sorted(each.worker_id for each in held)


async def ask_until_it_is(state: str, fleet: Fleet, router: KvRouter, *never: int) -> None:
    """Four requests at once, again and again: each is served, but by none of `never`."""
    while health(fleet, 2)["state"] != state:
        found = await asyncio.gather(*(finished(router) for _ in range(4)))
        assert not set(never) & set(found)


def test_a_worker_that_is_killed_gets_no_more_requests_and_nobody_else_is_starved() -> None:
    """kill -9 of one of four under load: at most five attempts fail, then nobody goes there."""

    async def run(fleet: Fleet, workers: dict[int, WorkerProcess]) -> None:
        async with KvRouter(fleet.endpoint) as router:
            # A stream is under way on each; all have said their first token.
            options = {"max_tokens": 3, "fake": {"stall_after": 1}}
            streams = [await router.generate(PROMPT, MODEL, options) for _ in workers]
            for stream in streams:
                await anext(stream)
            assert {stream.worker_id for stream in streams} == set(workers)

            workers[2].kill()

            (victim,) = (stream for stream in streams if stream.worker_id == 2)
            with pytest.raises(WorkerStreamBroken):
                await anext(victim)
            await ask_until_it_is("ejected", fleet, router, 2)
            failed = reports(fleet, 2)
            assert failed["failed"] >= 1
            assert sum(failed.values()) <= 5
            for stream in streams:
                await stream.aclose()
            for _ in range(10):  # of the equally loaded each gets one
                assert await placed_together(router, 3) == [1, 3, 4]
            await asyncio.gather(*(finished(router) for _ in range(12)))
            assert reports(fleet, 2) == failed, "nobody has asked it again"

    with four_processes("--worker-ejection-secs", "300") as (fleet, workers):
        asyncio.run(run(fleet, workers))


def test_a_worker_that_is_restarted_is_back_when_the_time_of_its_ejection_is_over() -> None:
    async def fail(fleet: Fleet) -> None:
        async with KvRouter(fleet.endpoint) as router:
            await ask_until_it_is("ejected", fleet, router, 2)

    async def come_back(fleet: Fleet) -> None:
        async with KvRouter(fleet.endpoint) as router:
            assert await placed_together(router, 4) == [1, 2, 3, 4]
            await ask_until_it_is("in_service", fleet, router)

    with four_processes("--worker-ejection-secs", "3") as (fleet, workers):
        workers[2].kill()
        asyncio.run(fail(fleet))
        (row,) = health(fleet, 2)["ranks"]
        assert row["ejections"] == 1
        assert row["returns_in_s"] <= 3.0
        workers[2].start()
        wait_until(lambda: health(fleet, 2)["state"] != "ejected", "its time is over")
        asyncio.run(come_back(fleet))
        assert reports(fleet, 2)["ok"] >= 1
