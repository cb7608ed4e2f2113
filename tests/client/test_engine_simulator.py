"""NVIDIA's engine simulator, unmodified, behind the selector.

By hand, with an interpreter of its own for the simulator:

    python3 -m venv /tmp/mocker && /tmp/mocker/bin/pip install ai-dynamo==1.3.1
    LEAN_SELECTOR_MOCKER=/tmp/mocker/bin/python pytest -m engine tests/client

Each worker is a `dynamo.mocker` with its ZMQ events and replay, and a `dynamo.frontend` that gives
it an OpenAI-compatible port; file discovery, so neither etcd nor NATS is needed. The simulator of
1.3.1 leaves `prompt_tokens_details` out, so its frontend's own KV router is the witness of what a
worker holds: `kv_hit_rate`, in blocks of the prompt, the partial one counted.
"""

import asyncio
import contextlib
import http.client
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lean_selector.client import KvRouter
from tests.client.tiny_model import VOCABULARY, write_model
from tests.support.running_service import RunningService, free_port, wait_until

MOCKER = os.environ.get("LEAN_SELECTOR_MOCKER", "")
BLOCK_SIZE = 16
START_S = 90.0

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not MOCKER, reason="LEAN_SELECTOR_MOCKER names no interpreter"),
]


class Mocker:
    """One simulated engine and its frontend, in a namespace of their own."""

    def __init__(self, worker_id: int, model: Path, folder: Path) -> None:
        self.worker_id = worker_id
        self.model = str(model)
        self.port, self.events, self.replay = free_port(), free_port(), free_port()
        self._log = folder / f"worker-{worker_id}.log"
        space = f"w{worker_id}"
        self._env = {
            **os.environ,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_NAMESPACE": space,
            "HF_HUB_OFFLINE": "1",
        }
        engine = (
            f"--model-path {model} --model-name {model} --endpoint dyn://{space}.backend.generate"
        )
        ports = f"--zmq-kv-events-ports {self.events} --zmq-replay-ports {self.replay}"
        self._commands = [
            f"dynamo.mocker {engine} --block-size {BLOCK_SIZE} --num-workers 1 {ports}",
            # Its own KV router has one worker to choose from, and tells what that one holds.
            f"dynamo.frontend --http-port {self.port} --namespace {space} --router-mode kv"
            f" --kv-cache-block-size {BLOCK_SIZE}",
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator["Mocker"]:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with self._log.open("w") as log:
                processes.extend(
                    subprocess.Popen(
                        [MOCKER, "-m", *command.split()], env=self._env, stdout=log, stderr=log
                    )
                    for command in self._commands
                )
            wait_until(self._serves, f"worker {self.worker_id} serves, see {self._log}", START_S)
            yield self
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()

    def _serves(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", "/v1/models")
            return bool(json.loads(connection.getresponse().read())["data"])
        return False

    def hit_rate(self, tokens: list[int]) -> float:
        """What the worker's own frontend knows to be cached; the prompt is cached afterwards."""
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": 1,
            "nvext": {"extra_fields": ["timing"]},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = json.loads(connection.getresponse().read())
        return float(answer["nvext"]["timing"]["kv_hit_rate"])

    def registration(self) -> dict[str, object]:
        return {
            "worker_id": self.worker_id,
            "model_name": "simulated",
            "endpoint": f"http://127.0.0.1:{self.port}",
            "block_size": BLOCK_SIZE,
            "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{self.events}"},
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay}",
        }


async def placed(router: KvRouter, tokens: list[int], model: str) -> tuple[int, int]:
    """Runs a prompt: the worker it went to, and how many of its blocks were cached there."""
    stream = await router.generate(tokens, model, {"max_tokens": 4, "ignore_eos": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    return stream.worker_id, stream.overlap_blocks


def test_repeated_prompts_go_where_they_are_cached(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(12 * BLOCK_SIZE + 3)] for _ in range(8)]
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(RunningService())
        mockers = [Mocker(number, model, tmp_path) for number in (1, 2)]
        for mocker in mockers:
            stack.enter_context(mocker.running())
            assert service.post("/workers", mocker.registration())[0] == 201

        def indexed(prompt: list[int], worker_id: int) -> Callable[[], bool]:
            def check() -> bool:
                body = {"model_name": "simulated", "token_ids": prompt}
                rows = service.post("/overlap_scores", body)[1]["workers"]
                most = max(rows, key=lambda row: int(row["device_blocks"]))
                return bool(most["worker_id"] == worker_id and most["device_blocks"] == 12)

            return check

        async def main() -> None:
            # This frontend refuses fields that it does not know.
            async with KvRouter(
                f"http://127.0.0.1:{service.port}", return_token_ids=False
            ) as router:
                first = [await placed(router, prompt, str(model)) for prompt in prompts]
                assert {worker for worker, _ in first} == {1, 2}
                for prompt, (worker, _) in zip(prompts, first, strict=True):
                    await asyncio.to_thread(wait_until, indexed(prompt, worker), "it is indexed")
                again = [await placed(router, prompt, str(model)) for prompt in prompts]
                assert again == [(worker, 12) for worker, _ in first]
                for prompt, (worker, _) in zip(prompts, again, strict=True):
                    there, elsewhere = mockers[worker - 1], mockers[2 - worker]
                    assert there.hit_rate(prompt) == pytest.approx(12 / 13)
                    assert elsewhere.hit_rate(prompt) == 0.0

        asyncio.run(main())
        loads = service.get("/loads")[1][0]["loads"]
        assert [row["active_requests"] for row in loads] == [0, 0]
