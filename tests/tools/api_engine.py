"""An engine as a check meets it: its API over HTTP, its KV events and its replay over ZMQ.

Caches what it is asked to complete, block by block, and publishes that, as vLLM does.
"""

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from lean_selector.publisher import KvEventPublisher

MODEL = "tiny"


class ApiEngine:
    """Serves while entered. `publishes=False`: it caches and tells nobody. With the file
    `secret` its events are encrypted, and told to those alone who have a key of `clients`."""

    def __init__(
        self,
        worker_id: int,
        *,
        block_size: int = 16,
        publishes: bool = True,
        seed: int = 0,
        token: str | None = None,
        secret: str | None = None,
        clients: str | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.block_size = block_size
        self.publishes = publishes
        self.blocks = 100
        self.token = token
        self._secret = secret
        self._clients = clients
        self.prompts: list[list[int]] = []
        self._hashes = random.Random(seed)

    def __enter__(self) -> "ApiEngine":
        self._publisher = KvEventPublisher(
            worker_id=self.worker_id,
            kv_block_size=self.block_size,
            endpoint="tcp://127.0.0.1:0",
            replay_endpoint="tcp://127.0.0.1:0",
            curve_secret_key_file=self._secret,
            curve_client_keys_file=self._clients,
        )
        self.events_endpoint = self._publisher.endpoint
        assert self._publisher.replay_endpoint is not None
        self.replay_endpoint: str = self._publisher.replay_endpoint
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine._answer(self, None)

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                engine._answer(self, json.loads(self.rfile.read(length)))

            def log_message(self, *_: Any) -> None:
                """Not into the test's output."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._publisher.close()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def registration(self, **more: object) -> dict[str, object]:
        """The body of POST /workers that fits; `more` replaces what is told."""
        return {
            "worker_id": self.worker_id,
            "model_name": MODEL,
            "endpoint": self.endpoint,
            "block_size": self.block_size,
            "total_kv_blocks": self.blocks,
            "kv_events_endpoint": self.events_endpoint,
            "replay_endpoint": self.replay_endpoint,
            **more,
        }

    def _answer(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        status, answer = 200, b"{}"
        if self.token and request.headers["authorization"] != f"Bearer {self.token}":
            status, answer = 401, b'{"error":"a token is needed"}'
        elif request.path == "/v1/models":
            answer = json.dumps({"data": [{"id": MODEL, "owned_by": "vllm"}]}).encode()
        elif request.path == "/metrics":
            answer = (
                "# TYPE vllm:cache_config_info gauge\n"
                f'vllm:cache_config_info{{block_size="{self.block_size}",engine="0",'
                f'num_gpu_blocks="{self.blocks}"}} 1.0\n'
            ).encode()
        elif request.path == "/v1/completions" and body is not None:
            self.prompts.append(body["prompt"])
            self.cache(body["prompt"])
            answer = json.dumps({"choices": [{"text": "x", "index": 0}]}).encode()
        elif request.path != "/health":
            status = 404
        request.send_response(status)
        request.send_header("content-length", str(len(answer)))
        request.end_headers()
        request.wfile.write(answer)

    def cache(self, prompt: list[int]) -> None:
        """Its full blocks, and publishes them."""
        full = len(prompt) // self.block_size
        if self.publishes and full:
            self._publisher.publish_stored(
                token_ids=prompt[: full * self.block_size],
                block_hashes=[self._hashes.getrandbits(63) for _ in range(full)],
            )
