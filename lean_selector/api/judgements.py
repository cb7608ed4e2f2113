"""Findings about a selector, with advice, from answers of the selector's API. Sends no requests."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from lean_selector.api.header_warnings import assumed_without_events, mend_of_incomplete
from lean_selector.core.selection.shapes import DECODE, PREFILL
from lean_selector.wire.discovery_states import (
    EVENTS_PORT,
    OF_OTHER_BLOCKS,
    OTHER_BLOCKS,
    WITHOUT_EVENTS,
    DiscoveredWorker,
    DiscoveryReport,
    DiscoveryState,
)
from lean_selector.wire.findings import CheckedWorker, Finding, SelectorFacts
from lean_selector.wire.selection_bodies import KvSource, RankHealthRow


class Level:
    """Severity of a finding. `lean-selector check` fails if it has a finding of level `error`."""

    OK: Final = "ok"
    NOTE: Final = "note"  # for information
    WARNING: Final = "warning"  # it works, but not as well as it could
    ERROR: Final = "error"


# -- KV event sources ------------------------------------------------------------------------------

NO_REPLAY: Final = "no_replay"
_UNHEARD: Final = ("unreachable", "connecting", "failed")  # states of a port that cannot be reached
LEAST_ACCURACY: Final = 0.9
_NOT_HEARD: Final = (
    "see that the engine runs and publishes KV events, and check the host and port of "
    "kv_events_endpoint"
)

# By state of a source: its severity, a description if no problem is reported, and what to do.
_STATES: Final[dict[str, tuple[str, str, str | None]]] = {
    "live": (Level.OK, "its events are followed", None),
    "replaying": (Level.OK, "missed events are being replayed", None),
    "partial": (
        Level.NOTE,
        "the replay lacks the oldest batches: what the engine cached before them is unknown",
        None,
    ),
    "silent": (
        Level.NOTE,
        "connected, but no event received: the engine has cached nothing yet, or publishes nothing",
        "send the engine a prompt, or run this check with --probe",
    ),
    NO_REPLAY: (
        Level.WARNING,
        "no replay: missed events are lost, including those during a restart of the selector",
        None,
    ),
    "degraded": (
        Level.WARNING,
        "batches were lost, and no replay had them: the index may have too few or too many blocks",
        None,
    ),
    "mismatch": (
        Level.ERROR,
        "its events do not match the registration",
        "DELETE the worker, then POST it with the engine's block_size, is_eagle and ranks",
    ),
    "unreachable": (Level.ERROR, "is not connected", _NOT_HEARD),
    "connecting": (Level.WARNING, "not connected yet", _NOT_HEARD),
    "resolving": (Level.WARNING, "its host name is being resolved", "check the name in DNS"),
    "failed": (
        Level.ERROR,
        "cannot be opened",
        "correct kv_events_endpoint: tcp://HOST:PORT as the selector reaches it",
    ),
}

# What to do, by state and by whether a replay endpoint is registered.
_REPLAY_MENDS: Final[dict[tuple[str, bool], str]] = {
    (NO_REPLAY, False): "start the engine with a replay_endpoint in its --kv-events-config, and "
    "register it: until then missed events are lost",
    (NO_REPLAY, True): "start the engine with that replay_endpoint in its --kv-events-config, or "
    "register its own: until then missed events are lost",
    ("degraded", False): "register a replay_endpoint, or restart the engine",
    ("degraded", True): "enable its replay, and let it keep more batches; a restart of the engine "
    "also repairs the index",
}


def judge_source(source: KvSource) -> Finding:
    """Return the finding about the source of KV events of one rank."""
    level, meaning, mend = _STATES.get(
        source.state, (Level.WARNING, "a state unknown to this check", None)
    )
    parts = [f"{source.state} at {source.endpoint}: {source.problem or meaning}"]
    if source.last_error and not source.problem and level != Level.OK:
        parts.append(source.last_error)
    if source.skipped:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(source.skipped.items()))
        parts.append(f"skipped events: {counts}")
    accuracy = source.index_accuracy
    if accuracy is not None and accuracy < LEAST_ACCURACY and level in (Level.OK, Level.NOTE):
        level = Level.WARNING
        parts.append(
            f"its index accuracy is {accuracy:.0%}: the engine's counts of cached tokens differ"
        )
        mend = "run this check with --probe; with a replay_endpoint on both sides nothing is lost"
    mend = _REPLAY_MENDS.get((source.state, source.replay_endpoint is not None), mend)
    return Finding(level, subject_of(source), "; ".join(parts), mend)


def subject_of(source: KvSource) -> str:
    return f"worker {source.worker_id} rank {source.dp_rank}"


# -- endpoints that ranks share --------------------------------------------------------------------

_NAMED: Final = 4  # ranks listed in a finding


def judge_shared_endpoints(
    workers: Sequence[CheckedWorker], sources: Sequence[KvSource]
) -> Iterator[Finding]:
    """Yields an error per endpoint used by two engines, by two ranks, or for events and replays."""
    engines = {worker.worker_id: worker.endpoint for worker in workers}
    uses: dict[str, dict[tuple[str | int, int, str], str]] = {}  # endpoint -> publisher -> rank
    for source in sources:
        engine = engines.get(source.worker_id) or source.worker_id
        fields = {"kv_events_endpoint": source.endpoint, "replay_endpoint": source.replay_endpoint}
        for field, endpoint in fields.items():
            if endpoint is not None:
                publishers = uses.setdefault(endpoint, {})
                publishers.setdefault((engine, source.dp_rank, field), subject_of(source))
    for endpoint, publishers in uses.items():
        (_, _, field), *others = publishers
        if not others:
            continue
        subject, *_ = publishers.values()
        named = [f"{publishers[other]} ({other[2]})" for other in others[:_NAMED]]
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        yield Finding(
            Level.ERROR,
            subject,
            f"{field} {endpoint}: also given for {', '.join(named)}{more}: blocks cached on one "
            "rank count for another",
            "register each rank with the endpoints of its own engine; engines on one host need "
            "ports of their own: list them in a file (--discover file:PATH)",
        )


# -- discoveries -----------------------------------------------------------------------------------

_SUBJECT: Final = "discovery"
# What to do, by the first word of a discovery.
_MENDS: Final = {
    "file": "put a list of workers there that the selector can read",
    "dns": "check the name in DNS from the selector's host",
    "kubernetes": (
        "check the service, and whether the selector's account may watch its EndpointSlices"
    ),
}


def judge_discoveries(found: DiscoveryReport) -> Iterator[Finding]:
    """Yields findings about discoveries, and about the workers and peers that they found."""
    for discovery in found.discoveries:
        yield from _judge_discovery(discovery)
    for worker in found.workers:
        yield from _judge_discovered(worker)
    for peer in found.peers:
        if peer.last_error is not None:
            what = f"peer {peer.endpoint} is {peer.state}: {peer.last_error}"
            yield Finding(Level.WARNING, _SUBJECT, what)


def _judge_discovery(discovery: DiscoveryState) -> Iterator[Finding]:
    name, found = discovery.discovery, discovery.found
    if discovery.state == "failing":
        mend = _MENDS.get(name.partition(":")[0])
        what = f"{name} fails: {discovery.last_error}"
        if found is None:
            yield Finding(Level.ERROR, _SUBJECT, what, mend)
        else:
            what += f"; the {found} {discovery.finds} that it found before stay in use"
            yield Finding(Level.WARNING, _SUBJECT, what, mend)
    elif not found:
        what = "has found nothing yet" if found is None else f"finds no {discovery.finds}"
        yield Finding(Level.NOTE, _SUBJECT, f"{name} {what}")


def _judge_discovered(worker: DiscoveredWorker) -> Iterator[Finding]:
    state, why = worker.state, worker.last_error
    level, mend = Level.NOTE, None
    if state == "asking" and why is None:
        what = ": its engine is being queried"
    elif state == "asking":
        level, what = Level.ERROR, f", not registered: its engine cannot be queried: {why}"
        mend = "start the engine, or correct its address; it is queried again automatically"
    elif state == "refused":
        level, what = Level.ERROR, f", not registered: {why}"
        mend = "correct its entry, --discover-defaults or --allow-endpoint accordingly"
    elif state == "removed":
        what = ", deleted over HTTP: stays removed until it is found again"
    elif state == "registered" and why is not None:
        level, what = Level.WARNING, f": its earlier registration stays in use: {why}"
    else:
        return
    by = ", ".join(worker.discoveries) or "no discovery any more"
    found = f"found at {worker.endpoint} by {by}"
    yield Finding(level, f"worker {worker.worker_id}", found + what, mend)


# -- workers ---------------------------------------------------------------------------------------

_Alike = dict[tuple[str, str], list[CheckedWorker]]  # by model and tenant


def can_be_chosen(workers: list[CheckedWorker]) -> int:
    """Return the number of workers that can be chosen. Ejected workers count only if all workers
    of their model and tenant are ejected, because then they still get requests."""
    return sum(
        sum(not _is_out(worker) for worker in alike) or len(alike)
        for alike in _alike(filter(_is_schedulable, workers)).values()
    )


def judge_workers(
    workers: list[CheckedWorker], discovered: Collection[int] = ()
) -> Iterator[Finding]:
    """Yields findings about workers: missing fields, ejections, and different block sizes. The
    workers with the ids `discovered` are not registered over HTTP."""
    for (model_name, tenant_id), alike in _alike(filter(_is_schedulable, workers)).items():
        if all(map(_is_out, alike)):
            yield Finding(
                Level.ERROR,
                f"model {model_name}",
                f"all its workers (tenant {tenant_id}) are ejected, and get requests nevertheless",
                "repair the engines of the workers below",
            )
        roles = {worker.worker_role for worker in alike}
        if roles == {PREFILL}:
            yield Finding(
                Level.ERROR,
                f"model {model_name}",
                f"all its workers (tenant {tenant_id}) only prefill, so no request can be served",
                "register workers with the worker_role decode or both",
            )
        elif roles == {DECODE}:
            yield Finding(
                Level.WARNING,
                f"model {model_name}",
                f"all its workers (tenant {tenant_id}) only decode: requests that ask for a pair "
                "are refused, or with --pd-fallback local served by one of them",
                "register workers with the worker_role prefill",
            )
    for worker in workers:
        if _is_schedulable(worker):
            yield from _judge_health(worker)
        else:
            reasons = "; ".join(worker.not_schedulable_reasons) or worker.lifecycle
            mend = f"PATCH /workers/{worker.worker_id} with the missing fields"
            if reasons.startswith(OF_OTHER_BLOCKS):
                mend = OTHER_BLOCKS
            elif worker.worker_id in discovered:
                flags = mend_of_incomplete(worker.not_schedulable_reasons)
                mend = flags or "correct its entry"
            subject = f"worker {worker.worker_id}"
            yield Finding(Level.ERROR, subject, f"cannot be chosen: {reasons}", mend)
    for (model_name, tenant_id), alike in _alike(workers).items():
        sizes = {worker.block_size: worker.worker_id for worker in alike if worker.block_size}
        if len(sizes) > 1:
            have = ", ".join(f"worker {sizes[size]} of {size}" for size in sorted(sizes))
            yield Finding(
                Level.ERROR,
                f"model {model_name}",
                f"its workers (tenant {tenant_id}) have different block sizes: {have} tokens",
                "start all engines of a model with one block size",
            )


def _alike(workers: Iterable[CheckedWorker]) -> _Alike:
    found: _Alike = {}
    for worker in workers:
        found.setdefault((worker.model_name, worker.tenant_id), []).append(worker)
    return found


def _is_schedulable(worker: CheckedWorker) -> bool:
    return worker.lifecycle == "schedulable"


def _ranks_that_are(worker: CheckedWorker, state: str) -> list[RankHealthRow]:
    ranks = [] if worker.health is None else worker.health.ranks
    return [rank for rank in ranks if rank.state == state]


def _is_out(worker: CheckedWorker) -> bool:
    """Whether all ranks of the worker are ejected."""
    return len(_ranks_that_are(worker, "ejected")) >= (worker.data_parallel_size or 1)


def _judge_health(worker: CheckedWorker) -> Iterator[Finding]:
    subject = f"worker {worker.worker_id}"
    if ejected := _ranks_that_are(worker, "ejected"):
        which = "" if _is_out(worker) else f"{_named(ejected)} "
        back_s = ejected[0].returns_in_s
        until = "until a poll of it succeeds" if back_s is None else f"for {back_s:.0f} s more"
        what = f"{which}ejected, {until}: {_why(ejected[0])}"
        mend = "repair its engine; it gets requests again automatically"
        yield Finding(Level.WARNING, subject, what, mend)
    if on_probation := _ranks_that_are(worker, "probation"):
        what = (
            f"{_named(on_probation)} on probation, where one failure ejects it again: "
            f"{_why(on_probation[0])}"
        )
        yield Finding(Level.NOTE, subject, what)


def _named(ranks: list[RankHealthRow]) -> str:
    numbers = ", ".join(str(rank.dp_rank) for rank in ranks)
    return f"rank {numbers} is" if len(ranks) == 1 else f"ranks {numbers} are"


def _why(rank: RankHealthRow) -> str:
    return rank.reason or "no reason is reported"


# -- the selector as a whole -----------------------------------------------------------------------


def judge_selector(facts: SelectorFacts) -> Iterator[Finding]:
    """Yields all findings: readiness, discoveries, workers and sources of KV events."""
    yield _judge_readiness(facts)
    if facts.readiness.recovering:
        yield Finding(
            Level.NOTE, "selector", "it is still recovering its index from --indexer-peers"
        )
    if (fault := facts.readiness.state_fault) is not None:
        yield Finding(
            Level.WARNING,
            "selector",
            f"its state cannot be written, and a restart would lose it: {fault}",
            "repair the disk of --state-dir; writing is retried every second",
        )
    if facts.discoveries is not None:
        yield from judge_discoveries(facts.discoveries)
    found = [] if facts.discoveries is None else facts.discoveries.workers
    yield from judge_workers(facts.workers, {each.worker_id for each in found})
    if facts.sources is None:
        yield Finding(Level.NOTE, "selector", "it does not report its KV event sources")
        return
    if not facts.sources and any(map(_is_schedulable, facts.workers)):
        yield _judge_without_events(facts.workers[0])
    else:
        yield from _judge_deaf(facts.workers, facts.sources)
    for source in facts.sources:
        if source.state not in _UNHEARD or source.endpoint not in facts.deaf_ports:
            yield judge_source(source)
    yield from judge_shared_endpoints(facts.workers, facts.sources)


def _judge_without_events(worker: CheckedWorker) -> Finding:
    """Return the finding about a selector without any source, by one of its workers."""
    what = f"it subscribes to no KV events: {assumed_without_events(worker.routed_ttl_secs)}"
    if not worker.uses_kv_events:  # chosen
        return Finding(Level.NOTE, "selector", what)
    mend = (
        "start the engines with KV events, and register their kv_events_endpoint, or discover them "
        f"with {EVENTS_PORT}; if they publish none, {WITHOUT_EVENTS} makes that the choice"
    )
    return Finding(Level.WARNING, "selector", what, mend)


def _judge_deaf(workers: list[CheckedWorker], sources: list[KvSource]) -> Iterator[Finding]:
    """Yields a finding for each schedulable worker without a source of KV events."""
    heard = {source.worker_id for source in sources}
    for worker in workers:
        if _is_schedulable(worker) and worker.worker_id not in heard:
            yield Finding(
                Level.WARNING,
                f"worker {worker.worker_id}",
                f"it has no source of KV events: {assumed_without_events(worker.routed_ttl_secs)}",
                f'PATCH /workers/{worker.worker_id} {{"kv_events_endpoint": "tcp://HOST:5557"}}; '
                f"where it was discovered, {EVENTS_PORT}",
            )


def _judge_readiness(facts: SelectorFacts) -> Finding:
    if not facts.workers:
        advice = "POST /workers for each engine, or start it with --discover"
        looking = facts.discoveries.discoveries if facts.discoveries is not None else []
        if any(discovery.finds == "workers" for discovery in looking):
            advice = "correct its discoveries (below), or POST /workers for each engine"
        return Finding(Level.ERROR, "selector", "no worker is registered", advice)
    count = can_be_chosen(facts.workers)
    given = len(facts.workers)
    if facts.discoveries is not None:  # also those that are not registered yet
        given += sum(each.state in ("asking", "refused") for each in facts.discoveries.workers)
    what = f"{count} of {given} workers can be chosen"
    if facts.is_ready:
        return Finding(Level.OK, "selector", f"ready: {what}")
    mend = None if count else "see the workers below"
    return Finding(Level.ERROR, "selector", f"not ready: {what}", mend)
