"""The whole check, in its order: what the selector says, the engines, the ports, a completion."""

import asyncio
from collections.abc import Iterable
from typing import Final

import msgspec

from lean_selector.discovery.engine_questions import ask_engine
from lean_selector.doctor.engine_judgement import judge_engine
from lean_selector.doctor.engine_keys import SECRET, SERVERS, is_about_keys
from lean_selector.doctor.event_port import judge_port
from lean_selector.doctor.findings import Finding, Level
from lean_selector.doctor.probe import Probe, judge_hashes
from lean_selector.doctor.replay import BEYOND_ALL, NoReplay, Replays
from lean_selector.doctor.selector_judgement import judge_selector
from lean_selector.doctor.selector_questions import Selector
from lean_selector.doctor.selector_shapes import SelectorFacts, Source, WorkerRecord
from lean_selector.doctor.source_judgement import NO_REPLAY, subject_of
from lean_selector.outbound.client import OutboundClient, Resolve
from lean_selector.outbound.failure import OutboundFailed
from lean_selector.outbound.url import base_without_version

MOST_AT_ONCE: Final = 16  # engines that are asked


class Examination:
    """Of one selector. Changes nothing there; a probe adds a prompt to each engine's cache."""

    def __init__(
        self,
        selector: Selector,
        engines: OutboundClient,
        replays: Replays,
        resolve: Resolve,
        patience_s: float,
        may_probe: bool,
    ) -> None:
        """`patience_s`: for each answer, and for events after a completion."""
        self._selector = selector
        self._engines = engines
        self._replays = replays
        self._resolve = resolve
        self._patience_s = patience_s
        self._may_probe = may_probe
        self._turn = asyncio.Semaphore(MOST_AT_ONCE)

    async def run(self) -> list[Finding]:
        """Raises NotASelector."""
        facts = await self._selector.facts()
        probed: list[Finding] = []
        if self._may_probe:
            probed = await self._probe(facts)
            facts = await self._selector.facts()  # a source that was silent may have told something
        found = list(judge_selector(facts))
        asked = [worker for worker in facts.workers if worker.endpoint]
        found += _joined(await asyncio.gather(*map(self._ask, asked)))
        sources = facts.sources or []
        found += _joined(await asyncio.gather(*map(self._knock, sources)))
        return [*found, *probed]

    async def _ask(self, worker: WorkerRecord) -> list[Finding]:
        base = base_without_version(worker.endpoint or "")
        async with self._turn:
            try:
                told = await ask_engine(self._engines, base)
            except (OutboundFailed, ValueError) as error:
                return [
                    Finding(
                        Level.ERROR,
                        f"worker {worker.worker_id}",
                        f"its engine does not tell what it is: {error}",
                        "check the engine, and its endpoint: http://HOST:PORT as gateways reach it",
                    )
                ]
        return list(judge_engine(worker, told))

    async def _knock(self, source: Source) -> list[Finding]:
        subject, resolve, patience_s = subject_of(source), self._resolve, self._patience_s
        async with self._turn:
            found = [
                await judge_port(
                    resolve, subject, "kv_events_endpoint", source.endpoint, patience_s
                )
            ]
            replay = source.replay_endpoint
            if replay is None:
                if source.state != NO_REPLAY:  # else the selector's own word says so
                    found.append(_without_replay(subject))
                return found
            found.append(await judge_port(resolve, subject, "replay_endpoint", replay, patience_s))
            if found[-1].level is Level.OK:
                found.append(await self._ask_replay(subject, replay))
        return found

    async def _ask_replay(self, subject: str, endpoint: str) -> Finding:
        try:
            await self._replays.stored_since(endpoint, BEYOND_ALL, self._patience_s)
        except NoReplay as error:
            if is_about_keys(str(error)):  # whether the selector has the right ones, it says itself
                return Finding(
                    Level.NOTE,
                    subject,
                    f"replay_endpoint {endpoint}: not asked from here: {error}",
                    f"give this check {SERVERS} and {SECRET} as the selector has them",
                )
            return Finding(
                Level.ERROR,
                subject,
                f"replay_endpoint {endpoint}: no replay in {self._patience_s:g} s: {error}",
                "register the engine's replay_endpoint (vLLM: one port per rank), not its endpoint",
            )
        return Finding(Level.OK, subject, f"replay_endpoint {endpoint}: answers")

    async def _probe(self, facts: SelectorFacts) -> list[Finding]:
        found: list[Finding] = []
        probes: dict[int, Probe] = {}
        first_hashes: dict[int, dict[str, int]] = {}
        workers = {worker.worker_id: worker for worker in facts.workers if worker.endpoint}
        probed = [worker for worker in workers.values() if worker.block_size is not None]
        for worker in probed:
            size = worker.block_size or 1
            if size not in probes:
                probes[size] = Probe(
                    self._selector, self._engines, self._replays, size, self._patience_s
                )
        found += await asyncio.gather(
            *(self._probed(probes[worker.block_size or 1], worker) for worker in probed)
        )
        for source in facts.sources or []:
            size = (
                0 if source.worker_id not in workers else workers[source.worker_id].block_size or 0
            )
            if size in probes:
                value = await probes[size].first_hash(source)
                if value is not None:
                    first_hashes.setdefault(size, {})[subject_of(source)] = value
        for hashes in first_hashes.values():
            if (finding := judge_hashes(hashes)) is not None:
                found.append(finding)
        return found

    async def _probed(self, probe: Probe, worker: WorkerRecord) -> Finding:
        async with self._turn:
            return await probe.run(worker)


def _without_replay(subject: str) -> Finding:
    return Finding(
        Level.WARNING,
        subject,
        "no replay endpoint: what is missed, also by a restart of the selector, is lost",
        "start the engine with a replay_endpoint in its --kv-events-config",
    )


def as_json(findings: Iterable[Finding]) -> bytes:
    """For scripts: one object per finding."""
    return msgspec.json.format(msgspec.json.encode(list(findings)), indent=2)


def _joined(lists: Iterable[list[Finding]]) -> list[Finding]:
    return [finding for found in lists for finding in found]
