"""The Python examples of the documents, run as printed.

Only the addresses are changed to those of the test. The five patterns are those of the router
examples document: automatic, manual state, hierarchical probing, custom load-based, and least time
to first token.
"""

import ast
import asyncio
import inspect
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from lean_selector.client import KvPushRouter, KvRouter
from tests.client.fleet import MODEL, Fleet
from tests.documents.pages import OURS, blocks
from tests.documents.test_ray_examples import RAY_EXAMPLES
from tests.support.running_service import RunningService

FIRST = """\
import asyncio
from lean_selector import KvRouter

async def main():
    async with KvRouter("http://localhost:8092", block_size=16) as router:
        stream = await router.generate(
            token_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
            model="model-name",
            stop_conditions={"max_tokens": 20},
        )
        async for chunk in stream:
            print(chunk.get("text", ""), end="")

asyncio.run(main())
"""
AUTOMATIC = """\
import asyncio
from lean_selector import KvPushRouter, KvRouterConfig

async def main():
    router = KvPushRouter(
        endpoint="http://localhost:8092",  # or "unix:/run/lean-selector.sock"
        block_size=16,
        kv_router_config=KvRouterConfig(),
    )
    token_ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    stream = await router.generate(
        token_ids=token_ids,
        model="model-name",
        stop_conditions={"max_tokens": 20, "ignore_eos": True},
        sampling_options={"temperature": 0.7, "top_p": 0.9},
        router_config_override={
            "overlap_score_weight": 2.0,  # prioritize cache hits for this request
            "router_temperature": 0.5,    # add routing randomness
        },
    )
    generated_tokens = []
    async for response in stream:
        if "token_ids" in response:
            generated_tokens.extend(response["token_ids"])
    print(f"Generated {len(generated_tokens)} tokens: {generated_tokens}")
    await router.aclose()

asyncio.run(main())
"""
MANUAL = """\
import httpx

worker_id, _dp_rank, overlap = await router.best_worker(tokens, request_id="req-123")
try:
    endpoint = endpoints[worker_id]  # as you registered it
    request = {"model": "model-name", "prompt": tokens, "stream": True}
    async with httpx.AsyncClient() as client:
        async with client.stream("POST", f"{endpoint}/v1/completions", json=request) as response:
            lines = response.aiter_lines()
            await anext(lines)  # the first token
            await router.mark_prefill_complete("req-123")
            async for line in lines:
                ...
finally:
    await router.free("req-123")
"""
HIERARCHICAL = """\
# Probe several routers without booking anything.
worker_id_1, dp_rank, overlap_1 = await router_1.best_worker(tokens)  # no request_id
worker_id_2, dp_rank, overlap_2 = await router_2.best_worker(tokens)

# Go where more of the prompt is cached.
if overlap_1 > overlap_2:
    chosen_router, worker_id = router_1, worker_id_1
else:
    chosen_router, worker_id = router_2, worker_id_2
stream = await chosen_router.generate(tokens, model="model-name", worker_id=worker_id)
"""
CUSTOM = """\
def custom_cost_fn(load):
    return load["potential_prefill_tokens"] + 16 * load["potential_decode_blocks"]

loads = await router.get_potential_loads(tokens)
best = min(loads, key=custom_cost_fn)
stream = await router.generate(
    tokens, model="model-name", worker_id=best["worker_id"], dp_rank=best["dp_rank"]
)
"""
TTFT = """\
import asyncio
from lean_selector import KvPushRouter, KvRouterConfig

async def minimize_ttft_routing():
    router = KvPushRouter(
        endpoint="http://localhost:8092", block_size=16, kv_router_config=KvRouterConfig()
    )
    token_ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    potential_loads = await router.get_potential_loads(token_ids)
    best_worker = min(potential_loads, key=lambda x: x["potential_prefill_tokens"])
    print(f"Selected worker {best_worker['worker_id']} "
          f"with {best_worker['potential_prefill_tokens']} prefill tokens")
    stream = await router.generate(
        token_ids=token_ids,
        model="model-name",
        worker_id=best_worker["worker_id"],  # only this worker
        stop_conditions={"max_tokens": 20},
    )
    async for response in stream:
        if "token_ids" in response:
            print(f"Generated tokens: {response['token_ids']}")
    await router.aclose()

asyncio.run(minimize_ttft_routing())
"""
RESERVE = """\
async with router.reserve(tokens) as placement:
    print(placement.worker_id, placement.dp_rank, placement.endpoint, placement.overlap_blocks)
    ...                                  # send the request to placement.endpoint yourself
    await placement.prefill_complete()   # at the first token
    await placement.output_block()       # whenever block_size more tokens are there
"""
SYNCHRONOUS = """\
from lean_selector import SyncKvRouter

with SyncKvRouter("http://localhost:8092", block_size=16) as router:
    for chunk in router.generate([1, 2, 3, 4], "model-name", {"max_tokens": 20}):
        print(chunk.get("text", ""), end="")
"""
SLOT_TRACKER = """\
from lean_selector import SlotTracker, block_hashes, sequence_hashes

async with SlotTracker("http://localhost:8091", "llama-3-8b") as tracker:
    await tracker.register(7, block_size=16, dp_size=2)
    hashes = sequence_hashes(block_hashes(tokens, block_size=16))
    await tracker.add("req-123", 7, hashes, new_isl_tokens=len(tokens), dp_rank=0)
    await tracker.prefill_complete("req-123")
    print(await tracker.loads())
    await tracker.free("req-123")
"""
HASHES = """\
from lean_selector import block_hashes, sequence_hashes

local = block_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], block_size=4)
assert local == [14643705804678351452, 16777012769546811212]
assert sequence_hashes(local) == [14643705804678351452, 4945711292740353085]
assert block_hashes([1, 2, 3, 4], 4, lora_name="adapter") != local[:1]
"""
IN_PROCESS = """\
import asyncio
from lean_selector import SelectionService

async def main():
    service = SelectionService()  # or RemoteSelectionService("http://localhost:8092")
    await service.upsert_worker({
        "worker_id": 1, "model_name": "llama", "endpoint": "http://worker-1:8000", "block_size": 16,
        "kv_events_endpoints": {0: "tcp://worker-1:5557"}, "max_num_batched_tokens": 8192,
    })
    prompt = {"model_name": "llama", "token_ids": list(range(40))}
    chosen = await service.select_and_reserve({**prompt, "selection_id": "request-1"})
    print(chosen["worker_id"], chosen["dp_rank"], chosen["endpoint"])
    await service.prefill_complete("request-1")   # at the first token
    service.add_output_block("request-1")         # whenever block_size more tokens are there
    await service.free_reservation("request-1")   # at the end
    await service.shutdown_async()

asyncio.run(main())
"""
SHIM = """\
from lean_selector import compat

compat.install()  # or compat.install("unix:/run/lean-selector.sock")
from dynamo.llm import SelectionService
"""
WITH_A_TOKEN = """\
from lean_selector.client import SyncSlotTracker

with SyncSlotTracker(
    "http://localhost:8091",  # https://... in earnest
    "model-name",
    verify=True,              # or the path of a PEM file, an SSLContext; False believes anybody
    cert=None,                # or the path of a certificate with its key, or a pair of paths
    token=lambda: "secret",   # or "secret"; a function is asked before each request
) as tracker:
    tracker.register(7, block_size=16)
"""
EXAMPLES = [
    WITH_A_TOKEN,
    IN_PROCESS,
    SHIM,
    *RAY_EXAMPLES,
    FIRST,
    AUTOMATIC,
    MANUAL,
    HIERARCHICAL,
    CUSTOM,
    TTFT,
    RESERVE,
    SYNCHRONOUS,
    SLOT_TRACKER,
    HASHES,
]
TOKENS = list(range(1, 41))


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(2, block_size=16) as running:
        yield running


def code(example: str, **addresses: str) -> Any:
    for port, address in addresses.items():
        example = example.replace(f"http://localhost:{port[1:]}", address)
    return compile(example, "<document>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


async def fragment(example: str, names: dict[str, Any], **addresses: str) -> dict[str, Any]:
    """Run an example with `await` at its top level; the names it leaves behind."""
    result = eval(code(example, **addresses), names)
    if inspect.iscoroutine(result):
        await result
    return names


@pytest.mark.parametrize(
    ("example", "says"),
    [
        (FIRST, " t0 t1 t2"),
        (AUTOMATIC, "Generated 20 tokens: [1000, "),
        (TTFT, "Selected worker "),
    ],
)
def test_scripts(fleet: Fleet, example: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code(example, _8092=fleet.endpoint), {})
    assert capsys.readouterr().out.startswith(says)
    assert fleet.total() == (0, 0, 0)


def test_least_time_to_first_token_avoids_the_rank_that_computes(fleet: Fleet) -> None:
    booked = {"model_name": MODEL, "reservation_id": "r", "worker_id": 1, "dp_rank": 0}
    prompt = {"token_ids": TOKENS, "effective_prefill_tokens": 40}
    assert fleet.service.post("/reservations", {**booked, **prompt})[0] == 201
    exec(code(TTFT, _8092=fleet.endpoint), {})
    assert (len(fleet.workers[1].requests), len(fleet.workers[2].requests)) == (0, 1)


def with_router(fleet: Fleet, example: str, **names: Any) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with KvRouter(fleet.endpoint, 16) as router:
            left = await fragment(example, {"router": router, "tokens": TOKENS, **names})
            if "stream" in left:
                left["chunks"] = [chunk async for chunk in left["stream"]]
            return left

    return asyncio.run(main())


def test_manual_state_management(fleet: Fleet) -> None:
    endpoints = {number: worker.endpoint for number, worker in fleet.workers.items()}
    left = with_router(fleet, MANUAL, endpoints=endpoints)
    assert len(fleet.workers[left["worker_id"]].requests) == 1
    assert fleet.total() == (0, 0, 0)


def test_hierarchical_probing(fleet: Fleet) -> None:
    async def main() -> None:
        with Fleet(1, block_size=16) as second:
            one, two = KvPushRouter(fleet.endpoint, 16), KvPushRouter(second.endpoint, 16)
            async with one, two:
                names = {"router_1": one, "router_2": two, "tokens": TOKENS}
                left = await fragment(HIERARCHICAL, names)
                assert left["chosen_router"] is two  # nothing is cached anywhere
                assert second.total() == (40, 2, 1)
                assert fleet.total() == (0, 0, 0)
                await left["stream"].aclose()

    asyncio.run(main())


def test_custom_load_based_routing(fleet: Fleet) -> None:
    booked = {"model_name": MODEL, "reservation_id": "r", "worker_id": 2, "token_ids": TOKENS}
    assert fleet.service.post("/reservations", booked)[0] == 201
    left = with_router(fleet, CUSTOM)
    assert left["best"]["worker_id"] == 1
    assert left["chunks"][0]["token_ids"] == [1000]
    assert len(fleet.workers[1].requests) == 1


def test_reserving(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    with_router(fleet, RESERVE)
    assert capsys.readouterr().out.rstrip().endswith(" 0")
    assert fleet.total() == (0, 0, 0)


def test_without_an_event_loop(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code(SYNCHRONOUS, _8092=fleet.endpoint), {})
    assert capsys.readouterr().out == "".join(f" t{number}" for number in range(20))
    assert fleet.total() == (0, 0, 0)


def test_the_slot_tracker(capsys: pytest.CaptureFixture[str]) -> None:
    with RunningService(module="lean_selector.slot_tracker") as service:
        address = f"http://127.0.0.1:{service.port}"
        work: Coroutine[Any, Any, Any] = fragment(SLOT_TRACKER, {"tokens": TOKENS}, _8091=address)
        asyncio.run(work)
    assert "'active_decode_blocks': 2" in capsys.readouterr().out


def test_the_hashes() -> None:
    exec(code(HASHES), {})


def test_the_selector_inside_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    exec(code(IN_PROCESS), {})
    assert capsys.readouterr().out == "1 0 http://worker-1:8000\n"


def test_the_same_in_front_of_a_service(capsys: pytest.CaptureFixture[str]) -> None:
    remote = IN_PROCESS.replace("SelectionService", "RemoteSelectionService", 1)
    remote = remote.replace("SelectionService()", 'RemoteSelectionService("http://localhost:8092")')
    with RunningService() as service:
        exec(code(remote, _8092=f"http://127.0.0.1:{service.port}"), {})
        assert capsys.readouterr().out == "1 0 http://worker-1:8000\n"
        assert service.get("/loads")[1][0]["loads"][0]["active_requests"] == 0


def test_a_token_of_a_client(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("admin secret\n")
    flags = ("--auth-token-file", str(tokens))
    with RunningService(*flags, module="lean_selector.slot_tracker") as service:
        exec(code(WITH_A_TOKEN, _8091=f"http://127.0.0.1:{service.port}"), {})
        status, rows = service.request(
            "GET", "/workers", headers={"authorization": "Bearer secret"}
        )
        assert (status, [row["worker_id"] for row in rows]) == (200, [7])


def test_the_shim() -> None:
    """In a process of its own: it changes what can be imported."""
    program = SHIM + "print(SelectionService.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("lean_selector.inprocess.service\n", "")


def test_every_example_of_a_document_is_one_of_these() -> None:
    printed = [text for page in OURS.values() for kind, text in blocks(page) if kind == "python"]
    assert sorted(printed) == sorted(EXAMPLES)
