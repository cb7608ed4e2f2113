"""What a selector's own words mean, and what mends it. Asks nobody."""

from collections.abc import Iterator
from typing import Final

from lean_selector.doctor.discovery_judgement import judge_discoveries, looks_for_workers
from lean_selector.doctor.engine_keys import SECRET, SERVERS, is_about_keys
from lean_selector.doctor.findings import Finding, Level
from lean_selector.doctor.selector_shapes import SelectorFacts, Source
from lean_selector.doctor.worker_judgement import can_be_chosen, judge_workers

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


def judge_selector(facts: SelectorFacts) -> Iterator[Finding]:
    """The service as a whole, then its discoveries, its workers and their sources."""
    yield _judge_readiness(facts)
    if facts.discoveries is not None:
        yield from judge_discoveries(facts.discoveries)
    yield from judge_workers(facts.workers)
    yield from _judge_sources(facts)


def _judge_readiness(facts: SelectorFacts) -> Finding:
    if not facts.workers:
        advice = "POST /workers for each engine, or start it with --discover"
        if looks_for_workers(facts.discoveries):
            advice = "mend its discoveries, as told below, or POST /workers for each engine"
        return Finding(Level.ERROR, "selector", "no worker is registered", advice)
    count = can_be_chosen(facts.workers)
    what = f"{count} of {len(facts.workers)} workers can be chosen"
    if facts.is_ready:
        return Finding(Level.OK, "selector", f"ready: {what}")
    mend = None if count else "mend the workers below"
    return Finding(Level.ERROR, "selector", f"not ready: {what}", mend)


def _judge_sources(facts: SelectorFacts) -> Iterator[Finding]:
    if facts.sources is None:
        yield Finding(Level.NOTE, "selector", "it does not tell how it follows KV events")
        return
    if not facts.sources and facts.workers:
        yield Finding(
            Level.WARNING,
            "selector",
            "it follows no KV events: workers are chosen by load alone",
            "register workers with kv_events_endpoint, and run without --use-kv-events false",
        )
    for source in facts.sources:
        yield judge_source(source)


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
