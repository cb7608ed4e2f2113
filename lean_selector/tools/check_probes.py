"""`lean-selector check --probe`: sends a completion to each engine, then checks whether the KV
events for its blocks reach the selector.

Each engine gets a different prompt, which shows whether an event or replay endpoint is registered
for the wrong engine. Only the first block is the same in all prompts. This block shows whether all
engines give a block the same hash. Token ids are small, so that every vocabulary has them."""

import asyncio
import random
from contextlib import suppress
from typing import Final

import msgspec

from lean_selector.api.judgements import Level, subject_of
from lean_selector.core.hashing import packed_tokens
from lean_selector.core.index.shapes import BlockStored
from lean_selector.http.outbound import OutboundFailed
from lean_selector.http.urls import base_without_version
from lean_selector.tools.check_questions import Asked, NoReplay, NotASelector, stored_since
from lean_selector.wire.findings import CheckedWorker, Finding, SelectorFacts
from lean_selector.wire.selection_bodies import KvSource

_TOKEN_IDS: Final = range(10, 100)
_LEAST_OWN: Final = 16  # tokens that only this engine gets; too many to be equal by chance
_LOOK_EVERY_S: Final = 0.1
_SAID_CHARACTERS: Final = 200
_MOST_ASKED: Final = 16  # engines whose batches are requested from a replay endpoint


class Probe:
    """The prompt for one worker: a first block that all prompts share, random blocks, and one more
    token, so that engines cache all blocks before this token."""

    def __init__(self, worker: CheckedWorker, first: list[int]) -> None:
        self.worker = worker
        size = len(first)
        self.own: Final = random.choices(_TOKEN_IDS, k=-(-_LEAST_OWN // size) * size)
        self.prompt: Final = [*first, *self.own, random.choice(_TOKEN_IDS)]
        self.blocks: Final = 1 + len(self.own) // size
        self.subject: Final = f"worker {worker.worker_id}"

    def error(self, what: str, mend: str) -> Finding:
        return Finding(Level.ERROR, self.subject, what, mend)

    def arrived(self) -> Finding:
        what = f"the {self.blocks} blocks of a completion arrived in the index as events"
        return Finding(Level.OK, self.subject, what)

    def is_in(self, stored: list[BlockStored]) -> bool:
        """Whether the events `stored` have the tokens of this prompt's random blocks."""
        return packed_tokens(self.own) in b"".join([event.tokens for event in stored])

    def first_hash(self, stored: list[BlockStored]) -> int | None:
        """Return the engine's hash of the prompt's first block; None if no event stores it."""
        for event in stored:
            is_first = event.parent_hash is None and len(event.engine_hashes) > 0
            if is_first and packed_tokens(self.prompt).startswith(event.tokens):
                return int.from_bytes(event.engine_hashes[:8], "little")
        return None


class Probes:
    """A prompt for each worker that has an endpoint and a block size. Call `run` only once."""

    def __init__(self, asked: Asked, facts: SelectorFacts) -> None:
        self._asked = asked
        self._sources = facts.sources or []  # before the probes
        self._exchanged: set[int] = set()  # workers whose events or endpoint belong to another one
        firsts: dict[int, list[int]] = {}  # by block size
        self._probes: dict[int, Probe] = {}
        for worker in facts.workers:
            if worker.endpoint and (size := worker.block_size):
                first = firsts.setdefault(size, random.choices(_TOKEN_IDS, k=size))
                self._probes[worker.worker_id] = Probe(worker, first)

    async def run(self) -> list[Finding]:
        """Sends the prompts, and returns findings about the events."""
        found = await asyncio.gather(*map(self._probe, self._probes.values()))
        return [*found, *await self._judge_replays()]

    # -- completions -------------------------------------------------------------------------------

    async def _probe(self, probe: Probe) -> Finding:
        """Sends the prompt, and finds out what becomes of its KV events."""
        async with self._asked.turn:
            try:
                await self._complete(probe)
            except OutboundFailed as error:
                mend = "check the engine, its model name and --worker-token-file"
                return probe.error(f"no completion: {error.message}", mend)
            worker_id = probe.worker.worker_id
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._asked.patience_s):
                        while worker_id not in await self._holders(probe):  # noqa: ASYNC110
                            await asyncio.sleep(_LOOK_EVERY_S)  # it is asked, not told
                        return probe.arrived()
                return await self._why_not(probe)
            except (OutboundFailed, msgspec.DecodeError, NotASelector) as error:
                return Finding(Level.ERROR, "selector", f"POST /overlap_scores: {error}")

    async def _complete(self, probe: Probe) -> None:
        body = {"model": probe.worker.model_name, "prompt": probe.prompt, "max_tokens": 1}
        url = f"{base_without_version(probe.worker.endpoint or '')}/v1/completions"
        answer = await self._asked.engines.request(
            "POST", url, msgspec.json.encode(body), timeout_s=max(self._asked.patience_s, 30.0)
        )
        if answer.status != 200:
            said = answer.body[:_SAID_CHARACTERS].decode(errors="replace")
            raise OutboundFailed(f"POST {url}: status {answer.status}: {said}", answer.status)

    async def _holders(self, probe: Probe, is_eagle: bool | None = None) -> set[int]:
        """Return the workers that have all of the prompt, as the selector believes."""
        holders = self._asked.selector.holders
        return await holders(probe.worker, probe.prompt, probe.blocks, is_eagle)

    async def _why_not(self, probe: Probe) -> Finding:
        """Finds out why the prompt's blocks do not count for its worker."""
        worker_id = probe.worker.worker_id
        holders = await self._holders(probe)
        if worker_id in holders:
            return probe.arrived()  # they arrived late
        if holders:
            self._exchanged.add(worker_id)
            other = min(holders)
            return probe.error(
                f"the {probe.blocks} blocks of its completion count for worker {other}",
                f"swap the kv_events_endpoint, or the endpoint, of {probe.subject} and worker "
                f"{other}: each has those of its own engine",
            )
        for is_eagle, unit in ((True, "pairs of tokens (EAGLE)"), (False, "single tokens")):
            if worker_id in await self._holders(probe, is_eagle):
                return probe.error(
                    f"its blocks were hashed over {unit}, but its registration says otherwise: "
                    "none of them matches",
                    "DELETE all workers of its model, then POST them with "
                    f'"is_eagle": {str(is_eagle).lower()}',
                )
        before = {(each.worker_id, each.dp_rank): each for each in self._sources}
        answered = f"a completion of {probe.blocks} blocks was answered, and"
        for source in (await self._asked.selector.facts()).sources or []:
            old = before.get((source.worker_id, source.dp_rank))
            if source.worker_id != worker_id or old is None:
                continue
            if source.skipped != old.skipped:
                why = source.problem or ", ".join(source.skipped)
                return probe.error(
                    f"{answered} the events that arrived were skipped: {why}",
                    "DELETE the worker, then POST it with the engine's block_size and is_eagle",
                )
            if source.messages > old.messages:
                return probe.error(
                    f"{answered} events arrived, with other blocks: {source.endpoint} is "
                    f"{source.state}",
                    "register the kv_events_endpoint and the block_size of the engine at "
                    f"{probe.worker.endpoint}",
                )
        return probe.error(
            f"{answered} none of their events arrived in {self._asked.patience_s:g} s",
            "start the engine with prefix caching and KV events (vLLM: "
            "--enable-prefix-caching --kv-events-config, SGLang: --kv-events-config)",
        )

    # -- replays -----------------------------------------------------------------------------------

    async def _judge_replays(self) -> list[Finding]:
        """Return findings about replay endpoints that belong to another engine, and about engines
        that give the same block different hashes."""
        sources = [
            each
            for each in self._sources
            if each.replay_endpoint and each.worker_id in self._probes
        ]
        told = await asyncio.gather(*map(self._replay, sources))
        hashes: dict[int | None, list[int]] = {}  # of the first block, by block size
        findings = []
        for source, (owner, name) in zip(sources, told, strict=True):
            own = self._probes[source.worker_id].worker
            if name is not None:
                hashes.setdefault(own.block_size, []).append(name)
            if source.worker_id in self._exchanged:
                continue  # its replay would only repeat that finding
            if owner is not None and owner.endpoint != own.endpoint:
                what = (
                    f"replay_endpoint {source.replay_endpoint} is that of worker "
                    f"{owner.worker_id}'s engine: blocks cached there count for this one"
                )
                mend = "register the replay_endpoint of its own engine"
                findings.append(Finding(Level.ERROR, subject_of(source), what, mend))
        return [*findings, *(_judge_hashes(each) for each in hashes.values() if len(each) > 1)]

    async def _replay(self, source: KvSource) -> tuple[CheckedWorker | None, int | None]:
        """Requests replays from an engine. If a replay has the prompt of a worker, returns this
        worker and the engine's hash of the first block, if known; otherwise (None, None)."""
        own = self._probes[source.worker_id]
        starts = [source, *(each for each in self._sources if each.worker_id != source.worker_id)]
        firsts = dict.fromkeys(0 if each.last_seq is None else each.last_seq + 1 for each in starts)
        for first in list(firsts)[:_MOST_ASKED]:
            async with self._asked.turn:
                try:
                    stored = await stored_since(self._asked, source.replay_endpoint or "", first)
                except NoReplay:
                    return None, None
            for probe in (own, *self._probes.values()):
                if probe.is_in(stored):
                    return probe.worker, probe.first_hash(stored)
        return None, None


def _judge_hashes(hashes: list[int]) -> Finding:
    """Compares the ranks' hashes of one block."""
    if len(set(hashes)) == 1:
        what = f"{len(hashes)} of them give the same block the same hash"
        return Finding(Level.OK, "engines", what)
    return Finding(
        Level.NOTE,
        "engines",
        "they hash the same block differently, which does not matter here, because blocks are "
        "matched by tokens; a shared cache needs one --prefix-caching-hash-algo and one seed (vLLM "
        "before 0.32, and hashes other than sha256: PYTHONHASHSEED)",
    )
