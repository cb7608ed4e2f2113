"""The fleet's state for the page /ui: ranks, problems found, and the trees of cached prefixes.

For 512 ranks, computing the state takes some milliseconds. Therefore it is computed in steps, and
the event loop does other work between two steps."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from lean_selector import __version__
from lean_selector.api.judgements import Level, judge_selector
from lean_selector.api.worker_handlers import KvSources, ServiceState, health_of
from lean_selector.core.index.runs import Run
from lean_selector.core.index.shapes import Tier
from lean_selector.core.numbers import U64_MAX
from lean_selector.core.selection.catalog import SCHEDULABLE, Worker
from lean_selector.core.selection.inspection import established
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.selector import Selector
from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.findings import CheckedReadiness, CheckedWorker, Finding, SelectorFacts
from lean_selector.wire.fleet import Fleet, FleetModel, FleetRank, FleetWorker, PrefixTree
from lean_selector.wire.selection_bodies import KvSource, SourceCondition

MOST_RUNS: Final = 200  # for all models together
_LEAST_RUNS: Final = 20  # for each of the first models
Hits = dict[Run, int]
_JUDGED_ANEW_S: Final = 10.0  # interval of new findings while no state changes


@dataclass(eq=False)
class FleetView:
    """Reads the selector's state for the page /ui. Used only on the event loop's thread."""

    selector: Selector
    sources: KvSources
    state: ServiceState
    discoveries: Callable[[], DiscoveryReport] | None = None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._findings: list[Finding] = []
        # The catalog's revision, and the findings at that time
        self._judged: tuple[int, list[tuple[str, str | None]]] = (-1, [])
        self._judged_at = 0.0

    def empty(self) -> Fleet:
        """Return a Fleet without workers, models and ranks. Method `collect` adds them."""
        return Fleet(__version__, self.wall(), [], [], [], [])

    def collect(self, fleet: Fleet) -> Iterator[None]:
        """Fills `fleet` with the current state of workers, ranks and models, in steps. A change of
        the state between two steps may be missing."""
        catalog, now = self.selector.catalog, self.clock()
        revision = catalog.revision
        workers = catalog.matching(None, None)
        for worker in workers:
            spec = worker.spec
            fleet.workers.append(
                FleetWorker(
                    spec.worker_id,
                    spec.model_name,
                    spec.tenant_id,
                    worker.lifecycle,
                    spec.endpoint,
                    spec.block_size,
                    spec.total_kv_blocks,
                    spec.worker_role,
                )
            )
            partition = catalog.partitions.get(spec.key)
            conditions = self.sources.conditions(spec.worker_id, worker.sources)
            by_rank = {each.dp_rank: each for each in conditions}
            for dp_rank in spec.ranks:
                source = by_rank.get(dp_rank)
                fleet.ranks.append(self._rank(worker, dp_rank, partition, source, now, fleet.now))
                yield
        for partition in list(established(catalog, None, None)):
            queue = partition.queue
            fleet.models.append(
                FleetModel(
                    partition.model_name,
                    partition.tenant_id,
                    partition.block_size,
                    len(queue),
                    min(queue.isl_tokens, U64_MAX),
                    sum(partition.shed.values()),
                )
            )
            yield
        judged = revision, [(rank.state, rank.source) for rank in fleet.ranks]
        if judged != self._judged or now - self._judged_at >= _JUDGED_ANEW_S:
            yield from self._judge(workers, now)
            self._judged, self._judged_at = judged, now
        fleet.findings = self._findings

    def _rank(
        self,
        worker: Worker,
        dp_rank: int,
        partition: Partition | None,
        source: SourceCondition | None,
        now: float,
        wall: float,
    ) -> FleetRank:
        key = worker.spec.worker_id, dp_rank
        state = worker.lifecycle
        since: int | None = None
        source_state = None if source is None else source.state
        load = None if partition is None else partition.slots.ranks.get(key)
        if partition is None or load is None:
            return FleetRank(*key, state, since, source_state)
        health = partition.health.ranks.get(key)
        if state == SCHEDULABLE:
            state = "in_service" if health is None else health.state
            if health is not None and state != "in_service":
                since = round(wall - (now - health.since))
        counts = load.counts
        return FleetRank(
            *key,
            state,
            since,
            source_state,
            min(load.active_prefill_tokens, U64_MAX),
            load.active_requests,
            partition.index.blocks(*key, Tier.DEVICE),
            counts.prompt_tokens,
            counts.overlap_tokens,
            round(counts.ttft_s, 3),
            counts.ttft_count,
            round(counts.predicted_s, 3),
            counts.predictions,
        )

    def _judge(self, workers: list[Worker], now: float) -> Iterator[None]:
        """Computes in steps the problems that the page shows: findings whose level is not `ok`."""
        catalog, state, settings = self.selector.catalog, self.state, self.selector.settings
        records: list[CheckedWorker] = []
        for worker in workers:
            spec = worker.spec
            records.append(
                CheckedWorker(
                    spec.worker_id,
                    spec.model_name,
                    worker.lifecycle,
                    spec.tenant_id,
                    endpoint=spec.endpoint,
                    block_size=spec.block_size,
                    total_kv_blocks=spec.total_kv_blocks,
                    data_parallel_size=spec.data_parallel_size,
                    health=health_of(worker, catalog, now),
                    not_schedulable_reasons=worker.reasons,
                    uses_kv_events=settings.use_kv_events,
                    routed_ttl_secs=settings.routed_ttl_s,
                    worker_role=spec.worker_role,
                )
            )
            yield
        sources: list[KvSource] = []
        for source in self.sources.each_source():
            sources.append(source)
            yield
        facts = SelectorFacts(
            catalog.can_serve() and not state.is_draining,
            records,
            sources,
            None if self.discoveries is None else self.discoveries(),
            CheckedReadiness(state.is_recovering, state.state_fault),
        )
        findings: list[Finding] = []
        for finding in judge_selector(facts):
            if finding.level != Level.OK:
                findings.append(finding)
            yield
        self._findings = findings

    def prefixes(self, hits: Hits | None) -> Iterator[PrefixTree | None]:
        """Yields the tree of cached prefixes of each of the first 10 pairs of model and tenant, and
        None after each step. `hits`: number of prompts that matched each run (a tree node)."""
        partitions = list(established(self.selector.catalog, None, None))
        most = max(_LEAST_RUNS, MOST_RUNS // max(1, len(partitions)))
        for partition in partitions[: MOST_RUNS // _LEAST_RUNS]:
            runs = []
            for run in partition.index.upper_runs(most, hits):
                if run is not None:
                    runs.append(run)
                yield None
            yield PrefixTree(
                partition.model_name,
                partition.tenant_id,
                partition.block_size,
                partition.index.total_blocks,
                runs,
            )
