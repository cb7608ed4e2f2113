"""Who holds a reservation, when it is let go, and that nobody frees another's."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from lean_selector.client import (
    Backoff,
    ClientClosed,
    KvRouter,
    ServiceUnreachable,
    SyncKvRouter,
    Timeouts,
    WrongBlockSize,
)
from tests.client.fleet import MODEL, Fleet
from tests.client.held_answers import HeldAnswers
from tests.client.test_router import TOKENS, run
from tests.support.on_loop import until
from tests.support.running_service import wait_until

ONE_REQUEST = (10, 2, 1)
NOTHING = (0, 0, 0)


@pytest.fixture
def queueing() -> Iterator[Fleet]:
    """One worker that takes one request at a time; others wait in the queue of the service."""
    with Fleet(1, "--queue-threshold", "1", max_num_batched_tokens=8) as fleet:
        yield fleet


def parked(fleet: Fleet) -> int:
    count: int = fleet.service.get("/loads")[1][0]["pending_count"]
    return count


# -- ids that the user gives ----------------------------------------------------------------------


def test_an_id_that_was_freed_may_be_booked_by_another_router(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as other:
            async with KvRouter(fleet.endpoint, 4) as router:
                await router.best_worker(TOKENS, request_id="r")
                await router.free("r")
                await other.best_worker(TOKENS, request_id="r")
            assert fleet.total() == ONE_REQUEST
            await other.free("r")
        assert fleet.total() == NOTHING

    run(main())


def test_an_id_that_was_freed_may_be_booked_by_another_synchronous_router(fleet: Fleet) -> None:
    with SyncKvRouter(fleet.endpoint, 4) as other:
        with SyncKvRouter(fleet.endpoint, 4) as router:
            router.best_worker(TOKENS, request_id="r")
            router.free("r")
            other.best_worker(TOKENS, request_id="r")
        assert fleet.total() == ONE_REQUEST
        other.free("r")
    assert fleet.total() == NOTHING


def test_an_id_outlives_the_router_that_booked_it_and_is_freed_by_any(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            await router.best_worker(TOKENS, request_id="r")
        assert fleet.total() == ONE_REQUEST
        async with KvRouter(fleet.endpoint, 4) as other:
            await other.mark_prefill_complete("r")
            await other.free("r")
        assert fleet.total() == NOTHING

    run(main())


def test_a_router_remembers_nothing_of_the_ids_that_it_has_handed_over(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            for number in range(20):
                await router.best_worker(TOKENS, request_id=f"r{number}")
            driver = router._driver
            assert (len(driver._held), len(driver._bookings), len(driver._releasing)) == (0, 0, 0)

    run(main())
    with SyncKvRouter(fleet.endpoint, 4) as router:
        router.best_worker(TOKENS, request_id="r")
        assert not router._driver._held


def test_once_a_booking_has_failed_its_id_is_free_for_another_router(queueing: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(queueing.endpoint, 4) as other:
            router = KvRouter(queueing.endpoint, 4, timeouts=Timeouts(queue_s=0.1))
            async with router:
                async with other.reserve(TOKENS):
                    with pytest.raises(ServiceUnreachable, match="ReadTimeout"):
                        await router.best_worker(TOKENS, request_id="r")
                await other.best_worker(TOKENS, request_id="r")
            assert queueing.total() == ONE_REQUEST
            await other.free("r")

    run(main())


def test_a_booking_of_the_wrong_block_size_is_gone_when_that_is_said(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 16, model_name=MODEL) as router:
            with pytest.raises(WrongBlockSize):
                await router.best_worker(TOKENS, request_id="r")
            assert fleet.total() == NOTHING

    run(main())


def test_an_id_whose_booking_was_cancelled_can_be_booked_again_at_once(queueing: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(queueing.endpoint, 4) as router:
            async with router.reserve(TOKENS):
                cancelled = asyncio.create_task(router.best_worker(TOKENS, request_id="r"))
                await until(lambda: parked(queueing) == 1, "it waits")
                cancelled.cancel()
                await asyncio.wait({cancelled})
            await router.best_worker(TOKENS, request_id="r")
        assert queueing.total() == ONE_REQUEST

    run(main())


# -- closing with a booking on its way ------------------------------------------------------------


@pytest.mark.parametrize("request_id", [None, "r"])
def test_closing_frees_a_booking_whose_answer_is_still_on_its_way(
    fleet: Fleet, request_id: str | None
) -> None:
    async def main() -> None:
        with HeldAnswers(fleet.service.port) as relay:
            router = KvRouter(relay.endpoint, 4, model_name=MODEL)
            if request_id is None:
                call = asyncio.create_task(_generated(router))
            else:
                call = asyncio.create_task(_booked(router, request_id))
            await until(lambda: fleet.total() == ONE_REQUEST, "the service has booked it")
            await router.aclose()
            assert fleet.total() == NOTHING
            with pytest.raises(ClientClosed):
                await call

    run(main())


async def _generated(router: KvRouter) -> None:
    await router.generate(TOKENS, MODEL)


async def _booked(router: KvRouter, request_id: str) -> None:
    await router.best_worker(TOKENS, request_id=request_id)


def test_a_booking_that_is_answered_while_the_router_closes_is_freed(fleet: Fleet) -> None:
    async def main() -> None:
        with HeldAnswers(fleet.service.port) as relay:
            router = KvRouter(relay.endpoint, 4, model_name=MODEL)
            call = asyncio.create_task(_generated(router))
            await until(lambda: fleet.total() == ONE_REQUEST, "the service has booked it")
            closing = asyncio.create_task(router.aclose())
            await asyncio.sleep(0)
            relay.let_go.set()
            await closing
            assert fleet.total() == NOTHING
            with pytest.raises(ClientClosed):
                await call

    run(main())


def test_closing_takes_a_booking_out_of_the_queue_of_the_service(queueing: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(queueing.endpoint, 4) as other, other.reserve(TOKENS):
            router = KvRouter(queueing.endpoint, 4)
            waiting = asyncio.create_task(_generated(router))
            await until(lambda: parked(queueing) == 1, "it waits")
            await router.aclose()
            assert parked(queueing) == 0
            with pytest.raises(ClientClosed):
                await waiting
        assert queueing.total() == NOTHING

    run(main())


def test_a_call_that_is_cancelled_while_the_router_closes_ends_as_cancelled(
    queueing: Fleet,
) -> None:
    async def main() -> None:
        async with KvRouter(queueing.endpoint, 4) as other, other.reserve(TOKENS):
            router = KvRouter(queueing.endpoint, 4)
            waiting = asyncio.create_task(_generated(router))
            await until(lambda: parked(queueing) == 1, "it waits")
            closing = asyncio.create_task(router.aclose())
            await asyncio.sleep(0)
            waiting.cancel()
            await closing
            assert parked(queueing) == 0
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert queueing.total() == NOTHING

    run(main())


def test_a_booking_in_another_thread_is_freed_when_it_is_answered_after_the_close(
    fleet: Fleet,
) -> None:
    ends: list[BaseException | None] = []

    def generate(router: SyncKvRouter) -> None:
        try:
            router.generate(TOKENS, MODEL)
        except ClientClosed as error:
            ends.append(error)
        else:
            ends.append(None)

    with HeldAnswers(fleet.service.port) as relay:
        router = SyncKvRouter(relay.endpoint, 4, model_name=MODEL, backoff=Backoff(max_retries=0))
        thread = threading.Thread(target=generate, args=(router,))
        thread.start()
        wait_until(lambda: fleet.total() == ONE_REQUEST, "the service has booked it")
        router.close()
        relay.let_go.set()
        thread.join()
    assert [type(end) for end in ends] == [ClientClosed]
    assert fleet.total() == NOTHING
    with pytest.raises(ClientClosed):
        router.best_worker(TOKENS)
