"""KvRouter over real sockets: what it books, streams, reports, retries and frees."""

import asyncio
import gc
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from lean_selector.client import (
    AlreadyExists,
    Backoff,
    ClientClosed,
    InvalidRequest,
    KvPushRouter,
    KvRouter,
    KvRouterConfig,
    ModelNotNamed,
    NotFound,
    NoWorkerAvailable,
    ServiceUnreachable,
    Timeouts,
    TokenStream,
    WorkerRefused,
    WorkerStreamBroken,
    WorkerUnreachable,
    WrongBlockSize,
)
from lean_selector.publisher import KvEventPublisher
from tests.client.fleet import MODEL, Fleet
from tests.support.on_loop import until
from tests.support.running_service import RunningService, free_port

TOKENS = list(range(1, 11))  # two full blocks of four, and a partial one


async def freed(fleet: Fleet) -> None:
    await until(lambda: fleet.total() == (0, 0, 0), f"no load is left: {fleet.loads()}")


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


class Sleeps(list[float]):
    """A sleep that only writes down what it was asked."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        await asyncio.sleep(0)


# -- generate -------------------------------------------------------------------------------------


def test_generate_streams_tokens_and_leaves_no_load(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            stream = await router.generate(TOKENS, MODEL, {"max_tokens": 3})
            assert fleet.loads()[stream.worker_id, stream.dp_rank] == (10, 2, 1)
            chunks = [chunk async for chunk in stream]
            assert [chunk.get("token_ids") for chunk in chunks] == [[1000], [1001], [1002], None]
            assert [chunk.get("text") for chunk in chunks] == [" t0", " t1", " t2", None]
            assert chunks[2]["finish_reason"] == "length"
            assert chunks[3] == {"usage": {"prompt_tokens": 10, "completion_tokens": 3}}
            assert fleet.total() == (0, 0, 0)  # freed before the iteration ended
            assert [chunk async for chunk in stream] == []

    run(main())


def test_generate_sends_what_the_engine_understands(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            stream = await router.generate(
                TOKENS,
                "adapter",
                {"max_tokens": 1, "ignore_eos": True, "stop_token_ids_hidden": [2], "stop": None},
                {"temperature": 0.7, "top_p": 0.9},
                {"logprobs": 1},
                extra_args={"temperature": 0.5},
                worker_id=1,
                lora_name="adapter",
                cache_salt="s",
            )
            await stream.aclose()

    run(main())
    assert fleet.workers[1].requests == [
        {
            "model": "adapter",
            "prompt": TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": "dynamo-cache-salt:s",
            "max_tokens": 1,
            "ignore_eos": True,
            "stop_token_ids": [2],
            "temperature": 0.5,
            "top_p": 0.9,
            "logprobs": 1,
        }
    ]
    assert "x-data-parallel-rank" not in fleet.workers[1].headers[0]


def test_prefill_and_output_blocks_are_reported_while_the_stream_runs(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            # Prompt of 10 in blocks of 4: full after 2, 6 and 10 tokens of output.
            stream = await router.generate(
                TOKENS, MODEL, {"max_tokens": 20}, extra_args={"fake": {"stall_after": 6}}
            )
            rank = stream.worker_id, stream.dp_rank
            assert fleet.loads()[rank] == (10, 2, 1)
            await anext(stream)
            await until(lambda: fleet.loads()[rank][0] == 0, "prefill is complete")
            for _ in range(5):
                await anext(stream)
            await until(lambda: fleet.loads()[rank] == (0, 4, 1), "two blocks are full")
            await stream.aclose()
            assert fleet.total() == (0, 0, 0)

    run(main())


def test_expected_output_makes_the_load_fade(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            stream = await router.generate(
                [1] * 8,
                MODEL,
                {"max_tokens": 8},
                extra_args={"fake": {"stall_after": 4}},
                expected_output_tokens=8,
            )
            for _ in range(4):
                await anext(stream)
            # Three blocks, each at a half: 1.5, rounded away from zero.
            await until(lambda: fleet.total() == (0, 2, 1), "the blocks weigh a half")
            await stream.aclose()

    run(main())


def test_output_blocks_are_not_reported_when_the_config_says_so(fleet: Fleet) -> None:
    async def main() -> None:
        config = KvRouterConfig(router_track_output_blocks=False)
        async with KvRouter(fleet.endpoint, 4, config) as router:
            stream = await router.generate(
                TOKENS, MODEL, {"max_tokens": 20}, extra_args={"fake": {"stall_after": 9}}
            )
            for _ in range(9):
                await anext(stream)
            await until(lambda: fleet.total()[0] == 0, "prefill is complete")
            assert fleet.total() == (0, 2, 1)
            await stream.aclose()

    run(main())


def test_an_engine_without_token_ids_gives_text_and_is_counted_by_it(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4, return_token_ids=False) as router:
            fake = {"without": ["usage", "done"], "stall_after": 6}
            stream = await router.generate(
                TOKENS, MODEL, {"max_tokens": 7}, extra_args={"fake": fake}
            )
            chunks = [await anext(stream) for _ in range(6)]
            assert chunks[0] == {"index": 0, "text": " t0"}
            await until(lambda: fleet.total() == (0, 4, 1), "two blocks are full")
            await stream.aclose()
            fake = {"without": ["usage", "done"]}
            stream = await router.generate(
                TOKENS, MODEL, {"max_tokens": 2}, extra_args={"fake": fake}
            )
            assert [chunk["text"] async for chunk in stream] == [" t0", " t1"]

    run(main())


def test_connections_to_a_worker_are_used_again(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            for _ in range(5):
                stream = await router.generate(TOKENS, MODEL, {"max_tokens": 2}, worker_id=1)
                assert len([chunk async for chunk in stream]) == 3

    run(main())
    assert fleet.workers[1].connections == 1


# -- what ends a stream ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        pytest.param({"break_after": 2}, "RemoteProtocolError", id="connection cut"),
        pytest.param({"error_after": 2}, "the engine reports the fake fails", id="error event"),
    ],
)
def test_a_worker_that_fails_in_the_middle_raises_after_what_it_said(
    fleet: Fleet, fake: dict[str, Any], reason: str
) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            stream = await router.generate(
                TOKENS, MODEL, {"max_tokens": 5}, extra_args={"fake": fake}
            )
            assert (await anext(stream))["text"] == " t0"
            assert (await anext(stream))["text"] == " t1"
            with pytest.raises(WorkerStreamBroken, match=reason) as caught:
                await anext(stream)
            assert caught.value.worker_id == stream.worker_id
            await freed(fleet)

    run(main())


def test_a_silent_worker_is_given_up_after_the_time_out(fleet: Fleet) -> None:
    async def main() -> None:
        timeouts = Timeouts(worker_s=0.05)
        async with KvRouter(fleet.endpoint, 4, timeouts=timeouts) as router:
            stream = await router.generate(TOKENS, MODEL, extra_args={"fake": {"stall_after": 1}})
            await anext(stream)
            with pytest.raises(WorkerStreamBroken, match="ReadTimeout"):
                await anext(stream)
            await freed(fleet)

    run(main())


async def _cancelled_while_reading(stream: TokenStream) -> None:
    await anext(stream)
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def _closed(stream: TokenStream) -> None:
    await stream.aclose()


async def _left_by_break(stream: TokenStream) -> None:
    async for _ in stream:
        break


async def _never_read(stream: TokenStream) -> None:
    pass


async def _left_by_with(stream: TokenStream) -> None:
    async with stream:
        await anext(stream)


@pytest.mark.parametrize(
    "leave", [_cancelled_while_reading, _closed, _left_by_break, _never_read, _left_by_with]
)
def test_however_a_stream_is_left_it_is_freed_and_the_engine_stopped(
    fleet: Fleet, leave: Callable[[TokenStream], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            fake = {"stall_after": 2}
            await leave(await router.generate(TOKENS, MODEL, extra_args={"fake": fake}))
            await freed(fleet)
            stopped = fleet.workers.values()
            await until(lambda: sum(w.hung_up for w in stopped) == 1, "the engine is stopped")

    run(main())


def test_a_stream_in_a_cycle_is_freed_when_it_is_collected(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            cycle: list[object] = [await router.generate(TOKENS, MODEL)]
            cycle.append(cycle)
            del cycle
            gc.collect()
            await freed(fleet)

    run(main())


def test_closing_the_router_frees_what_its_streams_hold(fleet: Fleet) -> None:
    async def main() -> None:
        fake = {"stall_after": 1}
        async with KvRouter(fleet.endpoint, 4) as router:
            stream = await router.generate(TOKENS, MODEL, extra_args={"fake": fake})
            await anext(stream)
        assert fleet.total() == (0, 0, 0)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(ClientClosed):
            await router.generate(TOKENS, MODEL)
        with pytest.raises(ClientClosed):
            await router.best_worker(TOKENS, request_id="r")

    run(main())


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the router is not closed here
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


# A connection that is cancelled at the moment when it is made is left to the collector by anyio.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("steps", range(0, 40, 3))
def test_a_call_cancelled_at_any_point_leaves_no_reservation(fleet: Fleet, steps: int) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4, model_name=MODEL) as router:
            call = asyncio.create_task(router.generate(TOKENS, MODEL, {"max_tokens": 1}))
            for _ in range(steps):
                await asyncio.sleep(0.0004)
            call.cancel()
            await asyncio.wait({call})
            if not call.cancelled():
                await call.result().aclose()
        assert fleet.total() == (0, 0, 0)

    run(main())
    gc.collect()


# -- trouble with workers and the service ---------------------------------------------------------


def test_a_worker_that_refuses_the_connection_is_avoided(fleet: Fleet) -> None:
    fleet.register(3, f"http://127.0.0.1:{free_port()}")

    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            for _ in range(10):
                stream = await router.generate(TOKENS, MODEL, {"max_tokens": 1})
                assert stream.worker_id in (1, 2)
                await stream.aclose()
            await freed(fleet)

    run(main())


def test_a_worker_that_sheds_load_is_avoided_and_others_are_reported(fleet: Fleet) -> None:
    fleet.workers[1].status = 503

    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            for _ in range(6):
                stream = await router.generate(TOKENS, MODEL, {"max_tokens": 1})
                assert stream.worker_id == 2
                await stream.aclose()
            with pytest.raises(WorkerRefused, match="the fake refuses") as caught:
                await router.generate(TOKENS, MODEL, extra_args={"fake": {"status": 400}})
            assert (caught.value.status, caught.value.endpoint[:4]) == (400, "http")
            await freed(fleet)

    run(main())


def test_no_worker_left_is_waited_for_and_then_raised(fleet: Fleet) -> None:
    sleeps = Sleeps()

    async def main() -> None:
        backoff = Backoff(max_retries=2, first_s=1.0)
        async with KvRouter(
            fleet.endpoint, 4, backoff=backoff, sleep=sleeps, rng=random.Random(1)
        ) as router:
            fleet.register(3, f"http://127.0.0.1:{free_port()}")
            with pytest.raises(WorkerUnreachable, match="worker 3"):
                await router.generate(TOKENS, MODEL, worker_id=3)
            assert len(sleeps) == 2
            for worker in fleet.workers.values():
                worker.status = 503
            sleeps.clear()
            with pytest.raises((WorkerUnreachable, WorkerRefused)):
                await router.generate(TOKENS, MODEL)
            await freed(fleet)

    run(main())
    assert 1.0 <= sleeps[0] <= 2.0
    assert 2.0 <= sleeps[1] <= 3.0
    assert len(sleeps) == 2


def test_a_worker_endpoint_that_is_no_url_counts_as_unreachable(fleet: Fleet) -> None:
    fleet.register(3, "tcp://127.0.0.1:bad")
    fleet.register(4, "http://[::")

    async def main() -> None:
        backoff = Backoff(max_retries=0)
        async with KvRouter(fleet.endpoint, 4, backoff=backoff) as router:
            for worker_id in (3, 4):
                with pytest.raises(WorkerUnreachable, match=f"worker {worker_id} at "):
                    await router.generate(TOKENS, MODEL, worker_id=worker_id)
            await freed(fleet)

    run(main())


def test_generate_waits_for_a_worker_with_growing_pauses() -> None:
    class Register(Sleeps):
        async def __call__(self, seconds: float) -> None:
            await super().__call__(seconds)
            if len(self) == 3:
                fleet.register(1, fleet.workers[1].endpoint)

    sleeps = Register()
    with Fleet(1) as fleet:
        fleet.service.request("DELETE", "/workers/1")

        async def main() -> None:
            router = KvRouter(fleet.endpoint, 4, sleep=sleeps, rng=random.Random(1))
            async with router, router.reserve(TOKENS) as placement:
                assert placement.worker_id == 1
            sleeps.clear()
            fleet.service.request("DELETE", "/workers/1")
            async with KvRouter(fleet.endpoint, 4, sleep=sleeps) as router:
                stream = await router.generate(TOKENS, MODEL, {"max_tokens": 1})
                await stream.aclose()

        run(main())
    assert len(sleeps) == 3
    assert sleeps == sorted(sleeps)


def test_without_a_service_the_error_says_where_and_why() -> None:
    port = free_port()
    sleeps = Sleeps()

    async def main() -> None:
        async with KvRouter(f"http://127.0.0.1:{port}", 4, sleep=sleeps) as router:
            with pytest.raises(ServiceUnreachable, match=f":{port}: ConnectError"):
                await router.best_worker(TOKENS)
            assert sleeps == []
            with pytest.raises(ServiceUnreachable):
                await router.generate(TOKENS, MODEL)
            assert len(sleeps) == 5

    run(main())


def test_a_booking_in_the_queue_is_taken_out_when_its_caller_is_cancelled() -> None:
    with Fleet(1, "--queue-threshold", "1", max_num_batched_tokens=8) as fleet:

        def parked() -> int:
            count: int = fleet.service.get("/loads")[1][0]["pending_count"]
            return count

        async def main() -> None:
            async with KvRouter(fleet.endpoint, 4) as router, router.reserve(TOKENS):
                waiting = asyncio.create_task(router.generate(TOKENS, MODEL))
                await until(lambda: parked() == 1, "the second one waits")
                waiting.cancel()
                await asyncio.wait({waiting})
                await until(lambda: parked() == 0, "it has left the queue")
            assert fleet.total() == (0, 0, 0)

        run(main())


def test_a_booking_that_times_out_in_the_queue_is_freed() -> None:
    with Fleet(1, "--queue-threshold", "1", max_num_batched_tokens=8) as fleet:

        async def main() -> None:
            timeouts, backoff = Timeouts(queue_s=0.1), Backoff(max_retries=0)
            router = KvRouter(fleet.endpoint, 4, timeouts=timeouts, backoff=backoff)
            async with router, router.reserve(TOKENS):
                with pytest.raises(ServiceUnreachable, match="ReadTimeout"):
                    await router.generate(TOKENS, MODEL)
            assert fleet.total() == (0, 0, 0)

        run(main())


# -- the other methods ----------------------------------------------------------------------------


def test_best_worker_books_only_with_a_request_id(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvPushRouter(fleet.endpoint, 4, KvRouterConfig()) as router:
            worker_id, dp_rank, overlap = await router.best_worker(TOKENS)
            assert (worker_id in (1, 2), dp_rank, overlap) == (True, 0, 0)
            assert fleet.total() == (0, 0, 0)
            worker_id, _, _ = await router.best_worker(TOKENS, request_id="a/b")
            assert fleet.loads()[worker_id, 0] == (10, 2, 1)
            with pytest.raises(AlreadyExists, match="a/b already exists"):
                await router.best_worker(TOKENS, request_id="a/b")
            assert fleet.total() == (10, 2, 1)
            await router.mark_prefill_complete("a/b")
            assert fleet.loads()[worker_id, 0] == (0, 2, 1)
            await router.free("a/b")
            assert fleet.total() == (0, 0, 0)
            with pytest.raises(NotFound, match="a/b not found"):
                await router.free("a/b")

    run(main())


def test_reserve_gives_a_placement_and_frees_at_the_end(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            async with router.reserve(TOKENS, worker_id=2, dp_rank=0) as placement:
                assert (placement.worker_id, placement.dp_rank) == (2, 0)
                assert placement.endpoint == fleet.workers[2].endpoint
                assert placement.effective_prefill_tokens == 10
                assert (placement.block_size, placement.overlap_blocks) == (4, 0)
                await placement.prefill_complete()
                await placement.output_block()
                assert fleet.loads()[2, 0] == (0, 3, 1)
                await placement.output_block(0.5)
                assert fleet.loads()[2, 0] == (0, 2, 1)
            assert fleet.total() == (0, 0, 0)
            with pytest.raises(RuntimeError, match="mine"):
                async with router.reserve(TOKENS):
                    raise RuntimeError("mine")
            assert fleet.total() == (0, 0, 0)

    run(main())


def test_loads_and_scores_are_those_of_the_service(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            loads = await router.get_potential_loads(TOKENS)
            assert loads == [
                {
                    "worker_id": worker_id,
                    "dp_rank": 0,
                    "potential_prefill_tokens": 10,
                    "potential_decode_blocks": 2,
                    "active_requests": 0,
                }
                for worker_id in (1, 2)
            ]
            scores = await router.get_overlap_scores(TOKENS, {"overlap_score_credit": 0.5})
            assert scores["num_blocks"] == 2
            assert await router.dump_events() == "[]"

    run(main())


def test_errors_carry_the_words_of_the_service(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint, 4) as router:
            with pytest.raises(InvalidRequest, match="isl_tokens must be greater than 0"):
                await router.best_worker([])
            with pytest.raises(InvalidRequest, match="router_temperature"):
                await router.best_worker(TOKENS, {"router_temperature": -1})
            with pytest.raises(ValueError, match="token ids"):
                await router.best_worker([-1])
            with pytest.raises(ValueError, match="dp_rank needs worker_id"):
                await router.generate(TOKENS, MODEL, dp_rank=1)
            constraints = {"required_taints": ["gold"]}
            with pytest.raises(NoWorkerAvailable, match="503: no endpoints available"):
                await router.best_worker(TOKENS, routing_constraints=constraints)

    run(main())


def test_the_overrides_of_the_config_and_of_the_request_are_sent_together() -> None:
    config = KvRouterConfig(overlap_score_weight=2.0, router_temperature=0.5, use_kv_events=True)
    assert config.override(None) == {"overlap_score_weight": 2.0, "router_temperature": 0.5}
    assert config.override({"router_temperature": 0.0}) == {
        "overlap_score_weight": 2.0,
        "router_temperature": 0.0,
    }
    assert KvRouterConfig(router_ttl_secs=1.0).override({}) is None
    with pytest.raises(TypeError, match="no setting 'router_temprature'"):
        KvRouterConfig(router_temprature=1.0)


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        (
            {"router_temperature": "0.5"},
            TypeError,
            "router_temperature: expected a number, got str",
        ),
        ({"overlap_score_weight": True}, TypeError, "overlap_score_weight: expected a number"),
        (
            {"router_assume_kv_reuse": 1},
            TypeError,
            "router_assume_kv_reuse: expected a bool, got int",
        ),
        ({"router_track_output_blocks": "no"}, TypeError, "router_track_output_blocks: expected"),
        ({"router_temperature": -1.0}, ValueError, "router_temperature: must be finite, at least"),
        ({"prefill_load_scale": float("nan")}, ValueError, "prefill_load_scale: must be finite"),
        ({"shared_cache_multiplier": 2}, ValueError, "shared_cache_multiplier: must be between"),
        ({"overlap_score_credit": 1.5}, ValueError, "^overlap_score_credit must be between"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_where_it_is_made(
    settings: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        KvRouterConfig(**settings)


@pytest.mark.parametrize(
    ("block_size", "error", "told"),
    [
        (4.0, TypeError, "block_size: expected an int, got float"),
        (True, TypeError, "block_size: expected an int, got bool"),
        (0, ValueError, "block_size must be at least 1"),
    ],
)
def test_a_block_size_that_cannot_be_is_refused(
    block_size: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        KvRouter("http://127.0.0.1:1", block_size)


# -- which workers, which blocks ------------------------------------------------------------------


def test_a_router_that_was_told_nothing_asks_the_service(fleet: Fleet) -> None:
    async def main() -> None:
        async with KvRouter(fleet.endpoint) as router:
            assert (await router.best_worker(TOKENS))[0] in (1, 2)
            stream = await router.generate(TOKENS, "an adapter of it", {"max_tokens": 1})
            assert stream.block_size == 4
            await stream.aclose()

    run(main())


def test_with_several_models_the_router_must_know_which(fleet: Fleet) -> None:
    fleet.register(3, fleet.workers[1].endpoint, model_name="other", block_size=8)

    async def main() -> None:
        async with KvRouter(fleet.endpoint) as router:
            with pytest.raises(ModelNotNamed, match="say model_name: model-name, other"):
                await router.best_worker(TOKENS)
            stream = await router.generate(TOKENS, "other", {"max_tokens": 1})
            assert (stream.worker_id, stream.block_size) == (3, 8)
            await stream.aclose()
        async with KvRouter(fleet.endpoint, model_name="other") as router:
            assert (await router.best_worker(TOKENS))[0] == 3

    run(main())


def test_a_block_size_that_is_not_the_workers_is_an_error_and_no_booking(fleet: Fleet) -> None:
    async def main() -> None:
        for model_name in (None, MODEL):
            async with KvRouter(fleet.endpoint, 16, model_name=model_name) as router:
                with pytest.raises(WrongBlockSize, match="block_size 16, the workers have 4"):
                    await router.generate(TOKENS, MODEL)
            assert fleet.total() == (0, 0, 0)

    run(main())
    with pytest.raises(ValueError, match="at least 1"):
        KvRouter(fleet.endpoint, 0)


def test_a_unix_socket_serves_as_well(tmp_path: Path) -> None:
    uds = tmp_path / "selector.sock"
    with Fleet(1, "--uds", str(uds)) as fleet:

        async def main() -> None:
            for endpoint in (f"unix:{uds}", f"unix://{uds}"):
                async with KvRouter(endpoint, 4) as router:
                    stream = await router.generate(TOKENS, MODEL, {"max_tokens": 1})
                    assert len([chunk async for chunk in stream]) == 2
                    assert fleet.total() == (0, 0, 0)

        run(main())
    for endpoint in ("unix:", "localhost:8092", ""):
        with pytest.raises(ValueError, match="unix:"):
            KvRouter(endpoint)


@pytest.mark.parametrize("block_size", [None, 4])
def test_overlap_blocks_are_those_of_the_chosen_rank(block_size: int | None) -> None:
    events = [
        KvEventPublisher(kv_block_size=4, dp_rank=rank, endpoint="tcp://127.0.0.1:0")
        for rank in range(2)
    ]
    worker = {
        "worker_id": 1,
        "model_name": MODEL,
        "endpoint": "http://nobody",
        "block_size": 4,
        "data_parallel_size": 2,
        "kv_events_endpoints": {str(n): event.endpoint for n, event in enumerate(events)},
    }
    with RunningService() as service, events[0], events[1]:
        assert service.post("/workers", worker)[1]["lifecycle"] == "schedulable"

        async def main() -> None:
            endpoint = f"http://127.0.0.1:{service.port}"
            async with KvRouter(endpoint, block_size, model_name=MODEL) as router:

                def cached() -> bool:
                    # Published again until the subscription is there.
                    events[1].publish_stored(token_ids=TOKENS, block_hashes=[7, 8])
                    rows = service.post(
                        "/overlap_scores", {"model_name": MODEL, "token_ids": TOKENS}
                    )[1]["workers"]
                    return bool(rows[1]["device_blocks"] == 2)

                await until(cached, "the events have arrived")
                assert await router.best_worker(TOKENS) == (1, 1, 2)
                async with router.reserve(TOKENS, worker_id=1, dp_rank=0) as placement:
                    assert placement.overlap_blocks == 0
                    assert placement.overlap.dp == {"0": 0, "1": 8}
                assert '"block_hash":' in await router.dump_events()
                # An adapter and a salt have blocks of their own.
                assert (await router.best_worker(TOKENS, lora_name="a"))[2] == 0
                assert (await router.best_worker(TOKENS, cache_salt="s"))[2] == 0

        run(main())


def test_a_worker_with_several_ranks_is_told_the_chosen_one() -> None:
    with Fleet(1, data_parallel_size=2) as fleet:

        async def main() -> None:
            async with KvRouter(fleet.endpoint, 4) as router:
                stream = await router.generate(TOKENS, MODEL, worker_id=1, dp_rank=1)
                await stream.aclose()

        run(main())
        assert fleet.workers[1].headers[0]["x-data-parallel-rank"] == "1"
