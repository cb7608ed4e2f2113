"""Event and replay endpoints that ranks share, each of whom can have but its own. Asks nobody.

One engine may be registered as several workers, as for two tenants: their ranks share rightly.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from lean_selector.doctor.findings import Finding, Level
from lean_selector.doctor.selector_shapes import Source, WorkerRecord
from lean_selector.doctor.source_judgement import subject_of

_NAMED: Final = 4  # of those that share one


class _Use:
    """Of an endpoint, in a field of a rank."""

    def __init__(self, source: Source, field: str, endpoint: str, engine: str | int) -> None:
        self.subject: Final = subject_of(source)
        self.field: Final = field
        self.endpoint: Final = endpoint
        self.publisher: Final = engine, source.dp_rank, field


def judge_shared_endpoints(
    workers: Sequence[WorkerRecord], sources: Sequence[Source]
) -> Iterator[Finding]:
    """One finding for each endpoint that is shared, at the first that has it."""
    for first, *others in _uses(workers, sources).values():
        wrong = [use for use in others if use.publisher != first.publisher]
        if wrong:
            yield Finding(
                Level.ERROR,
                first.subject,
                f"{first.field} {first.endpoint} is also {_named(wrong)}: what one rank has cached "
                "counts for another",
                "register for each rank the endpoints of its own engine",
            )


def _uses(workers: Sequence[WorkerRecord], sources: Sequence[Source]) -> dict[str, list[_Use]]:
    """By endpoint, in the order of the sources."""
    engines = {worker.worker_id: worker.endpoint for worker in workers}
    found: dict[str, list[_Use]] = {}
    for source in sources:
        engine = engines.get(source.worker_id) or source.worker_id
        fields = {"kv_events_endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint}
        for field, endpoint in fields.items():
            if endpoint is not None:
                found.setdefault(endpoint, []).append(_Use(source, field, endpoint, engine))
    return found


def _named(uses: Sequence[_Use]) -> str:
    named = [f"the {use.field} of {use.subject}" for use in uses[:_NAMED]]
    more = len(uses) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
