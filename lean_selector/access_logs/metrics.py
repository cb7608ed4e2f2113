"""What a scrape shows of the lines that were read."""

from collections.abc import Callable, Iterator, Sequence

from lean_selector.access_logs.ends import LogEnds
from lean_selector.access_logs.reader import LineReader
from lean_selector.service.exposition import Families, Family, Sample, labels


def access_log_families(ends: LogEnds, readers: Callable[[], Sequence[LineReader]]) -> Families:
    """As many series as there are results."""

    def lines() -> Iterator[Sample]:
        for result, count in sorted(ends.results.items()):
            yield labels(result=result), count

    return [
        Family(
            "lean_selector_lifecycle_lines_total",
            "counter",
            "Lines of gateways' access logs by what became of them.",
            lines,
        ),
        Family(
            "lean_selector_lifecycle_lines_dropped_total",
            "counter",
            "Lines that came over UDP while the socket had no room: their reservations expire.",
            lambda: [("", sum(reader.dropped for reader in readers()))],
        ),
        Family(
            "lean_selector_lifecycle_unknown_workers_total",
            "counter",
            "Lines whose worker is not registered.",
            lambda: [("", ends.unknown_workers)],
        ),
    ]
