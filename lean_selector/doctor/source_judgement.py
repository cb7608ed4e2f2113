"""How well a rank's KV events are followed, by the selector's own word. Asks nobody."""

from typing import Final

from lean_selector.doctor.engine_keys import SECRET, SERVERS, is_about_keys
from lean_selector.doctor.findings import Finding, Level
from lean_selector.doctor.selector_shapes import Source

NO_REPLAY: Final = "no_replay"
_NOT_HEARD: Final = (
    "see that the engine runs and publishes KV events, and check the host and port of "
    "kv_events_endpoint"
)

# By state of a source: how bad it is, what it means where no problem is told, what mends it.
_STATES: Final[dict[str, tuple[Level, str, str | None]]] = {
    "live": (Level.OK, "its events are followed", None),
    "replaying": (Level.OK, "what was missed is being replayed", None),
    "partial": (
        Level.NOTE,
        "the replay no longer has the oldest batches: what the engine cached before is not known",
        None,
    ),
    "silent": (
        Level.NOTE,
        "connected, and nothing was heard: an engine that has cached nothing yet, or no publisher",
        "send the engine a prompt, or run this check with --probe",
    ),
    NO_REPLAY: (
        Level.WARNING,
        "no replay: what is missed, also by a restart of the selector, is lost",
        None,
    ),
    "degraded": (
        Level.WARNING,
        "batches were lost that no replay brought: the index may say too little or too much",
        None,
    ),
    "mismatch": (
        Level.ERROR,
        "its events do not fit the registration and are skipped",
        "register the worker with the engine's block size",
    ),
    "unreachable": (Level.ERROR, "is not connected", _NOT_HEARD),
    "connecting": (Level.WARNING, "not connected yet", _NOT_HEARD),
    "resolving": (Level.WARNING, "its host name is being looked up", "check the name in DNS"),
    "failed": (
        Level.ERROR,
        "cannot be opened",
        "correct kv_events_endpoint: tcp://HOST:PORT as the selector reaches it",
    ),
}

# By state, and whether a replay endpoint is registered.
_REPLAY_MENDS: Final[dict[tuple[str, bool], str]] = {
    (NO_REPLAY, False): "start the engine with a replay_endpoint in its --kv-events-config, and "
    "register that: until then what is missed is lost",
    (NO_REPLAY, True): "start the engine with that replay_endpoint in its --kv-events-config, or "
    "register its own: until then what is missed is lost",
    ("degraded", False): "register a replay_endpoint, or restart the engine to begin anew",
    ("degraded", True): "let its replay answer and keep more batches; a restart of the engine "
    "begins anew",
}


def judge_source(source: Source) -> Finding:
    """How well one rank's events are followed, by the selector's own word."""
    level, meaning, mend = _STATES.get(
        source.state, (Level.WARNING, "a state that this check does not know", None)
    )
    parts = [f"{source.state} at {source.endpoint}: {source.problem or meaning}"]
    if source.last_error and not source.problem and level is not Level.OK:
        parts.append(source.last_error)
    if source.skipped:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(source.skipped.items()))
        parts.append(f"skipped events: {counts}")
    mend = _REPLAY_MENDS.get((source.state, source.replay_endpoint is not None), mend)
    if source.problem and is_about_keys(source.problem):
        mend = f"compare the selector's {SERVERS} and {SECRET} with the engine's keys"
    return Finding(level, subject_of(source), "; ".join(parts), mend)


def subject_of(source: Source) -> str:
    return f"worker {source.worker_id} rank {source.dp_rank}"
