"""What a selector's own words mean, and what mends it. Asks nobody."""

from collections.abc import Iterator

from lean_selector.doctor.discovery_judgement import judge_discoveries, looks_for_workers
from lean_selector.doctor.endpoint_judgement import judge_shared_endpoints
from lean_selector.doctor.findings import Finding, Level
from lean_selector.doctor.selector_shapes import Readiness, SelectorFacts
from lean_selector.doctor.source_judgement import judge_source
from lean_selector.doctor.worker_judgement import can_be_chosen, judge_workers


def judge_selector(facts: SelectorFacts) -> Iterator[Finding]:
    """The service as a whole, then its discoveries, its workers and their sources."""
    yield _judge_readiness(facts)
    yield from _judge_keeping(facts.readiness)
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


def _judge_keeping(readiness: Readiness) -> Iterator[Finding]:
    """What it knew before, and what the next one will."""
    if readiness.recovering:
        yield Finding(Level.NOTE, "selector", "it still recovers its index from --indexer-peers")
    if readiness.state_fault is not None:
        yield Finding(
            Level.WARNING,
            "selector",
            f"its state is not written, and a restart would lose it: {readiness.state_fault}",
            "mend the disk of --state-dir; it is tried again every second",
        )


def _judge_sources(facts: SelectorFacts) -> Iterator[Finding]:
    if facts.sources is None:
        yield Finding(Level.NOTE, "selector", "it does not tell how it follows KV events")
        return
    if not facts.sources and facts.workers:
        yield Finding(
            Level.WARNING,
            "selector",
            "it follows no KV events: workers are chosen by load alone, or with "
            "--router-ttl-secs by what was booked on them",
            "register workers with kv_events_endpoint, and run without --use-kv-events false",
        )
    for source in facts.sources:
        yield judge_source(source)
    yield from judge_shared_endpoints(facts.workers, facts.sources)
