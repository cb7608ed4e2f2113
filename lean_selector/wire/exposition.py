"""The text of metrics in Prometheus' format.

Writing a sample takes about a microsecond, and large fleets have
thousands of samples. Therefore the event loop writes the answer to a scrape in slices, and samples
of different slices may be a few milliseconds apart. Label values are route templates, registered
models and workers, but never ids chosen by clients, so the number of series is bounded."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lean_selector.wire.scalars import without_controls

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

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


@dataclass(eq=False)
class Family:
    """One metric. Each scrape calls `samples`, which returns a number (a metric without labels) or
    an iterable of samples. The iterable must be a copy, since the scrape reads it in slices."""

    name: str
    kind: str  # counter or gauge; histograms are HistogramFamily
    help: str
    samples: Callable[[], Number | Iterable[Sample]]

    def text(self) -> Iterator[str]:
        yield head(self.name, self.kind, self.help)
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
            yield head(name, kind, help)
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
        yield head(name, "histogram", self.help)
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


def head(name: str, kind: str, help: str) -> str:
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
    return full, kind_of(name)


def kind_of(name: str) -> str:
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
