"""The figures of a comparison: by case, target and metric, one value for each round.

Owns medians, ratios and what is told besides. Does not know what a case is, nor how it is shown.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import msgspec

from lean_selector.tools.traffic import percentile
from loadtest.duel.load import LoadFailed
from loadtest.duel.targets import TargetError

FAILURES = (TargetError, LoadFailed, OSError, ValueError)


class Results(msgspec.Struct):
    """rounds[case][target][metric] lists the values in the order of the rounds.

    ours: what is compared. beside: our other forms, which are shown with it. bad[case][target]
    counts answers that were not 2xx: what it costs to refuse is compared with nothing.
    """

    ours: str
    references: list[str]  # the first is the one that budgets compare with
    rounds: dict[str, dict[str, dict[str, list[float]]]] = {}
    notes: list[str] = []  # what a reader must know to trust or doubt a figure
    skipped: dict[str, str] = {}  # case -> why
    beside: list[str] = []
    bad: dict[str, dict[str, int]] = {}
    failures: list[str] = []  # what ended a part of the run

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

    def refused(self, case: str, target: str, answers: int) -> None:
        """So many answers of a round were not 2xx."""
        if answers:
            by_target = self.bad.setdefault(case, {})
            by_target[target] = by_target.get(target, 0) + answers

    @contextmanager
    def keep(self, cases: Collection[str]) -> Iterator[None]:
        """What fails inside ends these cases alone: those without a figure are skipped for it."""
        try:
            yield
        except FAILURES as error:
            reason = str(error)
            if reason not in self.failures:
                self.failures.append(reason)
            for case in cases:
                if case in self.rounds:
                    self.note(f"{case}: not all rounds: {reason}")
                else:
                    self.skipped.setdefault(case, f"skipped: {reason}")

    def warnings(self) -> list[str]:
        """What a reader must know, answers that were not 2xx among it."""
        refusals = [
            f"{case}: {count} answers of {target} were not 2xx, so it is compared with nothing"
            for case, by_target in self.bad.items()
            for target, count in by_target.items()
        ]
        return [*refusals, *self.notes]

    def value(self, case: str, target: str, metric: str) -> float | None:
        """Median over the rounds; None when it was not measured."""
        values = self.rounds.get(case, {}).get(target, {}).get(metric)
        return median(values) if values else None

    def of(self, ours: str) -> "Results":
        """The same with another of our forms as what is compared."""
        return msgspec.structs.replace(self, ours=ours)

    def ratio(self, case: str, metric: str, reference: str) -> float | None:
        """Our median over that of a reference; None where `quotient` is."""
        return self.quotient(case, self.ours, case, reference, metric)

    def quotient(
        self, case: str, target: str, other_case: str, other_target: str, metric: str
    ) -> float | None:
        """One median over another; None when one is missing, has answers that were not 2xx, or the
        other is 0."""
        if self.bad.get(case, {}).get(target) or self.bad.get(other_case, {}).get(other_target):
            return None
        value = self.value(case, target, metric)
        other = self.value(other_case, other_target, metric)
        return None if value is None or not other else value / other


def latencies(microseconds: Sequence[int]) -> dict[str, float]:
    """Percentiles of single latencies, as metrics."""
    ordered = sorted(microseconds)
    return {
        "open_p50_us": percentile(ordered, 0.5),
        "open_p99_us": percentile(ordered, 0.99),
        "open_p999_us": percentile(ordered, 0.999),
        "open_max_us": ordered[-1] if ordered else 0.0,
    }
