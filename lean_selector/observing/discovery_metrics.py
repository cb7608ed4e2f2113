"""What discovery has found, and whether it still finds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from lean_selector.observing.load_metrics import Families
from lean_selector.observing.metrics import Family, Sample, labels


class Discovery(Protocol):
    """One discovery."""

    @property
    def name(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def count(self) -> int | None: ...
    @property
    def failures(self) -> int: ...


class Finding(Protocol):
    """All of them."""

    @property
    def sightings(self) -> Sequence[tuple[str, Discovery]]: ...

    def worker_states(self) -> Mapping[str, int]: ...

    def changes(self) -> Mapping[str, int]: ...


def discovery_families(finding: Finding | None) -> Families:
    """Nothing while nothing is to be found. As many series as there are flags."""
    if finding is None:
        return []

    def failing() -> Iterator[Sample]:
        for finds, each in finding.sightings:
            yield labels(discovery=each.name, finds=finds), int(each.error is not None)

    def found() -> Iterator[Sample]:
        for finds, each in finding.sightings:
            yield labels(discovery=each.name, finds=finds), each.count or 0

    def failures() -> Iterator[Sample]:
        for finds, each in finding.sightings:
            yield labels(discovery=each.name, finds=finds), each.failures

    return [
        Family(
            "lean_selector_discovery_failing",
            "gauge",
            "1 while a discovery cannot look: what it found before holds.",
            failing,
        ),
        Family(
            "lean_selector_discovery_found",
            "gauge",
            "Endpoints that a discovery found last.",
            found,
        ),
        Family(
            "lean_selector_discovery_failures_total",
            "counter",
            "Times that a discovery failed.",
            failures,
        ),
        Family(
            "lean_selector_discovered_workers",
            "gauge",
            "Workers by discovery, by state.",
            lambda: ((labels(state=state), n) for state, n in finding.worker_states().items()),
        ),
        Family(
            "lean_selector_discovery_changes_total",
            "counter",
            "Registrations (new or changed) and removals by discovery.",
            lambda: ((labels(change=change), n) for change, n in finding.changes().items()),
        ),
    ]
