"""The bounds that this project has set itself, and whether the figures of a run are inside.

A table of rows; nothing here fails a run. Where a row is a ratio it is ours to the reference's, in
the same run, so that the machine cancels out.
"""

from collections.abc import Callable

import msgspec

from loadtest.duel import index_stages as index
from loadtest.duel.results import Results

NOT_MEASURED = "not measured"
TRACE = "trace prompts at 16, 16 workers"
MSGPACK = f"select as msgpack, {TRACE}"
LARGE_FLEET = "process, 512 workers"
WORKERS = 512

Figure = Callable[[Results, str], float | None]


class Row(msgspec.Struct, frozen=True):
    """A bound and an aim, in `unit`; `figure` takes the results and the name of a reference."""

    title: str
    figure: Figure
    bound: float
    aim: float | None = None
    at_least: bool = False  # the figure must not be below, instead of not above
    unit: str = "x"

    def holds(self, value: float, limit: float) -> bool:
        return value >= limit if self.at_least else value <= limit


def _ratio(case: str, metric: str = "cpu_us") -> Figure:
    return lambda results, reference: results.ratio(case, metric, reference)


def _own(case: str, metric: str, scale: float = 1.0, minus: float = 0.0) -> Figure:
    def figure(results: Results, reference: str) -> float | None:
        value = results.value(case, results.ours, metric)
        return None if value is None else value * scale - minus

    return figure


def _own_ratio(case: str, other: str, metric: str) -> Figure:
    def figure(results: Results, reference: str) -> float | None:
        ours = results.ours
        value, base = results.value(case, ours, metric), results.value(other, ours, metric)
        return None if value is None or not base else value / base

    return figure


def _msgpack(results: Results, reference: str) -> float | None:
    own = results.value(MSGPACK, results.ours, "cpu_us")
    other = results.value(f"select, {TRACE}", reference, "cpu_us")
    return None if own is None or not other else own / other


ROWS = (
    Row("CPU, select, 8 blocks, 16 workers", _ratio("select, 8 blocks, 16 workers"), 0.90, 0.70),
    Row(f"CPU, select, {TRACE}", _ratio(f"select, {TRACE}"), 0.85, 0.60),
    Row("CPU, select, 4096 blocks", _ratio("select, 4096 blocks, 16 workers"), 0.90, 0.65),
    Row("CPU, lifecycle, trace prompts", _ratio(f"lifecycle, {TRACE}"), 0.60, 0.35),
    Row("CPU, lifecycle, 8 blocks", _ratio("lifecycle, 8 blocks, 16 workers"), 0.90, 0.65),
    Row("CPU, select, 8 blocks, 128 workers", _ratio("select, 8 blocks, 128 workers"), 0.80, 0.50),
    Row("CPU, select, 8 blocks, 512 workers", _ratio("select, 8 blocks, 512 workers"), 0.50, 0.25),
    Row(
        "own CPU at 512 workers over own at 16",
        _own_ratio("select, 8 blocks, 512 workers", "select, 8 blocks, 16 workers", "cpu_us"),
        1.4,
        1.1,
    ),
    Row("CPU, msgpack body over the reference's JSON, trace prompts", _msgpack, 0.20, 0.12),
    Row(
        "requests/s on one core, 8 blocks",
        _ratio("select on one core, 8 blocks, 16 workers", "rps"),
        1.2,
        1.6,
        at_least=True,
    ),
    Row(
        "p99.9 at 1000 selects/s while 20000 blocks/s arrive",
        _ratio(f"select at a fixed rate while ingesting, {TRACE}", "open_p999_us"),
        1.0,
        0.5,
    ),
    Row("threads at 512 workers", _own(LARGE_FLEET, "threads"), 4, unit=""),
    Row(
        "descriptors at 512 workers beyond one per engine",
        _own(LARGE_FLEET, "descriptors", minus=WORKERS),
        600,
        unit="",
    ),
    Row("resident memory after start", _own("process, after start", "rss_mb"), 45, unit="MB"),
    Row("CPU per block, ingest", _ratio(index.INGEST, "block_cpu_us"), 1.5, 1.0),
    Row("CPU per block, removal", _ratio(index.REMOVE_ONE, "block_cpu_us"), 1.5, 1.0),
    Row("memory per block-holding at 500000", _ratio(index.MEMORY, "holding_bytes"), 3.5, 2.0),
    Row("match of an 815-block prompt", _own(index.MATCH, "match_us"), 5, 2, unit="µs"),
    Row(
        "worst pause while 1000000 holdings churn at 50000 blocks/s",
        _own(index.PAUSE, "open_max_us", 1e-3),
        10,
        2,
        unit="ms",
    ),
    Row(
        "match at 1000000 holdings over match at 10000",
        _own_ratio(index.MATCH_LARGE, index.MATCH_SMALL, "match_us"),
        3.0,
        1.5,
    ),
    Row("match at 1000000 holdings", _own(index.MATCH_LARGE, "match_us"), 5, unit="µs"),
)


class Verdict(msgspec.Struct, frozen=True):
    """A row with its figure against every reference, in their order; judged by the first."""

    title: str
    values: list[float | None]
    bound: float
    aim: float | None
    unit: str
    at_least: bool
    verdict: str


def verdicts(results: Results) -> list[Verdict]:
    """All rows, those that were not measured too."""
    found = []
    for row in ROWS:
        values = [row.figure(results, reference) for reference in results.references]
        value = values[0] if values else None
        if value is None:
            skipped = row.figure is _msgpack and MSGPACK in results.skipped
            verdict = results.skipped[MSGPACK] if skipped else NOT_MEASURED
        elif not row.holds(value, row.bound):
            verdict = "does not hold"
        else:
            reached = row.aim is not None and row.holds(value, row.aim)
            verdict = "holds, the aim too" if reached else "holds"
        found.append(
            Verdict(row.title, values, row.bound, row.aim, row.unit, row.at_least, verdict)
        )
    return found
