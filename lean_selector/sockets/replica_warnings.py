"""What the log says of replica events that are dropped: seldom, and how many there were."""

import logging

from lean_selector.core.replication.events import Verdict
from lean_selector.core.replication.shapes import ReplicaEvent
from lean_selector.core.sessions.shapes import SessionEvent, SessionVerdict

log = logging.getLogger("lean_selector.replica")

WARN_EVERY_S = 10.0
# Verdicts that speak of a configuration fault: a worker or model that one replica was not told of.
_WORTH_A_WARNING = (
    Verdict.UNKNOWN_PARTITION,
    Verdict.BLOCK_SIZE,
    Verdict.RANK,
    Verdict.WORKER_MISMATCH,
)
_SESSION_WORTH_A_WARNING = (
    SessionVerdict.UNKNOWN_PARTITION,
    SessionVerdict.UNKNOWN_WORKER,
    SessionVerdict.TOO_LONG,
    SessionVerdict.SEQUENCE,
    SessionVerdict.FULL,
)


class DropWarnings:
    """At most one line per reason in WARN_EVERY_S."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, int]] = {}  # reason -> last line, events since

    def judge(
        self, event: ReplicaEvent | SessionEvent, verdict: Verdict | SessionVerdict, now: float
    ) -> None:
        """Warns where what became of an event speaks of a fault."""
        is_session = isinstance(event, SessionEvent)
        if verdict in (_SESSION_WORTH_A_WARNING if is_session else _WORTH_A_WARNING):
            self.warn(now, verdict.name.lower().replace("_", " "), name_of(event))

    def warn(self, now: float, reason: str, detail: str, events: int = 1) -> None:
        """So many were dropped; `detail` is of the last."""
        last, count = self._said.get(reason, (-WARN_EVERY_S, 0))
        count += events
        if now - last < WARN_EVERY_S:
            self._said[reason] = last, count
            return
        self._said[reason] = now, 0
        log.warning("replica events dropped (%s): %d; the last: %s", reason, count, detail)


def name_of(event: ReplicaEvent | SessionEvent) -> str:
    """An event for a log line, peers' text quoted."""
    if isinstance(event, SessionEvent):
        return (
            f"session {event.session_id!r} of model={event.model_name!r} "
            f"tenant={event.tenant_id!r} worker={event.worker_id} dp_rank={event.dp_rank} "
            f"from router {event.writer_id}"
        )
    booking = event.booking
    return (
        f"{event.kind.name} {booking.request_id!r} of model={event.model_name!r} "
        f"tenant={event.tenant_id!r} block_size={event.block_size} worker={booking.worker_id} "
        f"dp_rank={booking.dp_rank} from router {event.router_id}"
    )
