"""One tiny completion at each engine, and whether its blocks come to the selector's index.

The prompt is new each time, made of small token ids that every vocabulary has, and the same for all
engines, so that what they call its first block can be compared.
"""

import asyncio
import random
import time
from typing import Final

import msgspec

from lean_selector.doctor.findings import Finding, Level
from lean_selector.doctor.replay import NoReplay, Replays
from lean_selector.doctor.selector_questions import Selector
from lean_selector.doctor.selector_shapes import Source, WorkerRecord
from lean_selector.outbound.client import OutboundClient
from lean_selector.outbound.failure import OutboundFailed
from lean_selector.outbound.url import base_without_version

BLOCKS: Final = 2  # full ones; one token more, so that an engine keeps both
_TOKEN_IDS: Final = range(10, 100)
_LOOK_EVERY_S: Final = 0.1
_SAID_CHARACTERS: Final = 200


class Probe:
    """Of all engines whose blocks have `block_size` tokens."""

    def __init__(
        self,
        selector: Selector,
        engines: OutboundClient,
        replays: Replays,
        block_size: int,
        patience_s: float,
    ) -> None:
        self._selector = selector
        self._engines = engines
        self._replays = replays
        self._patience_s = patience_s
        self._block_size = block_size
        self.prompt: Final = random.choices(_TOKEN_IDS, k=BLOCKS * block_size + 1)

    async def run(self, worker: WorkerRecord) -> Finding:
        """A completion, then patience until the index has its blocks at this worker."""
        subject = f"worker {worker.worker_id}"
        try:
            await self._complete(worker)
        except OutboundFailed as error:
            return Finding(
                Level.ERROR,
                subject,
                f"no completion: {error.message}",
                "check the engine, its model name and --worker-token-file",
            )
        began = time.monotonic()
        try:
            while not await self._is_known(worker):
                if time.monotonic() - began > self._patience_s:
                    return Finding(
                        Level.ERROR,
                        subject,
                        f"a completion of {BLOCKS} blocks was answered, and no event of them came "
                        f"in {self._patience_s:g} s",
                        "start the engine with prefix caching and KV events (vLLM: "
                        "--enable-prefix-caching --kv-events-config, SGLang: --kv-events-config)",
                    )
                await asyncio.sleep(_LOOK_EVERY_S)
        except (OutboundFailed, msgspec.DecodeError) as error:
            return Finding(Level.ERROR, "selector", f"POST /overlap_scores: {error}")
        return Finding(
            Level.OK, subject, f"the {BLOCKS} blocks of a completion came into the index as events"
        )

    async def _complete(self, worker: WorkerRecord) -> None:
        body = {"model": worker.model_name, "prompt": self.prompt, "max_tokens": 1}
        url = f"{base_without_version(worker.endpoint or '')}/v1/completions"
        answer = await self._engines.post(
            url, msgspec.json.encode(body), timeout_s=max(self._patience_s, 30.0)
        )
        if answer.status != 200:
            said = answer.body[:_SAID_CHARACTERS].decode(errors="replace")
            raise OutboundFailed(f"POST {url}: status {answer.status}: {said}", answer.status)

    async def _is_known(self, worker: WorkerRecord) -> bool:
        cached = await self._selector.cached_blocks(worker, self.prompt)
        return any(
            blocks >= BLOCKS
            for (worker_id, _), blocks in cached.items()
            if worker_id == worker.worker_id
        )

    async def first_hash(self, source: Source) -> int | None:
        """What this engine calls the prompt's first block; None when its replay does not tell."""
        if source.replay_endpoint is None:
            return None
        first = 0 if source.last_seq is None else source.last_seq + 1
        try:
            stored = await self._replays.stored_since(
                source.replay_endpoint, first, self._patience_s
            )
        except NoReplay:
            return None
        for event in stored:
            if event.parent_hash is None and event.token_ids == self.prompt[: len(event.token_ids)]:
                return event.block_hashes[0]
        return None


def judge_hashes(hashes: dict[str, int]) -> Finding | None:
    """`hashes`: of one block, by engine."""
    if len(hashes) < 2:
        return None
    if len(set(hashes.values())) == 1:
        return Finding(Level.OK, "engines", f"{len(hashes)} of them name the same block alike")
    return Finding(
        Level.NOTE,
        "engines",
        "they name the same block differently, as each start of vLLM without PYTHONHASHSEED does: "
        "no matter here, where blocks are known by their tokens; a shared cache needs one seed",
    )
