"""How far what is kept on disk is behind what is."""

from typing import Protocol

from lean_selector.observing.load_metrics import Families
from lean_selector.observing.metrics import Family, labels


class Kept(Protocol):
    """What keeps a state directory."""

    @property
    def fault(self) -> str | None: ...
    @property
    def writes(self) -> dict[str, int]: ...
    @property
    def failures(self) -> dict[str, int]: ...
    @property
    def restored(self) -> int: ...
    @property
    def dropped(self) -> int: ...

    def size(self, name: str) -> int: ...

    def age_s(self) -> float: ...

    def spent_s(self) -> float: ...


def state_families(kept: Kept | None) -> Families:
    """Nothing while no state is kept."""
    if kept is None:
        return []
    return [
        Family(
            "lean_selector_state_failing",
            "gauge",
            "1 while the state directory cannot be written.",
            lambda: [("", int(kept.fault is not None))],
        ),
        Family(
            "lean_selector_state_age_seconds",
            "gauge",
            "How old the live reservations on disk are: 0 while nothing has changed since.",
            lambda: [("", kept.age_s())],
        ),
        Family(
            "lean_selector_state_writes_total",
            "counter",
            "Files that were written, by file.",
            lambda: ((labels(file=name), n) for name, n in kept.writes.items()),
        ),
        Family(
            "lean_selector_state_write_failures_total",
            "counter",
            "Files that could not be written, by file.",
            lambda: ((labels(file=name), n) for name, n in kept.failures.items()),
        ),
        Family(
            "lean_selector_state_file_bytes",
            "gauge",
            "The file that was written last, by file.",
            lambda: ((labels(file=name), kept.size(name)) for name in kept.writes),
        ),
        Family(
            "lean_selector_state_cpu_seconds_total",
            "counter",
            "Processor time that keeping state took, of the loop and of its threads.",
            lambda: [("", kept.spent_s())],
        ),
        Family(
            "lean_selector_state_restored_reservations",
            "gauge",
            "Reservations on disk at the start, by what became of them.",
            lambda: (
                (labels(result=result), n)
                for result, n in (("live", kept.restored), ("dropped", kept.dropped))
            ),
        ),
    ]
