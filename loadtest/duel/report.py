"""Results as tables, in plain text and in Markdown, and as JSON.

Owns the sections and how a figure is written. Every figure is the median over the rounds.
"""

from collections.abc import Sequence

import msgspec

from loadtest.duel.budget import NOT_MEASURED, Verdict, verdicts
from loadtest.duel.results import Results

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
