"""`lean-selector check --probe`: sends a completion to each engine, then checks whether the KV
events for its blocks reach the selector.

Each engine gets a different prompt, which shows whether an event or replay endpoint is registered
for the wrong engine. Only the first block is the same in all prompts. This block shows whether all
engines give a block the same hash. Token ids are small, so that every vocabulary has them."""

import asyncio
import random
from dataclasses import dataclass
from typing import Final

import msgspec

from lean_selector.api.judgements import Level, subject_of
from lean_selector.core.hashing import packed_tokens
from lean_selector.core.index.shapes import BlockStored
from lean_selector.http.outbound import OutboundClient, OutboundFailed
from lean_selector.http.urls import base_without_version
from lean_selector.tools.check_questions import AskedSelector, NoReplay, NotASelector, Replays
from lean_selector.wire.findings import CheckedWorker, Finding, SelectorFacts
from lean_selector.wire.selection_bodies import KvSource

_TOKEN_IDS: Final = range(10, 100)
_LEAST_OWN: Final = 16  # tokens that only this engine gets; too many to be equal by chance
_LOOK_EVERY_S: Final = 0.1
_SAID_CHARACTERS: Final = 200
_MOST_ASKED: Final = 16  # engines whose batches are requested from a replay endpoint


@dataclass(frozen=True)
class Asked:
    """The services to query. `patience_s`: how long to wait for each answer, and for KV events."""

    selector: AskedSelector
    engines: OutboundClient
    replays: Replays
    turn: asyncio.Semaphore
    patience_s: float


class Probe:
    """The prompt for one worker: a first block that all prompts share, random blocks, and one more
    token, so that engines cache all blocks before this token."""

    def __init__(self, worker: CheckedWorker, first: list[int]) -> None:
        self.worker = worker
        self.first = first
        size = len(first)
        self.own: Final = random.choices(_TOKEN_IDS, k=-(-_LEAST_OWN // size) * size)
        self.prompt: Final = [*first, *self.own, random.choice(_TOKEN_IDS)]
        self.blocks: Final = 1 + len(self.own) // size

    @property
    def subject(self) -> str:
        return f"worker {self.worker.worker_id}"

    def is_in(self, stored: list[BlockStored]) -> bool:
        """Whether the events `stored` have the tokens of this prompt's random blocks."""
        return packed_tokens(self.own) in b"".join([event.tokens for event in stored])

    def first_hash(self, stored: list[BlockStored]) -> int | None:
        """Return the engine's hash of the prompt's first block; None if no event stores it."""
        for event in stored:
            is_first = event.parent_hash is None and len(event.names) > 0
            if is_first and packed_tokens(self.prompt).startswith(event.tokens):
                return int.from_bytes(event.names[:8], "little")
        return None


class Probes:
    """A prompt for each worker that has an endpoint and a block size. Call `run` only once."""

    def __init__(self, asked: Asked, facts: SelectorFacts) -> None:
        self._asked = asked
        self._sources = facts.sources or []  # before the probes
        self._exchanged: set[int] = set()  # workers whose events or endpoint belong to another one
        known = [each for each in facts.workers if each.endpoint and each.block_size]
        firsts = {
            each.block_size or 1: random.choices(_TOKEN_IDS, k=each.block_size or 1)
            for each in known
        }
        self._probes = {each.worker_id: Probe(each, firsts[each.block_size or 1]) for each in known}

    async def run(self) -> list[Finding]:
        """Sends the prompts, and returns findings about the events. Raises NotASelector."""
        probes = list(self._probes.values())
        found = dict(
            zip(self._probes, await asyncio.gather(*map(self._probe, probes)), strict=True)
        )
        missing = [self._probes[each] for each, finding in found.items() if finding is None]
        known = [each for each in found.values() if each is not None]
        why_not = [await self._why_not(probe) for probe in missing]
        return [*known, *why_not, *await self._replays()]

    # -- completions -------------------------------------------------------------------------------

    async def _probe(self, probe: Probe) -> Finding | None:
        """Sends the prompt. Return a finding, or None if its KV events do not come in time."""
        async with self._asked.turn:
            try:
                await self._complete(probe)
            except OutboundFailed as error:
                mend = "check the engine, its model name and --worker-token-file"
                what = f"no completion: {error.message}"
                return Finding(Level.ERROR, probe.subject, what, mend)
            try:
                async with asyncio.timeout(self._asked.patience_s):
                    while not await self._is_known(probe):  # noqa: ASYNC110  it is asked, not told
                        await asyncio.sleep(_LOOK_EVERY_S)
            except TimeoutError:
                return None
            except (OutboundFailed, msgspec.DecodeError) as error:
                return Finding(Level.ERROR, "selector", f"POST /overlap_scores: {error}")
        return _arrived(probe)

    async def _complete(self, probe: Probe) -> None:
        body = {"model": probe.worker.model_name, "prompt": probe.prompt, "max_tokens": 1}
        url = f"{base_without_version(probe.worker.endpoint or '')}/v1/completions"
        answer = await self._asked.engines.request(
            "POST", url, msgspec.json.encode(body), timeout_s=max(self._asked.patience_s, 30.0)
        )
        if answer.status != 200:
            said = answer.body[:_SAID_CHARACTERS].decode(errors="replace")
            raise OutboundFailed(f"POST {url}: status {answer.status}: {said}", answer.status)

    async def _is_known(self, probe: Probe) -> bool:
        cached = await self._asked.selector.cached_blocks(probe.worker, probe.prompt)
        return cached.get(probe.worker.worker_id, 0) >= probe.blocks

    # -- why blocks are not in the index -----------------------------------------------------------

    async def _why_not(self, probe: Probe) -> Finding:
        worker_id, ask = probe.worker.worker_id, self._asked.selector.cached_blocks
        try:
            cached = await ask(probe.worker, probe.prompt)
            as_registered = {each for each, blocks in cached.items() if blocks >= probe.blocks}
            if worker_id in as_registered:
                return _arrived(probe)  # they arrived late
            if as_registered:
                self._exchanged.add(worker_id)
                return _taken_for(probe, min(as_registered))
            for is_eagle in (True, False):
                cached = await ask(probe.worker, probe.prompt, is_eagle)
                if cached.get(worker_id, 0) >= probe.blocks:
                    return _wrong_eagle(probe, is_eagle)
            after = (await self._asked.selector.facts()).sources or []
        except (OutboundFailed, msgspec.DecodeError, NotASelector) as error:
            return Finding(Level.ERROR, "selector", f"POST /overlap_scores: {error}")
        before = {(each.worker_id, each.dp_rank): each for each in self._sources}
        answered = f"a completion of {probe.blocks} blocks was answered, and"
        for source in after:
            old = before.get((source.worker_id, source.dp_rank))
            if source.worker_id != worker_id or old is None:
                continue
            if source.skipped != old.skipped:
                why = source.problem or ", ".join(source.skipped)
                what = f"{answered} the events that arrived were skipped: {why}"
                mend = "DELETE the worker, then POST it with the engine's block_size and is_eagle"
                return Finding(Level.ERROR, probe.subject, what, mend)
            if source.messages > old.messages:
                what = (
                    f"{answered} events arrived, with other blocks: {source.endpoint} is "
                    f"{source.state}"
                )
                mend = "register the kv_events_endpoint and the block_size of the engine at "
                return Finding(
                    Level.ERROR, probe.subject, what, mend + (probe.worker.endpoint or "")
                )
        return Finding(
            Level.ERROR,
            probe.subject,
            f"{answered} none of their events arrived in {self._asked.patience_s:g} s",
            "start the engine with prefix caching and KV events (vLLM: "
            "--enable-prefix-caching --kv-events-config, SGLang: --kv-events-config)",
        )

    # -- replays -----------------------------------------------------------------------------------

    async def _replays(self) -> list[Finding]:
        """Return findings about replay endpoints that belong to another engine, and about engines
        that give the same block different hashes."""
        sources = [
            each
            for each in self._sources
            if each.replay_endpoint and each.worker_id in self._probes
        ]
        told = await asyncio.gather(*map(self._replay, sources))
        names: dict[int, dict[str, int]] = {}
        findings = []
        for source, (owner, name) in zip(sources, told, strict=True):
            if name is not None:
                size = self._probes[source.worker_id].worker.block_size or 1
                names.setdefault(size, {})[subject_of(source)] = name
            if source.worker_id in self._exchanged:
                continue  # its replay would only repeat that finding
            if owner is not None and not self._is_engine_of(owner, source.worker_id):
                findings.append(
                    Finding(
                        Level.ERROR,
                        subject_of(source),
                        f"replay_endpoint {source.replay_endpoint} is that of worker {owner}'s "
                        "engine: blocks cached there count for this one",
                        "register the replay_endpoint of its own engine",
                    )
                )
        alike = [judge_hashes(each) for each in names.values()]
        return [*findings, *(each for each in alike if each is not None)]

    async def _replay(self, source: KvSource) -> tuple[int | None, int | None]:
        """Requests replays from an engine. If a replay has the prompt of a worker, returns this
        worker's id and the engine's hash of the first block, if known; otherwise (None, None)."""
        own = self._probes[source.worker_id]
        starts = [source, *(each for each in self._sources if each.worker_id != source.worker_id)]
        firsts = dict.fromkeys(0 if each.last_seq is None else each.last_seq + 1 for each in starts)
        for first in list(firsts)[:_MOST_ASKED]:
            async with self._asked.turn:
                try:
                    stored = await self._asked.replays.stored_since(
                        source.replay_endpoint or "", first, self._asked.patience_s
                    )
                except NoReplay:
                    return None, None
            for probe in (own, *self._probes.values()):
                if probe.is_in(stored):
                    return probe.worker.worker_id, probe.first_hash(stored)
        return None, None

    def _is_engine_of(self, one: int, other: int) -> bool:
        endpoints = (self._probes[one].worker.endpoint, self._probes[other].worker.endpoint)
        return one == other or endpoints[0] == endpoints[1]


def _arrived(probe: Probe) -> Finding:
    what = f"the {probe.blocks} blocks of a completion arrived in the index as events"
    return Finding(Level.OK, probe.subject, what)


def _taken_for(probe: Probe, other: int) -> Finding:
    return Finding(
        Level.ERROR,
        probe.subject,
        f"the {probe.blocks} blocks of its completion count for worker {other}",
        f"swap the kv_events_endpoint, or the endpoint, of {probe.subject} and worker {other}: "
        "each has those of its own engine",
    )


def _wrong_eagle(probe: Probe, is_eagle: bool) -> Finding:
    of = "pairs of tokens (EAGLE)" if is_eagle else "single tokens"
    return Finding(
        Level.ERROR,
        probe.subject,
        f"its blocks were hashed over {of}, but its registration says otherwise: none of them "
        "matches",
        f'DELETE all workers of its model, then POST them with "is_eagle": {str(is_eagle).lower()}',
    )


def judge_hashes(hashes: dict[str, int]) -> Finding | None:
    """Compares the ranks' hashes of one block. Return None if there are fewer than two ranks."""
    if len(hashes) < 2:
        return None
    if len(set(hashes.values())) == 1:
        return Finding(
            Level.OK, "engines", f"{len(hashes)} of them give the same block the same hash"
        )
    return Finding(
        Level.NOTE,
        "engines",
        "they hash the same block differently, which does not matter here, because blocks are "
        "matched by tokens; a shared cache needs one --prefix-caching-hash-algo and one seed (vLLM "
        "before 0.32, and hashes other than sha256: PYTHONHASHSEED)",
    )
