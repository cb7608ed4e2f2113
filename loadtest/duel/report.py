"""Results against the bounds of the project, as tables, as JSON, and as a drawing."""

from collections.abc import Callable, Sequence
from html import escape

import msgspec

from lean_selector.build_info import COMPILED, PURE
from loadtest.duel import index_stages as index
from loadtest.duel.results import Results
from loadtest.duel.stages import with_option

# -- the bounds, and whether they hold -------------------------------------------------------------

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
            verdict = NOT_MEASURED
        elif not row.holds(value, row.bound):
            verdict = "does not hold"
        else:
            reached = row.aim is not None and row.holds(value, row.aim)
            verdict = "holds, the aim too" if reached else "holds"
        found.append(
            Verdict(row.title, values, row.bound, row.aim, row.unit, row.at_least, verdict, others)
        )
    return found


# -- tables and JSON -------------------------------------------------------------------------------
# Every figure is the median over the rounds.

# Title, the metrics of its rows, and whether ours divided by theirs says something.
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
            "loop_lag_us": "lag of its loop by its own account, above",
            "client_late_p999_us": "client late, p99.9",
            "client_late_max_us": "client late, max",
        },
    ),
    (
        "Index",
        {
            "block_cpu_us": "CPU µs per block",
            "holding_bytes": "bytes per holding",
            "match_us": "CPU µs per match",
        },
    ),
    (
        "Process",
        {
            "rss_mb": "RSS, MB",
            "pss_mb": "PSS, MB",
            "threads": "threads",
            "descriptors": "descriptors",
            "idle_cpu_ms_per_s": "idle CPU, ms/s",
        },
    ),
)


class Table(msgspec.Struct, frozen=True):
    """A title, a head and rows of text; the first column is words, the others are figures."""

    title: str
    head: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        lines = [self.title, *(_padded(row, widths) for row in [self.head, *self.rows])]
        return "\n".join(lines)

    def markdown(self) -> str:
        rule = ["---"] + ["---:"] * (len(self.head) - 1)
        lines = ["| " + " | ".join(row) + " |" for row in [self.head, rule, *self.rows]]
        return "\n".join([f"**{self.title}**", "", *lines])


def _padded(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0])]
    cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  " + "  ".join(cells).rstrip()


def figure(value: float | None) -> str:
    """Three digits that count; `-` for what was not measured."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def tables(results: Results) -> list[Table]:
    """The sections that have figures, then the budget."""
    ratios = [f"ours / {reference}" for reference in results.references]
    ratios += [f"{_form(name)} / {reference}" for name, reference in _beside(results)]
    made = []
    for title, metrics in SECTIONS:
        rows = []
        for case, by_target in results.rounds.items():
            for metric, words in metrics.items():
                if not any(metric in found for found in by_target.values()):
                    continue
                values = [results.value(case, target, metric) for target in results.targets]
                shares = [results.ratio(case, metric, name) for name in results.references]
                shares += [
                    results.of(name).ratio(case, metric, reference)
                    for name, reference in _beside(results)
                ]
                name = f"{case}: {words}" if words else case
                rows.append([name, *map(figure, values), *map(figure, shares)])
        if rows:
            made.append(Table(title, ["case", *results.targets, *ratios], rows))
    made.append(_budget_table(verdicts(results), results))
    return made


def _beside(results: Results) -> list[tuple[str, str]]:
    """Each of our other forms with the reference that it is compared with, the first."""
    return [(name, reference) for name in results.beside for reference in results.references[:1]]


def _form(name: str) -> str:
    return name.rpartition(" ")[2]


def _budget_table(rows: Sequence[Verdict], results: Results) -> Table:
    def limit(row: Verdict, value: float | None) -> str:
        sign = "≥" if row.at_least else "≤"
        return "" if value is None else f"{sign} {value:g} {row.unit}".rstrip()

    beside = [f"{_form(name)}: {reference}" for name, reference in _beside(results)]
    head = ["budget", *results.references, *beside, "at least", "aim", "verdict"]
    body = [
        [
            row.title,
            *map(figure, row.values),
            *map(figure, row.beside),
            limit(row, row.bound),
            limit(row, row.aim),
            row.verdict,
        ]
        for row in rows
        if row.verdict != NOT_MEASURED or any(v is not None for v in (*row.values, *row.beside))
    ]
    return Table("Budget (x is ours over the reference)", head, body)


def lines(results: Results, about: dict[str, str], *, markdown: bool) -> str:
    """Everything, as text for a terminal or for a document."""
    head = [f"{name}: {value}" for name, value in about.items()]
    skipped = [f"{case}: {reason}" for case, reason in results.skipped.items()]
    words = [*head, *skipped, *results.warnings()]
    if markdown:
        words = [f"- {word}" for word in words]
    parts = [table.markdown() if markdown else table.text() for table in tables(results)]
    return "\n\n".join(["\n".join(words), *parts])


def as_json(results: Results, about: dict[str, str]) -> bytes:
    """Every value of every round, medians, ratios, and the budget."""
    cases = {
        case: {
            target: {
                metric: {"median": results.value(case, target, metric), "rounds": values}
                for metric, values in metrics.items()
            }
            for target, metrics in by_target.items()
        }
        for case, by_target in results.rounds.items()
    }
    ratios = {
        case: {
            reference: {
                metric: results.ratio(case, metric, reference)
                for metric in by_target.get(results.ours, {})
            }
            for reference in results.references
        }
        for case, by_target in results.rounds.items()
    }
    document = {
        "about": about,
        "ours": results.ours,
        "beside": results.beside,
        "references": results.references,
        "cases": cases,
        "ratios": ratios,
        "budget": verdicts(results),
        "skipped": results.skipped,
        "notes": results.warnings(),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"


# -- the drawing -----------------------------------------------------------------------------------
# Written by hand so that nothing has to be installed. Bars are relative to the first reference, for
# cases differ by a factor of thirty; the figures themselves stand at the bars.

METRIC = "cpu_us"
WIDTH, LABEL, BAR, GAP = 920, 430, 13, 10  # pixels; LABEL is the width of the words on the left
UNIT = 300  # pixels of a bar as long as the first reference's
LONGEST = 1.4  # bars beyond this many times the reference are cut
COLOURS = ("#2f6fb3", "#c8743c", "#dcb08c", "#8a8a8a", "#b5b5b5")


def draw(results: Results, about: str) -> str:
    """An SVG document; `about` is its last line."""
    cases = [
        case
        for case, found in results.rounds.items()
        if any(METRIC in metrics for metrics in found.values())
    ]
    parts = [_text(12, 22, "CPU of the server process per request, µs", "bold 15px")]
    at = 12
    for number, target in enumerate(results.targets):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{at}" y="34" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(at + 16, 44, target))
        at += 40 + 7 * len(target)
    y = 62
    for case in cases:
        parts.append(_text(12, y + BAR * len(results.targets) // 2 + 4, case))
        base = next(
            (v for name in results.references if (v := results.value(case, name, METRIC))),
            results.value(case, results.ours, METRIC),
        )
        for number, target in enumerate(results.targets):
            value = results.value(case, target, METRIC)
            if value is not None and base:
                width = max(1.0, min(LONGEST, value / base) * UNIT)
                colour = COLOURS[number % len(COLOURS)]
                parts.append(
                    f'<rect x="{LABEL}" y="{y}" width="{width:.0f}" height="{BAR - 2}"'
                    f' fill="{colour}"/>'
                )
                parts.append(_text(LABEL + width + 6, y + BAR - 3, figure(value), "11px"))
            y += BAR
        y += GAP
    parts.append(_text(12, y + 12, about, "11px"))
    height = y + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        f' width="{WIDTH}" height="{height}" fill="#222">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, font: str = "12px") -> str:
    return f'<text x="{x:.0f}" y="{y}" style="font: {font} sans-serif">{escape(words)}</text>'
