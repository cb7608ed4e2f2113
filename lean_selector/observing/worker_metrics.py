"""The metrics of single workers: what each was given, how that went, and whether it is ejected.

Summed up over a worker's ranks when a scrape asks; a selection only adds to ints. Labels are those
of at most MOST_WORKERS workers, who keep them while they are registered; all others together are
`worker_id="other"`. Of models, the first MOST_MODELS by name have labels of their own, and of them
only those that had a worker at some time.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

from lean_selector.core.load.rank_load import RankCounts
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.selector import Selector
from lean_selector.observing.load_metrics import Families, scope_labels
from lean_selector.observing.metrics import Family, FamilyGroup, Sample, labels

MOST_WORKERS: Final = 1024
MOST_MODELS: Final = 256
OTHER: Final = "other"
Key = tuple[str, str, int]


class WorkerFigures:
    """Of one worker, or of all that have no labels of their own."""

    __slots__ = ("counts", "ejected_ranks", "ejected_s", "label")

    def __init__(self, label: str) -> None:
        self.label = label
        self.counts = RankCounts()
        self.ejected_ranks = 0
        self.ejected_s = 0.0  # of the rank that is out for the longest time


class WorkerScrape:
    """Gathers the figures of all workers; remembers who has labels."""

    def __init__(
        self,
        partitions: Callable[[], list[Partition]],
        now: Callable[[], float] = time.monotonic,
        most_workers: int = MOST_WORKERS,
    ) -> None:
        self._partitions = partitions
        self._now = now
        self._most_workers = most_workers
        self._labelled: set[Key] = set()

    def figures(self) -> Iterator[WorkerFigures]:
        """Of each worker; workers may come and go between two of them."""
        partitions = self._partitions()
        workers = {
            (each.model_name, each.tenant_id, worker_id)
            for each in partitions
            for worker_id in each.workers
        }
        self._labelled &= workers
        for key in sorted(workers - self._labelled)[: self._most_workers - len(self._labelled)]:
            self._labelled.add(key)
        others = WorkerFigures(labels(model=OTHER, tenant_id=OTHER, worker_id=OTHER))
        for each in partitions:
            start = scope_labels(each)[:-1]
            for worker_id in sorted(each.workers):
                if worker_id not in each.workers:
                    continue  # removed since the last slice
                if (each.model_name, each.tenant_id, worker_id) in self._labelled:
                    one = WorkerFigures(f'{start},worker_id="{worker_id}"}}')
                    self._add(one, each, worker_id)
                    yield one
                else:
                    self._add(others, each, worker_id)
        if len(self._labelled) < len(workers):
            yield others

    def _add(self, to: WorkerFigures, partition: Partition, worker_id: int) -> None:
        for load in partition.workers[worker_id].loads:
            to.counts.add(load.counts)
            if load.key in partition.health.out:
                to.ejected_ranks += 1
                since = partition.health.ranks[load.key].since
                to.ejected_s = max(to.ejected_s, self._now() - since)


def worker_families(
    selector: Selector,
    partitions: Callable[[], list[Partition]],
    now: Callable[[], float] = time.monotonic,
) -> Families:
    scrape = WorkerScrape(partitions, now)

    def counted(value: Callable[[RankCounts], float]) -> Callable[[WorkerFigures], Sample]:
        return lambda each: (each.label, value(each.counts))

    def by_model() -> Iterator[Sample]:
        return model_outcomes(selector, partitions())

    def reports() -> Iterator[Sample]:
        for each in scrape.figures():
            for word, count in (
                ("ok", each.counts.ok),
                ("failed", each.counts.failed),
                ("refused", each.counts.refused),
            ):
                yield f'{each.label[:-1]},outcome="{word}"}}', count

    def spared() -> Iterator[Sample]:
        return ((scope_labels(each), each.health.spared) for each in partitions())

    def ejections() -> Iterator[Sample]:
        for each in partitions():
            for reason, count in each.health.ejected.items():
                yield f'{scope_labels(each)[:-1]},reason="{reason}"}}', count

    return [
        Family(
            "lean_selector_model_selections_total",
            "counter",
            "Requests for a worker by model and outcome; unknown_model: it never had a worker; "
            "unknown_tenant: it has some, but not of that tenant.",
            by_model,
        ),
        Family(
            "lean_selector_worker_reports_total",
            "counter",
            "Requests to a worker by how they went, as reported.",
            reports,
        ),
        Family(
            "lean_selector_rank_ejections_total",
            "counter",
            "Ranks that were ejected because they failed, by the last failure.",
            ejections,
        ),
        Family(
            "lean_selector_rank_ejections_spared_total",
            "counter",
            "Ranks that failed and were not ejected because too many were already.",
            spared,
        ),
        FamilyGroup(
            scrape.figures,
            [
                (
                    "lean_selector_worker_selections_total",
                    "counter",
                    "Requests that were given a worker.",
                    counted(lambda counts: counts.selections),
                ),
                (
                    "lean_selector_worker_prompt_tokens_total",
                    "counter",
                    "Prompt tokens of those.",
                    counted(lambda counts: counts.prompt_tokens),
                ),
                (
                    "lean_selector_worker_overlap_tokens_total",
                    "counter",
                    "Of those, the tokens that the index says the worker had cached.",
                    counted(lambda counts: counts.overlap_tokens),
                ),
                (
                    "lean_selector_worker_cached_tokens_total",
                    "counter",
                    "Prompt tokens that the engine itself says it had cached, where it was told.",
                    counted(lambda counts: counts.cached_tokens),
                ),
                (
                    "lean_selector_worker_compared_cached_tokens_total",
                    "counter",
                    "Of those, the tokens of requests whose predicted overlap is known.",
                    counted(lambda counts: counts.compared_tokens),
                ),
                (
                    "lean_selector_worker_compared_overlap_tokens_total",
                    "counter",
                    "The predicted overlap of the same requests.",
                    counted(lambda counts: counts.compared_overlap_tokens),
                ),
                (
                    "lean_selector_worker_ttft_seconds_total",
                    "counter",
                    "Time to the first token of a worker, as reported, in sum.",
                    counted(lambda counts: counts.ttft_s),
                ),
                (
                    "lean_selector_worker_ttft_reports_total",
                    "counter",
                    "Of how many requests.",
                    counted(lambda counts: counts.ttft_count),
                ),
                (
                    "lean_selector_worker_ejected_ranks",
                    "gauge",
                    "Ranks of a worker that are given no requests because they failed.",
                    lambda each: (each.label, each.ejected_ranks),
                ),
                (
                    "lean_selector_worker_ejected_seconds",
                    "gauge",
                    "For how long; 0 for a worker with none.",
                    lambda each: (each.label, each.ejected_s),
                ),
            ],
        ),
    ]


def model_outcomes(
    selector: Selector, partitions: list[Partition], most_models: int = MOST_MODELS
) -> Iterator[Sample]:
    """placed, shed and no_worker of each model and tenant; unknown_tenant of a model's others, and
    unknown_model of all others, together."""
    counts: dict[tuple[str, str], tuple[int, int, int]] = {}
    for each in partitions:
        key = each.model_name, each.tenant_id
        refused = selector.refusals.known.get(key, 0)
        shed = each.shed_selects + each.shed_bookings
        counts[key] = each.counts().selections, shed, refused
    for key, refused in selector.refusals.known.items():
        counts.setdefault(key, (0, 0, refused))
    placed, shed, refused = 0, 0, selector.refusals.unnamed
    for number, key in enumerate(sorted(counts)):
        own = counts[key]
        if number < most_models:
            yield from _outcomes(labels(model=key[0], tenant_id=key[1]), own)
        else:
            placed, shed, refused = placed + own[0], shed + own[1], refused + own[2]
    other = labels(model=OTHER, tenant_id=OTHER)
    if len(counts) > most_models or refused:
        yield from _outcomes(other, (placed, shed, refused))
    yield f'{other[:-1]},outcome="unknown_model"}}', selector.refusals.unknown
    more = 0
    for number, (model, count) in enumerate(list(selector.refusals.misplaced.items())):
        if number < most_models:
            label = labels(model=model, tenant_id=OTHER)
            yield f'{label[:-1]},outcome="unknown_tenant"}}', count
        else:
            more += count
    if more:
        yield f'{other[:-1]},outcome="unknown_tenant"}}', more


def _outcomes(label: str, counts: tuple[int, int, int]) -> Iterator[Sample]:
    for outcome, count in zip(("placed", "shed", "no_worker"), counts, strict=True):
        yield f'{label[:-1]},outcome="{outcome}"}}', count
