"""Logs one line when a rank's KV events have a fault, and one line when the fault ends.

A fault that may be due to a starting engine is logged after a minute, because engines take minutes
to load a model (D35). Callers determine the fault; this module decides when to log it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lean_selector.core.index.kv_cursor import KvCursor, SourceState
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.links.link import Link, LinkState

# No warning is logged until a source has been unreachable, silent although its rank has work, or
# without a replay for this many seconds.
GRACE_S: Final = 60.0

MISMATCH: Final = "mismatch"
UNREACHABLE: Final = "unreachable"
SILENT: Final = "silent"
NO_REPLAY: Final = "no_replay"
PARTIAL: Final = "partial"

_AT_ONCE: Final = {MISMATCH: logging.WARNING, PARTIAL: logging.INFO}
_AFTER_GRACE: Final = (UNREACHABLE, SILENT, NO_REPLAY)
_RENEW: Final = "DELETE the worker, then POST it with the engine's"


def condition(
    live: Link,
    ingest: KvIngest,
    cursor: KvCursor,
    replay_endpoint: str | None,
    no_replay: str,
) -> tuple[str, str]:
    """Return the state of a rank's KV-event source, and one line that describes its fault. The line
    is "" if there is no fault. `no_replay`: why the last request for missed batches failed."""
    if live.state is not LinkState.CONNECTED:
        if live.error is None:
            return "resolving" if live.state is LinkState.RESOLVING else "connecting", ""
        been = "the connection was lost" if live.was_connected else "never connected"
        return UNREACHABLE, f"{been}: {live.error}"
    if ingest.is_mismatched:
        stored, other = ingest.stored, ingest.stored_of_other_size
        if not other:
            return MISMATCH, _unlike_prompts(ingest)
        return MISMATCH, (
            f"the engine's blocks are of {ingest.other_size} tokens, the worker's block_size is "
            f"{ingest.block_size}: {other} of {stored + other} stored events were skipped; {_RENEW}"
        )
    if ingest.stray_events:
        return MISMATCH, (
            f"{ingest.stray_events} events name rank {ingest.stray_rank}, the source is registered "
            f"for rank {ingest.dp_rank}: their blocks count for rank {ingest.stray_rank}"
        )
    state = cursor.state
    if state is SourceState.SILENT:
        return SILENT, "connected, but no event received, and its replay is empty"
    if state is SourceState.PARTIAL:
        return PARTIAL, f"its replay begins at batch {cursor.unknown}, not at the first"
    if state is SourceState.NO_REPLAY and replay_endpoint is not None:
        return NO_REPLAY, f"no replay from {replay_endpoint}: {no_replay}"
    if state is SourceState.NO_REPLAY:
        return NO_REPLAY, f"no replay endpoint to ask for the {cursor.unknown} batches before"
    if state is SourceState.CONNECTING and replay_endpoint is None:
        return NO_REPLAY, "connected, but no event received, and no replay endpoint registered"
    if state is SourceState.LIVE and ingest.is_tentative:
        return PARTIAL, "some blocks are copied from a peer that did not know the last batch"
    return state.value, ""


def _unlike_prompts(ingest: KvIngest) -> str:
    """The block size is right, but prompts cannot match the rank's blocks. Return the reason."""
    if not ingest.stored:
        return f"all {ingest.stored_partial} stored events have less than a block"
    told = str(ingest.is_eagle).lower()
    return (
        f"{ingest.stored_unlike_prompts} of {ingest.stored} stored events cover the token after a "
        f"block where prompts do not, or the other way round: the worker's is_eagle is {told}; "
        f"{_RENEW}"
    )


@dataclass(eq=False)
class SourceWatch:
    """Logs the faults of one rank's KV-event source. All times are monotonic seconds.

    `has_work()` returns whether the rank has requests now. If so, KV events are expected."""

    log: Callable[[int, str], None]
    has_work: Callable[[], bool]
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        self._state = ""
        self.since = 0.0  # start of the current state
        self._worked_at: float | None = None  # when work was first seen during the current silence
        self._is_told = False

    def record(self, state: str, what: str, now: float) -> None:
        """Record the source's `state`. If it is a fault, log `what` once. A fault that the start of
        an engine can cause is logged when it has lasted `grace_s` seconds. Call this regularly."""
        if state != self._state:
            if self._is_told:
                text = f"no longer {self._state}, after {now - self.since:.0f} s: {state}"
                self.log(logging.INFO, text)
            self._state, self.since = state, now
            self._worked_at = None
            self._is_told = False
        if not self._is_told and self._is_due(state, now):
            self._is_told = True
            self.log(_AT_ONCE.get(state, logging.WARNING), f"{state}: {what}")

    def _is_due(self, state: str, now: float) -> bool:
        if state in _AT_ONCE:
            return True
        if state not in _AFTER_GRACE:
            return False
        since = self.since
        if state == SILENT:
            if self._worked_at is None:
                if not self.has_work():
                    return False
                self._worked_at = now
            since = self._worked_at
        return now - since >= self.grace_s
