"""The clients report how workers did."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lean_selector import KvRouter, SyncKvRouter
from lean_selector.client.errors import NotFound, WorkerError
from tests.client.fleet import MODEL, Fleet
from tests.support.on_loop import on_loop
from tests.support.prometheus_tools import parsed, scrape, value

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


def told(fleet: Fleet) -> Counter[str]:
    return sum((Counter(reports(fleet, number)) for number in fleet.workers), Counter[str]())


async def finished(router: KvRouter, **fake: Any) -> int:
    """Reads one generation to its end; returns its worker."""
    options = {"max_tokens": 2, "fake": fake}
    stream = await router.generate(PROMPT, MODEL, options)
    async for _ in stream:
        pass
    return stream.worker_id


@on_loop
async def test_a_stream_that_ends_well_is_told_with_what_the_engine_had_cached(
    fleet: Fleet,
) -> None:
    async with KvRouter(fleet.endpoint) as router:
        worker_id = await finished(router, cached=8)
    assert reports(fleet, worker_id) == {"ok": 1}
    samples = parsed(scrape(fleet.service.port))
    name = "lean_selector_worker_cached_tokens_total"
    assert value(samples, name, worker_id=str(worker_id)) == 8


@on_loop
async def test_what_goes_wrong_is_told_as_it_is(
    router_of: Callable[..., Any], fleet: Fleet
) -> None:
    async with router_of(fleet.endpoint) as router:
        for fake in ({"break_after": 1}, {"status": 400}):
            with pytest.raises(WorkerError):
                await finished(router, **fake)
    assert told(fleet) == {"failed": 1, "ok": 1}


@on_loop
async def test_a_stream_that_its_reader_gave_up_tells_nothing(fleet: Fleet) -> None:
    async with KvRouter(fleet.endpoint) as router:
        options = {"max_tokens": 4, "fake": {"stall_after": 1}}
        async with await router.generate(PROMPT, MODEL, options) as stream:
            await anext(stream)
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


def test_a_pair_is_reserved_and_both_of_its_workers_are_reported(fleet: Fleet) -> None:
    for worker_id, role in ((1, "decode"), (2, "prefill"), (3, "prefill")):
        fleet.register(worker_id, f"http://{role}-{worker_id}", worker_role=role)
    with SyncKvRouter(fleet.endpoint) as router:
        with router.reserve(
            PROMPT, disaggregate="always", prefill_allowed_worker_ids=[3]
        ) as placement:
            assert (placement.worker_id, placement.effective_prefill_tokens) == (1, 0)
            prefill, told_why = placement.prefill, placement.disaggregation
            assert prefill is not None
            assert told_why is not None
            assert told_why.used
            assert (prefill.worker_id, prefill.endpoint) == (3, "http://prefill-3")
            assert prefill.effective_prefill_tokens == len(PROMPT)
            assert fleet.loads()[3, 0][0] == len(PROMPT)
            placement.prefill_complete()
            assert fleet.total() == (0, 4, 1)
            placement.went("ok", cached_tokens=8, prefill_outcome="failed")
        fleet.wait_until_free()
        assert (reports(fleet, 1), reports(fleet, 3)) == ({"ok": 1}, {"failed": 1})
        with router.reserve(PROMPT) as placement:
            assert (placement.prefill, placement.disaggregation) == (None, None)
