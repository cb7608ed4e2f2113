"""Results against the targets of the project, as tables and as JSON."""

from collections.abc import Callable

import msgspec

from loadtest.duel import index
from loadtest.duel.results import Results
from loadtest.duel.stages import with_option

# -- the targets, and whether they are met ---------------------------------------------------------

TRACE = "trace prompts at 16, 16 workers"
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
    "temperature": 2.5,
    "required taint": 2.5,
    "preferred taints": 2.5,
}

# Of what we come to (ours: one of our forms) and a reference.
Figure = Callable[[Results, str, str], float | None]


class Row(msgspec.Struct, frozen=True):
    """A target, in `unit`."""

    title: str
    figure: Figure
    target: float
    at_least: bool = False  # the figure must not be below, instead of not above
    unit: str = "x"

    def verdict(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        is_met = value >= self.target if self.at_least else value <= self.target
        return "met" if is_met else "missed"

    def limit(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.target:g} {self.unit}".rstrip()


def _ratio(case: str, metric: str = "cpu_us") -> Figure:
    return lambda results, ours, reference: results.ratio(case, metric, reference, ours)


def _own(case: str, metric: str, scale: float = 1.0, minus: float = 0.0) -> Figure:
    """Of ours alone."""

    def figure(results: Results, ours: str, reference: str) -> float | None:
        value = results.value(case, ours, metric)
        return None if value is None else value * scale - minus

    return figure


def _own_ratio(case: str, other: str, metric: str = "cpu_us") -> Figure:
    return lambda results, ours, reference: results.quotient(case, ours, other, ours, metric)


def _select(what: str, target: float) -> Row:
    return Row(f"CPU, select, {what}", _ratio(f"select, {what}"), target)


ROWS = (
    _select("8 blocks, 16 workers", 0.80),
    _select(TRACE, 0.65),
    _select("trace prompts at 64, 16 workers", 0.75),
    _select("4096 blocks, 16 workers", 0.60),
    Row("CPU, lifecycle, trace prompts", _ratio(f"lifecycle, {TRACE}"), 0.33),
    Row("CPU, lifecycle, 8 blocks", _ratio("lifecycle, 8 blocks, 16 workers"), 1.0),
    _select("8 blocks, 128 workers", 0.55),
    _select("8 blocks, 512 workers", 0.28),
    Row(
        "own CPU at 512 workers over own at 16",
        _own_ratio("select, 8 blocks, 512 workers", "select, 8 blocks, 16 workers"),
        1.4,
    ),
    Row(
        "own CPU at 4096 workers over own at 16, no events",
        _own_ratio(with_option("no events", 4_096), with_option("no events", 16)),
        1.5,
    ),
    *(
        Row(
            f"own CPU with {option} over own without, 512 workers",
            _own_ratio(with_option(option), with_option("nothing")),
            target,
        )
        for option, target in OPTIONS.items()
    ),
    *(Row(f"CPU, {with_option(option)}", _ratio(with_option(option)), 0.7) for option in OPTIONS),
    Row(
        "CPU, msgpack body over the reference's JSON, trace prompts",
        lambda results, ours, reference: results.quotient(
            MSGPACK, ours, f"select, {TRACE}", reference, "cpu_us"
        ),
        0.20,
    ),
    Row(
        "requests/s on one core, 8 blocks",
        _ratio("select on one core, 8 blocks, 16 workers", "rps"),
        1.15,
        at_least=True,
    ),
    Row(
        "p99.9 at 1000 selects/s while 20000 blocks/s arrive",
        _ratio(f"select at a fixed rate while ingesting, {TRACE}", "open_p999_us"),
        1.0,
    ),
    Row("threads at 512 workers", _own(LARGE_FLEET, "threads"), 4, unit=""),
    Row(
        "descriptors at 512 workers beyond one per engine",
        _own(LARGE_FLEET, "descriptors", minus=WORKERS),
        600,
        unit="",
    ),
    Row("CPU per block, fresh, whole prompts per event", _ratio(index.FRESH, CPU), 1.2),
    Row("CPU per block stored or evicted in churn", _ratio(index.CHURN, CPU), 1.1),
    Row("memory per holding, fresh", _ratio(index.FRESH, MEMORY), 2.5),
    Row("memory per holding after churn", _ratio(index.CHURN, MEMORY), 1.5),
    *(
        Row(f"{title}, {case.removeprefix('index, ')}", _ratio(case, metric), target)
        for filling in index.FILLINGS[1:]
        if filling.layout.is_read
        for case in filling.cases
        for title, metric, target in (
            ("CPU per block", CPU, 0.8),
            ("memory per holding", MEMORY, 1.3),
        )
        if metric == CPU or case == filling.cases[0]
    ),
    Row(
        "longest pause while 1000000 holdings churn at 50000 blocks/s",
        _own(index.PAUSE, "open_max_us", 1e-3),
        10,
        unit="ms",
    ),
)


class Verdict(msgspec.Struct, frozen=True):
    """A row with its figure in each of `Results.comparisons`; judged by the first."""

    title: str
    values: list[float | None]
    target: str
    verdict: str


def verdicts(results: Results) -> list[Verdict]:
    """All rows, those that were not measured too."""
    found = []
    for row in ROWS:
        values = [row.figure(results, *each) for each in results.comparisons]
        judged = row.verdict(values[0] if values else None)
        found.append(Verdict(row.title, values, row.limit(), judged))
    return found


# -- tables and JSON -------------------------------------------------------------------------------
# Every figure is the median over the rounds.

# Title, and the metrics of its rows.
SECTIONS: tuple[tuple[str, dict[str, str]], ...] = (
    ("CPU of the server process per request, µs", {"cpu_us": "", "peer_cpu_us": "the peer"}),
    ("Requests per second, closed load", {"rps": ""}),
    ("Latency under closed load, µs", {"p50_us": "p50", "p99_us": "p99"}),
    (
        "Latency at a fixed rate, counted from when a request was due, µs",
        {
            "open_p50_us": "p50",
            "open_p99_us": "p99",
            "open_p999_us": "p99.9",
            "open_max_us": "max",
            "calm_max_us": "max without events",
            "client_late_p999_us": "client late, p99.9",
            "client_late_max_us": "client late, max",
        },
    ),
    ("Index", {"block_cpu_us": "CPU µs per block", "holding_bytes": "bytes per holding"}),
    (
        "Process",
        {
            "rss_mb": "RSS, MB",
            "threads": "threads",
            "descriptors": "descriptors",
            "idle_cpu_ms_per_s": "idle CPU, ms/s",
        },
    ),
)


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    """Markdown that can be read in a terminal, too; the first column is words."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [f"**{title}**", ""]
    for first, *others in [head, rule, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("| " + " | ".join([first.ljust(widths[0]), *cells]) + " |")
    return "\n".join(lines)


def figure(value: float | None) -> str:
    """Three digits that count; `-` for what was not measured."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def tables(results: Results) -> list[str]:
    """The sections that have figures, then the targets."""
    against = [f"{results.form_of(ours)} / {other}" for ours, other in results.comparisons]
    made = []
    for title, metrics in SECTIONS:
        rows = []
        for case, by_target in results.rounds.items():
            for metric, words in metrics.items():
                if any(metric in found for found in by_target.values()):
                    values = [results.value(case, target, metric) for target in results.targets]
                    values += [
                        results.ratio(case, metric, other, ours)
                        for ours, other in results.comparisons
                    ]
                    name = f"{case}: {words}" if words else case
                    rows.append([name, *map(figure, values)])
        if rows:
            made.append(_table(title, ["case", *results.targets, *against], rows))
    judged = [
        [row.title, *map(figure, row.values), row.target, row.verdict]
        for row in verdicts(results)
        if any(value is not None for value in row.values)
    ]
    title = "Targets (x is ours over the reference)"
    return [*made, _table(title, ["figure", *against, "target", "verdict"], judged)]


def lines(results: Results, about: dict[str, str]) -> str:
    """Everything, in Markdown."""
    head = [f"{name}: {value}" for name, value in about.items()]
    skipped = [f"{case}: {reason}" for case, reason in results.skipped.items()]
    words = [f"- {word}" for word in [*head, *skipped, *results.notes]]
    return "\n\n".join(["\n".join(words), *tables(results)])


def as_json(results: Results, about: dict[str, str]) -> bytes:
    """Every value of every round, and the targets."""
    document = {"about": about, "results": results, "targets": verdicts(results)}
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
