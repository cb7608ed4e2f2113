"""An engine as a check meets it: it completes prompts too, and has a replay of its KV events.

Caches what it is asked to complete, block by block, and publishes that, as vLLM does.
"""

import json
import random

from tests.support.fake_engine import BLOCK_SIZE, FakeEngine

MODEL = "tiny"


class ApiEngine(FakeEngine):
    """`publishes=False`: it caches and tells nobody."""

    def __init__(
        self,
        worker_id: int,
        *,
        block_size: int = BLOCK_SIZE,
        publishes: bool = True,
        seed: int = 0,
        token: str | None = None,
    ) -> None:
        super().__init__(
            MODEL,
            block_size=block_size,
            tells_sources=False,
            token=token,
            worker_id=worker_id,
            replay_endpoint="tcp://127.0.0.1:0",
        )
        self.worker_id = worker_id
        self.publishes = publishes
        self.prompts: list[list[int]] = []
        self._hashes = random.Random(seed)

    @property
    def events_endpoint(self) -> str:
        return self._publisher.endpoint

    @property
    def replay_endpoint(self) -> str:
        endpoint = self._publisher.replay_endpoint
        assert endpoint is not None
        return endpoint

    def registration(self, **more: object) -> dict[str, object]:
        """The body of POST /workers that fits; `more` replaces what is told."""
        return {
            "worker_id": self.worker_id,
            "model_name": MODEL,
            "endpoint": self.url,
            "block_size": self.block_size,
            "total_kv_blocks": 1_000,
            "kv_events_endpoint": self.events_endpoint,
            "replay_endpoint": self.replay_endpoint,
            **more,
        }

    def answer(self, path: str, authorization: str | None, sent: bytes) -> tuple[int, bytes]:
        status, body = super().answer(path, authorization, sent)
        if status != 404 or path != "/v1/completions":
            return status, body
        prompt = json.loads(sent)["prompt"]
        self.prompts.append(prompt)
        self.cache(prompt)
        return 200, b'{"choices":[{"text":"x","index":0}]}'

    def cache(self, prompt: list[int]) -> None:
        """Its full blocks, and publishes them."""
        full = len(prompt) // self.block_size
        if self.publishes and full:
            self._publisher.publish_stored(
                token_ids=prompt[: full * self.block_size],
                block_hashes=[self._hashes.getrandbits(63) for _ in range(full)],
            )
