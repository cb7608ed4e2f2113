"""Ray Serve on this machine: Ray's own tracker and router before engines that publish KV events.

`tracker_app.py REQUESTS`: writes what became of so many requests, as a line of JSON. The tracker,
the router of requests, and how engines report to it are Ray's, unmodified; the engines only pretend
to compute.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import ray
from ray import serve
from ray.llm._internal.serve.routing_policies.kv_aware.kv_aware_router import KVAwareRouter
from ray.llm._internal.serve.routing_policies.kv_aware.kv_token_tracker import (
    KVTokenTracker,
    get_llm_router_handle,
    get_worker_id,
    set_kv_token_tracker,
)
from ray.serve.config import RequestRouterConfig

BLOCK_SIZE = 16
ENGINES = 2
AT_ONCE = 32
SPARE = {"num_cpus": 0.1}
DEADLINE_S = 60.0
KINDS = 7  # of prompts: each is asked for many times


@serve.deployment(
    name="LLMServer",
    num_replicas=ENGINES,
    ray_actor_options=SPARE,
    max_ongoing_requests=1000,
    request_router_config=RequestRouterConfig(
        request_router_class=KVAwareRouter, request_routing_stats_period_s=0.5
    ),
)
class Engine:
    """Publishes the blocks of what it is asked, and reports its requests as Ray's engines do."""

    def __init__(self) -> None:
        from lean_selector import KvEventPublisher
        from tests.support.running_service import free_port

        port = free_port()
        self._publisher = KvEventPublisher(
            kv_block_size=BLOCK_SIZE, endpoint=f"tcp://127.0.0.1:{port}"
        )
        self._endpoint = f"tcp://127.0.0.1:{port}"
        self._cached: set[tuple[int, ...]] = set()
        self._router = get_llm_router_handle()
        replica = serve.get_replica_context().replica_id
        self._worker_id = get_worker_id(replica.unique_id)

    def record_routing_stats(self) -> dict[str, Any]:
        return {
            "kv_event_metadata": {
                "endpoint": self._endpoint,
                "block_size": BLOCK_SIZE,
                "max_num_batched_tokens": 8192,
                "dp_rank": 0,
                "replay_endpoint": None,
            }
        }

    async def generate(
        self, payload: Any, request_token_ids: list[int] | None = None
    ) -> dict[str, int | bool]:
        assert request_token_ids is not None
        request_id = serve.context._get_serve_request_context().request_id
        prompt = tuple(request_token_ids)
        hit = prompt in self._cached
        if not hit:
            self._cached.add(prompt)
            blocks = len(prompt) // BLOCK_SIZE
            first = hash(prompt) & 0x7FFFFFFF
            self._publisher.publish_stored(
                token_ids=list(prompt[: blocks * BLOCK_SIZE]),
                num_block_tokens=[BLOCK_SIZE] * blocks,
                block_hashes=[first + n for n in range(blocks)],
            )
        crossings = range(BLOCK_SIZE, payload.max_tokens + 1, BLOCK_SIZE)
        for batch in (
            [("on_prefill_complete", (request_id,))],
            [("on_decode_progress", (request_id, tokens)) for tokens in crossings],
            [("on_request_completed", (request_id,))],
        ):
            await asyncio.sleep(0.005)
            await self._router.broadcast("on_lifecycle_events", batch).results_async(
                timeout_s=DEADLINE_S
            )
        return {"worker_id": self._worker_id, "hit": hit}


@serve.deployment(name="LLMRouter", ray_actor_options=SPARE, max_ongoing_requests=1000)
class LLMRouter:
    """Builds the tracker as Ray's own ingress does, and lets it be looked at."""

    async def __init__(self, engine: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        self._engine = engine
        self._tracker = KVTokenTracker(indexer_threads=1, serve_deployment_id=engine.deployment_id)
        set_kv_token_tracker(self._tracker)
        self._tracker.start_reservation_broadcast(get_llm_router_handle())
        engine._init()

    async def ask(self, token_ids: list[int], max_tokens: int) -> dict[str, int | bool]:
        payload = SimpleNamespace(max_tokens=max_tokens)
        done: dict[str, int | bool] = await self._engine.generate.remote(
            payload, request_token_ids=token_ids
        )
        return done

    async def on_lifecycle_events(self, batch: list[Any]) -> None:
        await self._tracker.on_lifecycle_events(batch)

    async def on_reservations_created(self, batch: list[Any]) -> None:
        await self._tracker.on_reservations_created(batch)

    async def seen(self) -> dict[str, Any]:
        service = self._tracker._svc
        loads = service.loads()
        return {
            "class": [kind.__name__ for kind in type(service).__mro__],
            "workers": [worker["worker_id"] for worker in service.list_workers()],
            "tracked": len(self._tracker._requests),
            "loads": [row for partition in loads for row in partition["loads"]],
            "indexed": sum(
                len(partition["events"])
                for partition in (await service.indexer_snapshot()).values()
            ),
        }


async def until(handle: Any, holds: Any, what: str) -> dict[str, Any]:
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        seen: dict[str, Any] = await handle.seen.remote()
        if holds(seen):
            return seen
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"{what}: {seen}")
        await asyncio.sleep(0.2)


def is_idle(seen: dict[str, Any]) -> bool:
    figures = ("potential_prefill_tokens", "potential_decode_blocks", "active_requests")
    return not seen["tracked"] and not any(row[name] for row in seen["loads"] for name in figures)


async def story(handle: Any, requests: int) -> dict[str, Any]:
    """So many requests, some at a time; what was seen of them."""
    await until(handle, lambda seen: len(seen["loads"]) == ENGINES, "all engines are registered")
    limit = asyncio.Semaphore(AT_ONCE)
    most = 0

    async def one(number: int) -> Any:
        tokens = [1 + number % KINDS] * (3 * BLOCK_SIZE + 5)
        async with limit:
            return await handle.ask.remote(tokens, 2 * BLOCK_SIZE)

    # The first of each kind, so that the index has something to find.
    first = [await one(number) for number in range(KINDS)]
    await until(handle, lambda seen: seen["indexed"] >= KINDS, "every kind of prompt is indexed")
    asked = [asyncio.create_task(one(number)) for number in range(KINDS, requests)]
    while not all(task.done() for task in asked):
        await asyncio.sleep(0.05)
        seen = await handle.seen.remote()
        most = max(most, sum(row["active_requests"] for row in seen["loads"]))
    done = [*first, *[task.result() for task in asked]]
    seen = await until(handle, is_idle, "all loads are zero")
    return {
        **seen,
        "requests": len(done),
        "hits": sum(each["hit"] for each in done),
        "served": sorted({each["worker_id"] for each in done}),
        "most_active": most,
    }


def main(requests: int) -> None:
    ray.init(
        num_cpus=2,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        configure_logging=False,
        runtime_env={"worker_process_setup_hook": "lean_selector.compat.install"},
    )
    serve.start(proxy_location="Disabled")
    router: Any = LLMRouter  # and the next: what Ray's decorator made of them
    engine: Any = Engine
    ingress = router.options(ray_actor_options=SPARE).bind(engine.bind())
    handle = serve.run(ingress, name="in-process", route_prefix=None)
    told = asyncio.run(story(handle, requests))
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    serve.delete("in-process")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
