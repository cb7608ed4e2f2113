"""SyncKvRouter: the same behaviour without an event loop."""

import gc
from inspect import signature
from typing import Any

import pytest

from lean_selector.client import (
    Backoff,
    KvRouter,
    KvRouterConfig,
    NotFound,
    ServiceUnreachable,
    SlotTracker,
    SyncKvRouter,
    SyncSlotTracker,
    SyncTokenStream,
    WorkerRefused,
    WorkerStreamBroken,
    WorkerUnreachable,
)
from tests.client.fleet import MODEL, Fleet
from tests.support.running_service import free_port

TOKENS = list(range(1, 11))


def methods(kind: type) -> dict[str, Any]:
    ends = {"aclose", "close"}
    return {n: f for n, f in vars(kind).items() if not n.startswith("_") and n not in ends}


@pytest.mark.parametrize(
    ("with_a_loop", "without"), [(KvRouter, SyncKvRouter), (SlotTracker, SyncSlotTracker)]
)
def test_both_kinds_have_the_same_methods_with_the_same_arguments_and_text(
    with_a_loop: type, without: type
) -> None:
    ours = methods(with_a_loop)
    assert len(ours) >= 9
    for name, method in methods(without).items():
        other = ours.pop(name)
        assert method.__doc__ == other.__doc__
        assert signature(method).parameters == signature(other).parameters
    assert not ours


def test_a_method_says_what_it_returns_and_not_how() -> None:
    assert signature(KvRouter.best_worker).return_annotation == tuple[int, int, int]
    assert signature(SyncKvRouter.generate).return_annotation is SyncTokenStream


def test_generate_streams_tokens_and_leaves_no_load(fleet: Fleet) -> None:
    with SyncKvRouter(fleet.endpoint, 4, KvRouterConfig()) as router:
        for _ in range(2):
            stream = router.generate(TOKENS, MODEL, {"max_tokens": 3}, worker_id=1)
            assert fleet.loads()[1, 0] == (10, 2, 1)
            assert next(stream)["token_ids"] == [1000]
            assert fleet.loads()[1, 0][0] == 0
            assert [chunk.get("token_ids") for chunk in stream] == [[1001], [1002], None]
            assert fleet.total() == (0, 0, 0)
    assert fleet.workers[1].connections == 1


def test_output_blocks_are_reported_between_chunks(fleet: Fleet) -> None:
    with SyncKvRouter(fleet.endpoint, 4) as router:
        with router.generate(
            TOKENS, MODEL, {"max_tokens": 9}, extra_args={"fake": {"stall_after": 6}}
        ) as stream:
            for _ in range(6):
                next(stream)
            assert fleet.total() == (0, 4, 1)
        assert fleet.total() == (0, 0, 0)


def test_best_worker_and_the_manual_lifecycle(fleet: Fleet) -> None:
    with SyncKvRouter(fleet.endpoint, 4) as router:
        assert router.best_worker(TOKENS)[1:] == (0, 0)
        assert fleet.total() == (0, 0, 0)
        worker_id, _, _ = router.best_worker(TOKENS, request_id="r")
        assert fleet.loads()[worker_id, 0] == (10, 2, 1)
        router.mark_prefill_complete("r")
        router.free("r")
        with pytest.raises(NotFound):
            router.free("r")
        assert len(router.get_potential_loads(TOKENS)) == 2
        assert router.get_overlap_scores(TOKENS)["num_blocks"] == 2
        assert router.dump_events() == "[]"


def test_reserve_gives_a_placement_and_frees_at_the_end(fleet: Fleet) -> None:
    with SyncKvRouter(fleet.endpoint, 4) as router:
        with router.reserve(TOKENS, worker_id=2) as placement:
            assert placement.endpoint == fleet.workers[2].endpoint
            placement.prefill_complete()
            placement.output_block(0.5)
            assert fleet.loads()[2, 0] == (0, 2, 1)
        assert fleet.total() == (0, 0, 0)


def _drop(stream: SyncTokenStream) -> None:
    del stream


def _drop_in_a_cycle(stream: SyncTokenStream) -> None:
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del cycle, stream


def _break(stream: SyncTokenStream) -> None:
    for _ in stream:
        break


@pytest.mark.parametrize("leave", [_drop, _drop_in_a_cycle, _break, SyncTokenStream.close])
def test_however_a_stream_is_left_it_is_freed(fleet: Fleet, leave: Any) -> None:
    with SyncKvRouter(fleet.endpoint, 4) as router:
        leave(router.generate(TOKENS, MODEL, extra_args={"fake": {"stall_after": 2}}))
        gc.collect()
        assert fleet.total() == (0, 0, 0)


def test_a_stream_collected_inside_an_exchange_is_freed_after_it(fleet: Fleet) -> None:
    with SyncKvRouter(fleet.endpoint, 4) as router:
        stream = router.generate(TOKENS, MODEL)
        with router._driver._inside_httpx():
            del stream
            assert fleet.total() == (10, 2, 1)
        router.best_worker(TOKENS)
        assert fleet.total() == (0, 0, 0)


def test_closing_the_router_frees_what_its_streams_hold(fleet: Fleet) -> None:
    with SyncKvRouter(fleet.endpoint, 4) as router:
        stream = router.generate(TOKENS, MODEL)
        next(stream)
    assert fleet.total() == (0, 0, 0)
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize("fake", [{"break_after": 1}, {"error_after": 1}])
def test_a_worker_that_fails_in_the_middle_raises(fleet: Fleet, fake: dict[str, int]) -> None:
    with SyncKvRouter(fleet.endpoint, 4) as router:
        stream = router.generate(TOKENS, MODEL, extra_args={"fake": fake})
        next(stream)
        with pytest.raises(WorkerStreamBroken):
            next(stream)
        assert fleet.total() == (0, 0, 0)


def test_workers_that_do_not_take_a_request_are_avoided(fleet: Fleet) -> None:
    fleet.register(3, f"http://127.0.0.1:{free_port()}")
    fleet.workers[1].status = 503
    with SyncKvRouter(fleet.endpoint, 4, backoff=Backoff(max_retries=0)) as router:
        for _ in range(8):
            with router.generate(TOKENS, MODEL) as stream:
                assert stream.worker_id == 2
        with pytest.raises(WorkerUnreachable):
            router.generate(TOKENS, MODEL, worker_id=3)
        with pytest.raises(WorkerRefused):
            router.generate(TOKENS, MODEL, extra_args={"fake": {"status": 404}})
        assert fleet.total() == (0, 0, 0)


def test_an_interrupted_wait_is_shown_to_the_caller(fleet: Fleet) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    fleet.workers[1].status = fleet.workers[2].status = 503
    with SyncKvRouter(fleet.endpoint, 4, sleep=interrupted) as router:
        with pytest.raises(KeyboardInterrupt):
            router.generate(TOKENS, MODEL)
        assert fleet.total() == (0, 0, 0)


def test_without_a_service_it_tries_again_and_then_says_so() -> None:
    sleeps: list[float] = []
    endpoint = f"http://127.0.0.1:{free_port()}"
    router = SyncKvRouter(endpoint, 4, model_name=MODEL, sleep=sleeps.append)
    with router, pytest.raises(ServiceUnreachable, match="ConnectError"):
        router.generate(TOKENS, MODEL)
    assert len(sleeps) == 5
