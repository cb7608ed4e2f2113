"""The figures of a comparison: by case, target and metric, one value for each round.

Owns medians, ratios and what is told besides. Does not know what a case is, nor how it is shown.
"""

from collections.abc import Sequence
from statistics import median

import msgspec

from lean_selector.demo.player import percentile


class Results(msgspec.Struct):
    """rounds[case][target][metric] lists the values in the order of the rounds.

    ours: what is compared. beside: our other forms, which are shown with it.
    """

    ours: str
    references: list[str]  # the first is the one that budgets compare with
    rounds: dict[str, dict[str, dict[str, list[float]]]] = {}
    notes: list[str] = []  # what a reader must know to trust or doubt a figure
    skipped: dict[str, str] = {}  # case -> why
    beside: list[str] = []

    @property
    def targets(self) -> list[str]:
        return [self.ours, *self.beside, *self.references]

    def add(self, case: str, target: str, **metrics: float) -> None:
        """The values of one round."""
        kept = self.rounds.setdefault(case, {}).setdefault(target, {})
        for metric, value in metrics.items():
            kept.setdefault(metric, []).append(value)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def value(self, case: str, target: str, metric: str) -> float | None:
        """Median over the rounds; None when it was not measured."""
        values = self.rounds.get(case, {}).get(target, {}).get(metric)
        return median(values) if values else None

    def of(self, ours: str) -> "Results":
        """The same with another of our forms as what is compared."""
        return msgspec.structs.replace(self, ours=ours)

    def ratio(self, case: str, metric: str, reference: str) -> float | None:
        """Our median over that of a reference; None when one is missing or theirs is 0."""
        own, other = self.value(case, self.ours, metric), self.value(case, reference, metric)
        return None if own is None or not other else own / other


def latencies(microseconds: Sequence[int]) -> dict[str, float]:
    """Percentiles of single latencies, as metrics."""
    ordered = sorted(microseconds)
    return {
        "open_p50_us": percentile(ordered, 0.5),
        "open_p99_us": percentile(ordered, 0.99),
        "open_p999_us": percentile(ordered, 0.999),
        "open_max_us": ordered[-1] if ordered else 0.0,
    }
