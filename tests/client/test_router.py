"""Both kinds of router over real sockets: what they book, stream, report and free.

A story without `router_of` is of one kind alone. What is retried and avoided is in test_flows.py.
"""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from lean_selector.client import (
    AlreadyExists,
    Backoff,
    ClientClosed,
    InvalidRequest,
    KvRouter,
    NotFound,
    NoWorkerAvailable,
    OtherEventLoop,
    ServiceUnreachable,
    SyncKvRouter,
    Timeouts,
    TokenStream,
    WorkerRefused,
    WorkerStreamBroken,
    WorkerUnreachable,
)
from tests.client.fleet import MODEL, Fleet
from tests.support.on_loop import on_loop, until
from tests.support.recording_proxy import HeldAnswers
from tests.support.running_service import free_port, wait_until

TOKENS = list(range(1, 11))  # two full blocks of four, and a partial one
ONE_REQUEST = (10, 2, 1)
NOTHING = (0, 0, 0)
WHOLE = [[1000], [1001], None]  # the token ids of two tokens and the usage
Kind = Callable[..., Any]  # KvRouter, or what stands for SyncKvRouter
# A connection that is cancelled at the moment when it is made is left to the collector by anyio.
cancels_connections = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def freed(fleet: Fleet) -> None:
    await until(lambda: fleet.total() == NOTHING, f"no load is left: {fleet.loads()}")


def parked(fleet: Fleet) -> int:
    count: int = fleet.service.get("/loads")[1][0]["pending_count"]
    return count


def fake(**manners: Any) -> dict[str, Any]:
    return {"extra_args": {"fake": manners}}


def methods(kind: type) -> dict[str, Any]:
    ends = {"aclose", "close"}
    return {n: f for n, f in vars(kind).items() if not n.startswith("_") and n not in ends}


def test_both_kinds_have_the_same_methods_with_the_same_arguments_and_text() -> None:
    ours, theirs = methods(KvRouter), methods(SyncKvRouter)
    assert len(ours) >= 9
    assert {name: (f.__doc__, signature(f).parameters) for name, f in ours.items()} == {
        name: (f.__doc__, signature(f).parameters) for name, f in theirs.items()
    }


# -- generate --------------------------------------------------------------------------------------


@on_loop
async def test_generate_streams_tokens_and_leaves_no_load(router_of: Kind, fleet: Fleet) -> None:
    async with router_of(fleet.endpoint, 4) as router:
        for _ in range(3):
            stream = await router.generate(TOKENS, MODEL, {"max_tokens": 3}, worker_id=1)
            assert fleet.loads()[1, 0] == ONE_REQUEST
            chunks = [chunk async for chunk in stream]
            assert [chunk.get("token_ids") for chunk in chunks] == [[1000], [1001], [1002], None]
            assert [chunk.get("text") for chunk in chunks] == [" t0", " t1", " t2", None]
            assert chunks[2]["finish_reason"] == "length"
            assert chunks[3] == {"usage": {"prompt_tokens": 10, "completion_tokens": 3}}
            assert fleet.total() == NOTHING  # freed before the iteration ended
            assert [chunk async for chunk in stream] == []
    assert fleet.workers[1].connections == 1  # which was used again


@on_loop
async def test_prefill_and_output_blocks_are_reported_while_the_stream_runs(
    router_of: Kind, fleet: Fleet
) -> None:
    async with router_of(fleet.endpoint, 4) as router:
        # Prompt of 10 in blocks of 4: full after 2, 6 and 10 tokens of output.
        stream = await router.generate(TOKENS, MODEL, {"max_tokens": 20}, **fake(stall_after=6))
        assert fleet.total() == ONE_REQUEST
        await anext(stream)
        await until(lambda: fleet.total() == (0, 2, 1), "prefill is complete")
        for _ in range(5):
            await anext(stream)
        await until(lambda: fleet.total() == (0, 4, 1), "two blocks are full")
        await stream.aclose()
        assert fleet.total() == NOTHING


@pytest.mark.parametrize(
    ("manner", "tokens"),
    [({"never_ends": True}, WHOLE), ({"without": ["token_ids", "usage", "done"]}, [None, None])],
    ids=["the response stays open", "the response just ends"],
)
@on_loop
async def test_a_stream_ends_at_the_engines_last_word(
    router_of: Kind, fleet: Fleet, manner: dict[str, Any], tokens: list[object]
) -> None:
    async with router_of(fleet.endpoint, 4, timeouts=Timeouts(worker_s=None)) as router:
        stream = await router.generate(TOKENS, MODEL, {"max_tokens": 2}, **fake(**manner))
        assert [chunk.get("token_ids") async for chunk in stream] == tokens
        assert fleet.total() == NOTHING


# -- what ends a stream ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        pytest.param({"break_after": 2}, "RemoteProtocolError", id="connection cut"),
        pytest.param({"ends_after": 2}, "before it was finished", id="early end"),
        pytest.param({"error_after": 2}, "the fake fails", id="error event"),
        pytest.param({"stall_after": 2}, "ReadTimeout", id="silence"),
    ],
)
@on_loop
async def test_a_worker_that_fails_in_the_middle_raises_after_what_it_said(
    router_of: Kind, fleet: Fleet, manner: dict[str, Any], reason: str
) -> None:
    timeouts = Timeouts(worker_s=0.3) if "stall_after" in manner else Timeouts()
    async with router_of(fleet.endpoint, 4, timeouts=timeouts) as router:
        stream = await router.generate(TOKENS, MODEL, {"max_tokens": 5}, **fake(**manner))
        assert [(await anext(stream))["text"] for _ in range(2)] == [" t0", " t1"]
        with pytest.raises(WorkerStreamBroken, match=reason) as caught:
            await anext(stream)
        assert caught.value.worker_id == stream.worker_id
        await freed(fleet)


Leave = Callable[[Any], Coroutine[Any, Any, None]]


async def _closed(stream: Any) -> None:
    await stream.aclose()


async def _left_by_break(stream: Any) -> None:
    async for _ in stream:
        break


async def _left_by_with(stream: Any) -> None:
    async with stream:
        await anext(stream)


async def _never_read(stream: Any) -> None:
    pass


async def _never_read_in_a_cycle(stream: Any) -> None:
    cycle = [stream]
    cycle.append(cycle)


async def _cancelled_while_reading(stream: TokenStream) -> None:
    await anext(stream)
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def _is_left(router: Any, fleet: Fleet, leave: Leave) -> None:
    await leave(await router.generate(TOKENS, MODEL, **fake(stall_after=2)))
    gc.collect()
    await freed(fleet)
    stopped = fleet.workers.values()
    await until(lambda: sum(w.hung_up for w in stopped) == 1, "the engine is stopped")


@pytest.mark.parametrize(
    "leave", [_closed, _left_by_break, _left_by_with, _never_read, _never_read_in_a_cycle]
)
@on_loop
async def test_however_a_stream_is_left_it_is_freed_and_the_engine_stopped(
    router_of: Kind, fleet: Fleet, leave: Leave
) -> None:
    async with router_of(fleet.endpoint, 4) as router:
        await _is_left(router, fleet, leave)


@on_loop
async def test_a_stream_whose_reader_is_cancelled_is_left_too(fleet: Fleet) -> None:
    async with KvRouter(fleet.endpoint, 4) as router:
        await _is_left(router, fleet, _cancelled_while_reading)


@on_loop
async def test_closing_the_router_frees_what_its_streams_hold(
    router_of: Kind, fleet: Fleet
) -> None:
    async with router_of(fleet.endpoint, 4) as router:
        stream = await router.generate(TOKENS, MODEL, **fake(stall_after=1))
        await anext(stream)
    assert fleet.total() == NOTHING
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    with pytest.raises(ClientClosed):
        await router.generate(TOKENS, MODEL)
    with pytest.raises(ClientClosed):
        await router.best_worker(TOKENS, request_id="r")


@cancels_connections  # the router is not closed here
def test_the_end_of_the_loop_frees_what_is_being_released(fleet: Fleet) -> None:
    async def main() -> None:
        stream = await KvRouter(fleet.endpoint, 4).generate(TOKENS, MODEL)
        await anext(stream)
        del stream
        await asyncio.sleep(0)  # the release has begun, and is cancelled with the loop

    run(main())
    fleet.wait_until_free()
    gc.collect()


def test_a_stream_that_outlives_its_loop_does_no_harm(fleet: Fleet) -> None:
    kept = []

    async def main() -> None:
        router = KvRouter(fleet.endpoint, 4)
        kept.append(await router.generate(TOKENS, MODEL))
        await router.aclose()
        await router.aclose()

    run(main())
    kept.clear()
    fleet.wait_until_free()


def test_a_second_event_loop_is_told_that_the_client_is_another_s() -> None:
    router = KvRouter(f"http://127.0.0.1:{free_port()}", 4)

    async def choose() -> None:
        await router.best_worker(TOKENS)

    with pytest.raises(ServiceUnreachable):
        run(choose())
    for again in (choose, router.aclose):
        with pytest.raises(OtherEventLoop):
            run(again())


def test_a_router_that_is_dropped_with_its_stream_frees_it_and_ends_its_thread(
    fleet: Fleet,
) -> None:
    router = SyncKvRouter(fleet.endpoint, 4)
    stream = router.generate(TOKENS, MODEL, **fake(stall_after=1))
    thread = router._thread.thread
    assert thread is not None
    del stream, router
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert fleet.total() == NOTHING


FORKED = """
import os, sys
from lean_selector.client import ClientClosed, ServiceUnreachable, SyncKvRouter
router = SyncKvRouter(sys.argv[1], 4)
try:
    router.best_worker([1])
except ServiceUnreachable:
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    try:
        router.best_worker([1])
    except ClientClosed:
        os._exit(0)
os._exit(1)
"""


def test_a_router_that_was_used_before_a_fork_is_closed_in_the_child() -> None:
    command = [sys.executable, "-c", FORKED, f"http://127.0.0.1:{free_port()}"]
    subprocess.run(command, check=True, timeout=60)


def test_an_interrupted_wait_is_shown_to_the_caller(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_cancelled = threading.Event()
    caller = threading.get_ident()

    async def interrupted(_: float) -> None:
        signal.pthread_kill(caller, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    fleet.workers[1].status = fleet.workers[2].status = 503
    # A shell starts what runs in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with SyncKvRouter(fleet.endpoint, 4) as router:
            monkeypatch.setattr(router._router._driver, "pause", interrupted)
            with pytest.raises(KeyboardInterrupt):
                router.generate(TOKENS, MODEL)
            assert is_cancelled.wait(60)
            fleet.wait_until_free()
    finally:
        signal.signal(signal.SIGINT, before)


# -- trouble with workers and the service ----------------------------------------------------------


@on_loop
async def test_workers_that_do_not_take_a_request_are_avoided(
    router_of: Kind, fleet: Fleet
) -> None:
    fleet.register(3, f"http://127.0.0.1:{free_port()}")
    fleet.register(4, "tcp://127.0.0.1:bad")
    fleet.register(5, "http://[::")
    fleet.workers[1].status = 503
    async with router_of(fleet.endpoint, 4, backoff=Backoff(max_retries=0)) as router:
        for _ in range(8):
            async with await router.generate(TOKENS, MODEL, {"max_tokens": 1}) as stream:
                assert stream.worker_id == 2
        for worker_id in (3, 4, 5):
            with pytest.raises(WorkerUnreachable, match=f"worker {worker_id} at "):
                await router.generate(TOKENS, MODEL, worker_id=worker_id)
        with pytest.raises(WorkerRefused, match="the fake refuses") as caught:
            await router.generate(TOKENS, MODEL, worker_id=2, **fake(status=400))
        assert (caught.value.status, caught.value.worker_id) == (400, 2)
        await freed(fleet)


@on_loop
async def test_a_booking_that_times_out_in_the_queue_is_freed(
    router_of: Kind, queueing: Fleet
) -> None:
    timeouts, backoff = Timeouts(queue_s=0.1), Backoff(max_retries=0)
    async with router_of(queueing.endpoint, 4, timeouts=timeouts, backoff=backoff) as router:
        async with router.reserve(TOKENS):
            with pytest.raises(ServiceUnreachable, match="ReadTimeout"):
                await router.generate(TOKENS, MODEL)
            with pytest.raises(ServiceUnreachable, match="ReadTimeout"):
                await router.best_worker(TOKENS, request_id="r")
        await router.best_worker(TOKENS, request_id="r")  # the id is free again
    assert queueing.total() == ONE_REQUEST


@on_loop
async def test_a_booking_in_the_queue_is_taken_out_when_its_caller_is_cancelled(
    queueing: Fleet,
) -> None:
    async with KvRouter(queueing.endpoint, 4) as router:
        async with router.reserve(TOKENS):
            waiting = asyncio.create_task(router.best_worker(TOKENS, request_id="r"))
            await until(lambda: parked(queueing) == 1, "the second one waits")
            waiting.cancel()
            await asyncio.wait({waiting})
            await until(lambda: parked(queueing) == 0, "it has left the queue")
        await router.best_worker(TOKENS, request_id="r")  # the id can be booked at once
    assert queueing.total() == ONE_REQUEST


# -- the other methods -----------------------------------------------------------------------------


@on_loop
async def test_what_is_booked_under_an_id_is_the_callers(router_of: Kind, fleet: Fleet) -> None:
    async with router_of(fleet.endpoint, 4) as other:
        async with router_of(fleet.endpoint, 4) as router:
            gold = {"required_taints": ["gold"]}
            with pytest.raises(NoWorkerAvailable):
                await router.best_worker(TOKENS, request_id="a/b", routing_constraints=gold)
            assert (await router.best_worker(TOKENS))[1:] == (0, 0)
            assert fleet.total() == NOTHING
            await router.best_worker(TOKENS, request_id="a/b")
            with pytest.raises(AlreadyExists):
                await router.best_worker(TOKENS, request_id="a/b")
        assert fleet.total() == ONE_REQUEST  # it outlives the router
        await other.mark_prefill_complete("a/b")
        assert fleet.total() == (0, 2, 1)
        await other.free("a/b")
        assert fleet.total() == NOTHING
        with pytest.raises(NotFound):
            await other.free("a/b")


@on_loop
async def test_reserve_gives_a_placement_and_frees_at_the_end(
    router_of: Kind, fleet: Fleet
) -> None:
    async with router_of(fleet.endpoint, 4) as router:
        async with router.reserve(TOKENS, worker_id=2, dp_rank=0) as placement:
            assert (placement.worker_id, placement.dp_rank) == (2, 0)
            assert placement.endpoint == fleet.workers[2].url
            assert placement.effective_prefill_tokens == 10
            assert (placement.block_size, placement.overlap_blocks) == (4, 0)
            await placement.prefill_complete()
            await placement.output_block()
            assert fleet.loads()[2, 0] == (0, 3, 1)
            await placement.output_block(0.5)
            assert fleet.loads()[2, 0] == (0, 2, 1)
        assert fleet.total() == NOTHING
        with pytest.raises(RuntimeError, match="mine"):
            async with router.reserve(TOKENS):
                raise RuntimeError("mine")
        assert fleet.total() == NOTHING


@on_loop
async def test_route_places_a_raw_request_and_frees_at_the_end(
    router_of: Kind, fleet: Fleet
) -> None:
    async with router_of(fleet.endpoint) as router:
        for body in (b'{"prompt": "a b"}', {"prompt": "a b"}):
            async with router.route(body, "/v1/completions") as placement:
                assert placement.endpoint == fleet.workers[placement.worker_id].url
                assert (placement.block_size, placement.dp_rank) == (4, 0)
                assert fleet.total()[2] == 1
                await placement.prefill_complete()
                assert fleet.total()[0] == 0
            assert fleet.total() == NOTHING
        with pytest.raises(InvalidRequest):
            async with router.route(b"[]"):
                pass
        assert fleet.total() == NOTHING


@on_loop
async def test_loads_and_scores_are_those_of_the_service(router_of: Kind, fleet: Fleet) -> None:
    async with router_of(fleet.endpoint) as router:
        loads = await router.get_potential_loads(TOKENS)
        assert [(row["worker_id"], row["potential_prefill_tokens"]) for row in loads] == [
            (1, 10),
            (2, 10),
        ]
        scores = await router.get_overlap_scores(TOKENS, {"overlap_score_credit": 0.5})
        assert scores["num_blocks"] == 2
        assert await router.dump_events() == "[]"


@on_loop
async def test_a_unix_socket_serves_as_well(router_of: Kind, fleet: Fleet, uds: Path) -> None:
    for endpoint in (f"unix:{uds}", f"unix://{uds}"):
        async with router_of(endpoint, 4) as router:
            stream = await router.generate(TOKENS, MODEL, {"max_tokens": 1})
            assert len([chunk async for chunk in stream]) == 2
            assert fleet.total() == NOTHING


# -- closing with a booking on its way -------------------------------------------------------------


@pytest.fixture
def held(fleet: Fleet) -> Iterator[HeldAnswers]:
    with HeldAnswers(fleet.service.port) as relay:
        yield relay


def booking(router: KvRouter, request_id: str | None = None) -> "asyncio.Task[Any]":
    if request_id is None:
        return asyncio.create_task(router.generate(TOKENS, MODEL))
    return asyncio.create_task(router.best_worker(TOKENS, request_id=request_id))


@pytest.mark.parametrize("request_id", [None, "r"])
@pytest.mark.parametrize("is_answered", [False, True])
@on_loop
async def test_closing_frees_a_booking_whose_answer_is_still_on_its_way(
    fleet: Fleet, held: HeldAnswers, request_id: str | None, is_answered: bool
) -> None:
    router = KvRouter(held.endpoint, 4, model_name=MODEL)
    call = booking(router, request_id)
    await until(lambda: fleet.total() == ONE_REQUEST, "the service has booked it")
    closing = asyncio.create_task(router.aclose())
    await asyncio.sleep(0)
    if is_answered:
        held.let_go.set()
    await closing
    assert fleet.total() == NOTHING
    with pytest.raises(ClientClosed):
        await call


@pytest.mark.parametrize(
    ("is_cancelled", "end"), [(False, ClientClosed), (True, asyncio.CancelledError)]
)
@on_loop
async def test_closing_takes_a_booking_out_of_the_queue_of_the_service(
    queueing: Fleet, is_cancelled: bool, end: type[BaseException]
) -> None:
    async with KvRouter(queueing.endpoint, 4) as other, other.reserve(TOKENS):
        router = KvRouter(queueing.endpoint, 4)
        waiting = booking(router)
        await until(lambda: parked(queueing) == 1, "it waits")
        closing = asyncio.create_task(router.aclose())
        await asyncio.sleep(0)
        if is_cancelled:
            waiting.cancel()
        await closing
        assert parked(queueing) == 0
        with pytest.raises(end):
            await waiting
    assert queueing.total() == NOTHING


def test_a_booking_in_another_thread_is_freed_when_it_is_answered_after_the_close(
    fleet: Fleet, held: HeldAnswers
) -> None:
    ends: list[type[BaseException] | None] = []

    def generate(router: SyncKvRouter) -> None:
        try:
            router.generate(TOKENS, MODEL)
        except ClientClosed as error:
            ends.append(type(error))
        else:
            ends.append(None)

    router = SyncKvRouter(held.endpoint, 4, model_name=MODEL, backoff=Backoff(max_retries=0))
    thread = threading.Thread(target=generate, args=(router,))
    thread.start()
    wait_until(lambda: fleet.total() == ONE_REQUEST, "the service has booked it")
    router.close()
    held.let_go.set()
    thread.join()
    assert ends == [ClientClosed]
    assert fleet.total() == NOTHING
    with pytest.raises(ClientClosed):
        router.best_worker(TOKENS)
