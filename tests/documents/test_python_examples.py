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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lean_selector.client import KvPushRouter, KvRouter
from tests.client.fleet import MODEL, Fleet
from tests.documents.pages import PYTHON, python_example
from tests.documents.test_ray_examples import RAY_EXAMPLES
from tests.support.running_service import RunningService

# Words by which each example is found in its document.
FIRST = python_example("async with KvRouter(")
AUTOMATIC = python_example("router_config_override=")
MANUAL = python_example('mark_prefill_complete("req-123")')
HIERARCHICAL = python_example("# Probe several routers")
CUSTOM = python_example("custom_cost_fn")
TTFT = python_example("fastest = min(")
RESERVE = python_example("router.reserve(")
SYNCHRONOUS = python_example("router.generate([1, 2, 3, 4]")
HASHES = python_example("assert block_hashes(")
IN_PROCESS = python_example("service = SelectionService()")
SHIM = python_example("from dynamo.llm import SelectionService")
WITH_A_TOKEN = python_example("cert=None,")
FASTAPI = python_example("app = FastAPI()")
EXAMPLES = [
    *(FIRST, AUTOMATIC, MANUAL, HIERARCHICAL, CUSTOM, TTFT, RESERVE, SYNCHRONOUS),
    *(HASHES, IN_PROCESS, SHIM, WITH_A_TOKEN, FASTAPI, *RAY_EXAMPLES),
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
    ("example", "says"), [(FIRST, " t0 t1 t2"), (AUTOMATIC, "Generated 20 tokens: [1000, ")]
)
def test_scripts(fleet: Fleet, example: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(code(example, _8092=fleet.endpoint), {})
    assert capsys.readouterr().out.startswith(says)
    assert fleet.total() == (0, 0, 0)


def test_least_time_to_first_token_avoids_the_rank_that_computes(fleet: Fleet) -> None:
    booked = {"model_name": MODEL, "reservation_id": "r", "worker_id": 1, "dp_rank": 0}
    prompt = {"token_ids": TOKENS, "effective_prefill_tokens": 40}
    assert fleet.service.post("/reservations", {**booked, **prompt})[0] == 201
    with_router(fleet, TTFT)
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
    endpoints = {number: worker.url for number, worker in fleet.workers.items()}
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


def test_the_hashes() -> None:
    exec(code(HASHES), {})


def test_the_selector_inside_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    exec(code(IN_PROCESS), {})
    assert capsys.readouterr().out == "1 0 http://worker-1:8000\n"


def test_a_token_of_a_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("admin secret\n")
    with RunningService("--auth-token-file", str(tokens)) as service:
        service.token = "secret"
        service.add_worker(7, model_name=MODEL, kv_events_endpoint="tcp://127.0.0.1:1")
        exec(code(WITH_A_TOKEN, _8092=f"http://127.0.0.1:{service.port}"), {})
    assert capsys.readouterr().out == "(7, 0, 0)\n"


def test_raw_requests_behind_fastapi() -> None:
    async def main(fleet: Fleet) -> None:
        left = await fragment(FASTAPI, {}, _8092=fleet.endpoint)
        transport = httpx.ASGITransport(left["app"])
        client = httpx.AsyncClient(transport=transport, base_url="http://app")
        async with left["router"], left["workers"], client:
            answer = await client.post("/v1/completions", json={"prompt": "a b", "max_tokens": 2})
        assert (answer.status_code, answer.text.count("data: ")) == (200, 4)
        assert sum(len(worker.requests) for worker in fleet.workers.values()) == 1
        assert fleet.total() == (0, 0, 0)

    with Fleet(2, "--prompts", "off") as fleet:
        asyncio.run(main(fleet))


def test_the_shim() -> None:
    """In a process of its own: it changes what can be imported."""
    program = SHIM + "print(SelectionService.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("lean_selector.embedded.service\n", "")


def test_every_printed_example_is_one_of_these() -> None:
    assert sorted(set(PYTHON)) == sorted(EXAMPLES)
