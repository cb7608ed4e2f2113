"""Building blocks of metrics: counters for the hot path, and their text in Prometheus' format.

The hot path only increments ints. Writing a sample takes about a microsecond, and large fleets have
thousands of samples. Therefore the event loop writes the answer to a scrape in slices, and samples
of different slices may be a few milliseconds apart. Label values are route templates, registered
models and workers, but never ids chosen by clients, so the number of series is bounded."""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Generic, TypeVar

from lean_selector.core.errors import AllWorkersBusy, NoWorkers, UnknownModel, WaitedTooLong
from lean_selector.wire.scalars import without_controls

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# Seconds. An 8-block selection takes about 12 us, so the first bucket is the usual one; queued
# requests are in the last.
LATENCY_BOUNDS_S: Final[tuple[float, ...]] = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 0.1, 0.5, 1.0, 5.0, 30.0,
)  # fmt: skip
FASTEST_S: Final = LATENCY_BOUNDS_S[0]
LAG_BOUNDS_S = (0.5e-3, 1e-3, 2e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 1.0)
LAG_EVERY_S = 0.05  # 20 wake-ups a second take 0.01 % of a core


Number = int | float
# (label text as made by `labels`, value); None: a pause without a sample
Sample = tuple[str, Number] | None
# The value of a metric for one object. None: no value. A list: several values, each with one more
# label, as text `name="value"`.
Value = Number | None | list[tuple[str, Number]]
T = TypeVar("T")


class Histogram:
    """Counts values per bucket. `bounds` are the upper bounds of all buckets but the last."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.total = 0.0  # sum of the values

    def add(self, value: float) -> None:
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.total += value


class RouteMeter:
    """Counts the answers of one route, by duration and by status.

    `others` has the counts of all statuses except 200. Class Gate does not call method `add` but
    has a copy of its code, because a call would double the time that counting takes."""

    def __init__(self, method: str, route: str) -> None:
        self.method = method
        self.route = route
        self.label = labels(method=method, route=route)
        self.fastest = 0  # answers in the first bucket
        self.slower = [0] * (len(LATENCY_BOUNDS_S) + 1)  # by bucket; the first is unused
        self.seconds = 0.0
        self.others: dict[bytes, int] = {}  # by status, except 200
        self.shed = 0  # shed requests among `others`
        self.unknown_models = 0  # answers for models that never had a worker
        self.unknown_tenants = 0  # answers for tenants without a worker, if others have one

    def add(self, seconds: float, status: bytes) -> None:
        if seconds <= FASTEST_S:
            self.fastest += 1
        else:
            self.slower[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.seconds += seconds
        if status != b"200":
            self.others[status] = self.others.get(status, 0) + 1

    def refused(self, error: Exception) -> None:
        """Counts a failed request if it was shed, or if its model and tenant have no worker."""
        if isinstance(error, (AllWorkersBusy, WaitedTooLong)):
            self.shed += 1
        elif isinstance(error, UnknownModel):
            self.unknown_models += 1
        elif isinstance(error, NoWorkers) and not error.is_missing:
            if error.other_tenants is None:
                self.unknown_models += 1
            else:
                self.unknown_tenants += 1

    def requests(self) -> int:
        return self.fastest + sum(self.slower)

    def buckets(self) -> list[int]:
        return [self.fastest, *self.slower[1:]]

    def by_status(self) -> dict[str, int]:
        others = {status.decode(): count for status, count in sorted(self.others.items())}
        succeeded = self.requests() - sum(others.values())
        return {"200": succeeded, **others} if succeeded or not others else others


class LoopLag:
    """Measures, 20 times a second, how many seconds late the event loop runs a timer."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self.histogram = Histogram(LAG_BOUNDS_S)
        self._call_later = call_later
        self._due = 0.0

    def start(self) -> None:
        self._due = perf_counter() + LAG_EVERY_S
        self._call_later(LAG_EVERY_S, self._on_time)

    def _on_time(self) -> None:
        late_s = perf_counter() - self._due
        self.start()
        self.histogram.add(max(0.0, late_s))


@dataclass(eq=False)
class Family:
    """One metric. Each scrape calls `samples`, which returns a number (a metric without labels) or
    an iterable of samples. The iterable must be a copy, since the scrape reads it in slices."""

    name: str
    kind: str  # counter or gauge; histograms are HistogramFamily
    help: str
    samples: Callable[[], Number | Iterable[Sample]]

    def text(self) -> Iterator[str]:
        yield _head(self.name, self.kind, self.help)
        found = self.samples()
        if isinstance(found, (int, float)):
            yield f"{self.name} {found}\n"
            return
        for sample in found:
            if sample is None:
                yield ""
            else:
                text, value = sample
                yield f"{self.name}{text} {value}\n"


class FamilyGroup(Generic[T]):  # no dataclass: mypyc makes none of a generic class
    """Several metrics of the same objects, such as ranks. A scrape lists the objects only once."""

    def __init__(
        self,
        things: Callable[[], Iterable[tuple[str, T]]],
        families: Sequence[tuple[str, str, str, Callable[[T], Value]]],
    ) -> None:
        """`things` returns (labels, object) pairs. A family is one metric: (name, kind, help,
        function that returns the metric's value for an object)."""
        self.things = things
        self.families = families

    def text(self) -> Iterator[str]:
        things: list[tuple[str, T]] = []
        for thing in self.things():
            things.append(thing)
            yield ""
        for name, kind, help, value in self.families:
            yield _head(name, kind, help)
            for text, of in things:
                found = value(of)
                if isinstance(found, list):
                    for more, number in found:
                        yield f"{name}{text[:-1]},{more}}} {number}\n"
                else:
                    yield "" if found is None else f"{name}{text} {found}\n"


@dataclass(eq=False)
class HistogramFamily:
    """A histogram metric. `histograms` returns (labels, bounds, buckets, sum) per series."""

    name: str
    help: str
    histograms: Callable[[], Iterable[tuple[str, tuple[float, ...], list[int], float]]]

    def text(self) -> Iterator[str]:
        name = self.name
        yield _head(name, "histogram", self.help)
        for text, bounds, buckets, total in self.histograms():
            start = f"{name}_bucket{text[:-1]}," if text else f"{name}_bucket{{"
            lines, count = [], 0
            for bound, bucket in zip((*bounds, "+Inf"), buckets, strict=True):
                count += bucket
                lines.append(f'{start}le="{bound}"}} {count}\n')
            lines.append(f"{name}_sum{text} {total}\n{name}_count{text} {count}\n")
            yield "".join(lines)


AnyFamily = Family | HistogramFamily | FamilyGroup[Any]
Families = list[AnyFamily]


def _head(name: str, kind: str, help: str) -> str:
    return f"# HELP {name} {help}\n# TYPE {name} {kind}\n"


def labels(**values: Any) -> str:
    """Return label names and values as text, `{a="1",b="x"}`, escaped as Prometheus requires."""
    return "{" + ",".join(f'{name}="{escaped(str(value))}"' for name, value in values.items()) + "}"


def escaped(value: str) -> str:
    """Escapes a label value, and replaces invalid UTF-8. Control characters become JSON escapes
    such as `\\u001b`: Prometheus' format allows control characters, but a terminal may interpret
    them."""
    if not value.isprintable():
        value = value.encode("utf-8", "replace").decode()
        value = without_controls(value)
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


# -- tables of metrics -----------------------------------------------------------------------------
# A row has the name without prefix, the source of the value, and the meaning. A name that ends in
# _total is a counter, any other a gauge.


def table(rows: Mapping[str, tuple[Callable[[], Number | Iterable[Sample]], str]]) -> Families:
    return [Family(*_named(name), help, samples) for name, (samples, help) in rows.items()]


def table_of(
    things: Callable[[], Iterable[tuple[str, T]]],
    rows: Mapping[str, tuple[Callable[[T], Value], str]],
) -> FamilyGroup[T]:
    """Return metrics. `rows`: name -> (function that returns an object's value, help)."""
    return FamilyGroup(
        things, [(*_named(name), help, value) for name, (value, help) in rows.items()]
    )


def _named(name: str) -> tuple[str, str]:
    full = name if name.startswith("dynamo_") else f"lean_selector_{name}"
    return full, _kind_of(name)


def _kind_of(name: str) -> str:
    return "counter" if name.endswith("_total") else "gauge"


def by(label: str, counts: Mapping[str, Number]) -> list[Sample]:
    """Return one sample per entry of `counts`; the entry's key is the value of `label`."""
    return [(labels(**{label: key}), count) for key, count in counts.items()]


def each(text: str, label: str, counts: Mapping[str, Number]) -> Iterator[Sample]:
    """Yields one sample per entry of `counts`, with the labels in `text` and one more: `label`,
    whose value is the entry's key. The keys must not need escaping."""
    for key, count in counts.items():
        yield f'{text[:-1]},{label}="{key}"}}', count


# -- the whole text --------------------------------------------------------------------------------


def exposition_text(families: Iterable[AnyFamily]) -> Iterator[str]:
    """Yields the answer to a scrape in small pieces. A piece is empty if a step makes no text."""
    for family in families:
        yield from family.text()
    yield _process_text()


def _process_text() -> str:
    """Return metrics such as process_cpu_seconds_total as text, or "" if there is no /proc."""
    process = Path("/proc/self")
    try:
        stat = (process / "stat").read_bytes().rpartition(b")")[2].split()
        limits = (process / "limits").read_bytes()
        open_files = len(os.listdir(process / "fd"))
        booted = Path("/proc/stat").read_bytes().partition(b"\nbtime ")[2].split()[0]
    except OSError:
        return ""
    ticks = os.sysconf("SC_CLK_TCK")
    most_files = limits.partition(b"\nMax open files")[2].split()[0].decode()
    figures = {
        "process_virtual_memory_bytes": (int(stat[20]), "Virtual memory size in bytes."),
        "process_resident_memory_bytes": (int(stat[21]) * os.sysconf("SC_PAGE_SIZE"),
            "Resident memory size in bytes."),
        "process_start_time_seconds": (int(booted) + int(stat[19]) / ticks,
            "Start time of the process since unix epoch in seconds."),
        "process_cpu_seconds_total": ((int(stat[11]) + int(stat[12])) / ticks,
            "Total user and system CPU time spent in seconds."),
        "process_open_fds": (open_files, "Number of open file descriptors."),
        "process_max_fds": ("+Inf" if most_files == "unlimited" else most_files,
            "Maximum number of open file descriptors."),
    }  # fmt: skip
    return "".join(
        _head(name, _kind_of(name), help) + f"{name} {value}\n"
        for name, (value, help) in figures.items()
    )
