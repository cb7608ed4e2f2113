"""An engine as far as a selector asks it: real HTTP, and a real publisher of KV events."""

import json
import random
import ssl
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

from lean_selector.publisher import KvEventPublisher
from tests.support.running_service import free_port
from tests.support.threaded_server import ThreadedServer, body_of, send

BLOCK_SIZE = 16


class FakeEngine:
    """Answers as vLLM does, or as SGLang. What it answers may be changed while it runs.

    It caches what it is asked to complete, block by block, and publishes that."""

    def __init__(
        self,
        model: str = "m",
        *,
        block_size: int = BLOCK_SIZE,
        kind: str = "vllm",
        tells_sources: bool = True,
        publishes: bool = True,
        seed: int = 0,
        token: str | None = None,
        context: ssl.SSLContext | None = None,
        **publisher: Any,
    ) -> None:
        """`publishes` False: it caches and tells nobody. `seed`: of its hashes. `publisher`: what
        its KvEventPublisher is given besides."""
        self.model, self.block_size, self.kind = model, block_size, kind
        self.tells_sources = tells_sources
        self.token = token
        self.publishes, self._hashes = publishes, random.Random(seed)
        self.asked: Counter[str] = Counter()
        self.prompts: list[list[int]] = []  # that it completed
        self.status = 200  # another one is that of every answer; 0: it does not answer
        self._closed = threading.Event()
        self.events_port = free_port()
        self.publisher = KvEventPublisher(
            kv_block_size=block_size, endpoint=f"tcp://127.0.0.1:{self.events_port}", **publisher
        )
        # Once closed it answers nothing more: no connection is kept.
        self._server = ThreadedServer(self._respond, context=context, keeps=False)
        self.port, self.url = self._server.port, self._server.url

    def _respond(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked[handler.path] += 1
        sent = body_of(handler)
        send(handler, *self.answer(handler.path, handler.headers.get("authorization"), sent))

    def answer(self, path: str, authorization: str | None, sent: bytes) -> tuple[int, bytes]:
        if self.token is not None and authorization != f"Bearer {self.token}":
            return 401, b'{"error":"Unauthorized"}'
        if not self.status:
            self._closed.wait()
        if self.status != 200:
            return self.status, b"starting"
        if path == "/v1/completions":
            prompt = json.loads(sent)["prompt"]
            self.prompts.append(prompt)
            self.cache(prompt)
            return 200, b'{"choices":[{"text":"x","index":0}]}'
        body = self._answers().get(path)
        return (404, b'{"detail":"Not Found"}') if body is None else (200, body)

    def _answers(self) -> dict[str, bytes]:
        row = {"id": self.model, "object": "model", "owned_by": self.kind, "parent": None}
        adapter = {"id": "adapter", "object": "model", "owned_by": self.kind, "parent": self.model}
        answers = {"/v1/models": _json({"object": "list", "data": [adapter, row]})}
        answers |= {"/health": b"", "/livez": b""}
        if self.kind == "sglang":
            events = {
                "publisher": "zmq",
                "endpoint_host": "*",
                "endpoint_port_base": self.events_port,
                "dp_size": 1,
            }
            info = {"page_size": self.block_size, "max_total_num_tokens": 16_000, "dp_size": 1}
            answers["/get_server_info"] = _json({**info, "kv_events": events})
            return answers
        answers["/metrics"] = (
            b'vllm:num_requests_running{engine="0"} 0.0\n'
            b'vllm:cache_config_info{block_size="%d",engine="0",num_gpu_blocks="1000"} 1.0\n'
        ) % self.block_size
        if self.tells_sources:
            source = {"data_parallel_rank": 0, "endpoint": f"tcp://*:{self.events_port}"}
            answers["/kv_event_sources"] = _json([source])
        return answers

    def registration(self, worker_id: int, **more: object) -> dict[str, object]:
        """The body of POST /workers that fits; `more` replaces what is told."""
        return {
            "worker_id": worker_id,
            "model_name": self.model,
            "endpoint": self.url,
            "block_size": self.block_size,
            "total_kv_blocks": 1_000,
            "kv_events_endpoint": self.publisher.endpoint,
            "replay_endpoint": self.publisher.replay_endpoint,
            **more,
        }

    def cache(self, prompt: list[int]) -> None:
        """Its full blocks, and publishes them."""
        full = len(prompt) // self.block_size
        if self.publishes and full:
            self.publisher.publish_stored(
                token_ids=prompt[: full * self.block_size],
                block_hashes=[self._hashes.getrandbits(63) for _ in range(full)],
            )

    def store(self, tokens: list[int], first_hash: int) -> None:
        """Publishes that it holds these tokens, whole blocks of them."""
        count = len(tokens) // self.block_size
        self.publisher.publish_stored(
            token_ids=tokens,
            num_block_tokens=[self.block_size] * count,
            block_hashes=[first_hash + n for n in range(count)],
        )

    def close(self) -> None:
        self._closed.set()
        self._server.close()
        self.publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
