"""The bounds that this project has set itself, and whether the figures of a run are inside.

A table of rows; nothing here fails a run. Where a row is a ratio it is ours to the reference's, in
the same run, so that the machine cancels out.
"""

from collections.abc import Callable

import msgspec

from lean_selector.form import COMPILED, PURE
from loadtest.duel import index_stages as index
from loadtest.duel.cases import with_option
from loadtest.duel.results import Results

NOT_MEASURED = "not measured"
TRACE = "trace prompts at 16, 16 workers"
TRACE_64 = "trace prompts at 64, 16 workers"
START = "process, after start"
MSGPACK = f"select as msgpack, {TRACE}"
LARGE_FLEET = "process, 512 workers"
WORKERS = 512
CPU, MEMORY = "block_cpu_us", "holding_bytes"  # of a block, of a holding

# Of a selection, and how many times a plain one of ours it may cost.
OPTIONS = {
    "queue threshold": 1.3,
    "credit decay": 1.6,
    "allowed workers": 1.6,
    "lower tiers": 1.6,
    "shared host blocks": 1.6,
    "temperature": 2.5,
    "required taint": 2.5,
    "preferred taints": 2.5,
}

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


def _own_form(form: str, case: str, metric: str) -> Figure:
    """Of the one of our forms that is so named, whichever is compared."""

    def figure(results: Results, reference: str) -> float | None:
        named = [n for n in (results.ours, *results.beside) if n.endswith(f" {form}")]
        return results.value(case, named[0], metric) if named else None

    return figure


def _own_ratio(case: str, other: str, metric: str) -> Figure:
    def figure(results: Results, reference: str) -> float | None:
        return results.quotient(case, results.ours, other, results.ours, metric)

    return figure


def _msgpack(results: Results, reference: str) -> float | None:
    return results.quotient(MSGPACK, results.ours, f"select, {TRACE}", reference, "cpu_us")


ROWS = (
    Row("CPU, select, 8 blocks, 16 workers", _ratio("select, 8 blocks, 16 workers"), 0.80, 0.65),
    Row(f"CPU, select, {TRACE}", _ratio(f"select, {TRACE}"), 0.65, 0.50),
    Row(f"CPU, select, {TRACE_64}", _ratio(f"select, {TRACE_64}"), 0.75, 0.55),
    Row("CPU, select, 4096 blocks", _ratio("select, 4096 blocks, 16 workers"), 0.60, 0.45),
    Row("CPU, lifecycle, trace prompts", _ratio(f"lifecycle, {TRACE}"), 0.33, 0.25),
    Row("CPU, lifecycle, 8 blocks", _ratio("lifecycle, 8 blocks, 16 workers"), 1.0, 0.80),
    Row("CPU, select, 8 blocks, 128 workers", _ratio("select, 8 blocks, 128 workers"), 0.55, 0.45),
    Row("CPU, select, 8 blocks, 512 workers", _ratio("select, 8 blocks, 512 workers"), 0.28, 0.20),
    Row(
        "own CPU at 512 workers over own at 16",
        _own_ratio("select, 8 blocks, 512 workers", "select, 8 blocks, 16 workers", "cpu_us"),
        1.4,
        1.1,
    ),
    Row(
        "own CPU at 4096 workers over own at 16, no events",
        _own_ratio(with_option("no events", 4_096), with_option("no events", 16), "cpu_us"),
        1.5,
        1.2,
    ),
    *(
        Row(
            f"own CPU with {option} over own without, 512 workers",
            _own_ratio(with_option(option), with_option("nothing"), "cpu_us"),
            bound,
            1.2,
        )
        for option, bound in OPTIONS.items()
    ),
    *(
        Row(
            f"CPU, select with {option}, 8 blocks, 512 workers",
            _ratio(with_option(option)),
            0.7,
            0.4,
        )
        for option in OPTIONS
    ),
    Row("CPU, msgpack body over the reference's JSON, trace prompts", _msgpack, 0.20, 0.12),
    Row(
        "requests/s on one core, 8 blocks",
        _ratio("select on one core, 8 blocks, 16 workers", "rps"),
        1.15,
        1.4,
        at_least=True,
    ),
    Row(
        "p99.9 at 1000 selects/s while 20000 blocks/s arrive, median of five rounds",
        _ratio(f"select at a fixed rate while ingesting, {TRACE}", "open_p999_us"),
        1.0,
        0.7,
    ),
    Row("threads at 512 workers", _own(LARGE_FLEET, "threads"), 4, unit=""),
    Row(
        "descriptors at 512 workers beyond one per engine",
        _own(LARGE_FLEET, "descriptors", minus=WORKERS),
        600,
        unit="",
    ),
    Row("resident memory after start, pure", _own_form(PURE, START, "rss_mb"), 45, unit="MB"),
    Row(
        "resident memory after start, compiled", _own_form(COMPILED, START, "rss_mb"), 50, unit="MB"
    ),
    Row("CPU per block, ingest", _ratio(index.INGEST, CPU), 1.5, 1.0),
    Row("CPU per block, fresh, whole prompts per event", _ratio(index.FRESH, CPU), 1.2, 0.8),
    Row("CPU per block stored or evicted in churn", _ratio(index.CHURN, CPU), 1.1, 0.8),
    Row("memory per holding, fresh", _ratio(index.FRESH_MEMORY, MEMORY), 2.5, 1.5),
    Row("memory per holding after churn", _ratio(index.CHURN_MEMORY, MEMORY), 1.5, 1.0),
    Row("CPU per block, removal", _ratio(index.REMOVE_ONE, CPU), 1.5, 1.0),
    Row("memory per block-holding at 500000", _ratio(index.MEMORY, MEMORY), 3.5, 2.0),
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
    """A row with its figure against every reference, in their order; judged by the first.

    beside: the figures of our other forms against the first reference.
    """

    title: str
    values: list[float | None]
    bound: float
    aim: float | None
    unit: str
    at_least: bool
    verdict: str
    beside: list[float | None] = []


def verdicts(results: Results) -> list[Verdict]:
    """All rows, those that were not measured too."""
    found = []
    for row in ROWS:
        values = [row.figure(results, reference) for reference in results.references]
        others = [
            row.figure(results.of(n), r) for n in results.beside for r in results.references[:1]
        ]
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
            Verdict(row.title, values, row.bound, row.aim, row.unit, row.at_least, verdict, others)
        )
    return found
