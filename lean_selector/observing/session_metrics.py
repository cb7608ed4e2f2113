"""The metrics of sessions: who is bound, what became of their bookings, what peers told.

Reads the tables of the partitions when a scrape asks. No label is an id.
"""

from collections.abc import Callable, Iterator

from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.peer_sessions import PeerSessions
from lean_selector.core.sessions.shapes import SessionVerdict
from lean_selector.core.sessions.table import SessionTable
from lean_selector.observing.load_metrics import Families, scope_labels
from lean_selector.observing.metrics import Family, Sample, labels


def session_families(
    partitions: Callable[[], list[Partition]], peers: PeerSessions | None
) -> Families:
    """Nothing while sessions are off, which is where `peers` is None."""
    if peers is None:
        return []

    def tables() -> Iterator[tuple[Partition, SessionTable]]:
        for each in partitions():
            if each.sessions is not None:
                yield each, each.sessions

    def bound() -> Iterator[Sample]:
        for each, table in tables():
            yield scope_labels(each, state="held"), table.held
            yield scope_labels(each, state="idle"), len(table) - table.held

    def bookings() -> Iterator[Sample]:
        for each, table in tables():
            counts = table.counts
            for result, count in (
                ("followed", counts.followed),
                ("bound", counts.bound),
                ("moved", counts.moved),
                ("refused", counts.refused),
                ("unbound", counts.unbound),
            ):
                yield scope_labels(each, result=result), count

    def heard() -> Iterator[Sample]:
        for verdict in SessionVerdict:
            yield labels(result=verdict.name.lower()), peers.counts[verdict]

    return [
        Family(
            "lean_selector_sessions",
            "gauge",
            "Sessions bound to a rank: with a live reservation here (held), or without (idle).",
            bound,
        ),
        Family(
            "lean_selector_session_bookings_total",
            "counter",
            "Bookings of sessions by what became of them.",
            bookings,
        ),
        Family(
            "lean_selector_sessions_expired_total",
            "counter",
            "Sessions that were bound and whose time to live has passed.",
            lambda: ((scope_labels(each), table.counts.expired) for each, table in tables()),
        ),
        Family(
            "lean_selector_replica_sessions_total",
            "counter",
            "Bindings that peers told of, by what became of them.",
            heard,
        ),
    ]
