"""What a selector and its engines say, judged: findings, each with what mends it. Asks nothing."""

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from lean_selector.curve.keys import CurveClient, check_curve, new_pair, read_list, read_pair
from lean_selector.workers.particulars import Particulars


class Level(StrEnum):
    """How bad; only an error is a reason for a script to stop."""

    OK = "ok"
    NOTE = "note"  # how it is, and good to know
    WARNING = "warning"  # serves, and worse than it could
    ERROR = "error"


class Finding(msgspec.Struct, frozen=True):
    """One line of the table."""

    level: Level
    subject: str  # "selector", "worker 3", "worker 3 rank 1"
    what: str
    mend: str | None = None  # what to do, where something is to be done


# -- what a selector answers -----------------------------------------------------------------------


class Readiness(msgspec.Struct):
    """Of GET /ready, whose status says whether it is."""

    recovering: bool = False
    state_fault: str | None = None  # why the state directory cannot be written


class RankHealth(msgspec.Struct):
    """A rank that something is held against."""

    dp_rank: int
    state: str  # in_service, probation or ejected
    reason: str | None = None  # why it was ejected, if it was
    returns_in_s: float | None = None  # None: when a poll succeeds, or it is not ejected


class WorkerHealth(msgspec.Struct):
    """Of the ranks of a worker."""

    ranks: list[RankHealth] = []


class WorkerRecord(msgspec.Struct):
    """Of GET /workers?detail=true; of the reference's, what it has of these."""

    worker_id: int
    model_name: str
    lifecycle: str  # a slot tracker's workers have none, and are no workers for this check
    tenant_id: str = "default"
    routing_group: str | None = None  # the same, as 1.6 calls it
    endpoint: str | None = None
    block_size: int | None = None
    total_kv_blocks: int | None = None
    data_parallel_size: int | None = None  # None: one rank
    health: WorkerHealth = msgspec.field(default_factory=WorkerHealth)  # the reference has none
    not_schedulable_reasons: list[str] = []

    def __post_init__(self) -> None:
        if self.routing_group is not None:
            self.tenant_id = self.routing_group


class Source(msgspec.Struct):
    """Of GET /kv_sources."""

    worker_id: int
    dp_rank: int
    endpoint: str
    state: str
    problem: str | None = None  # what is wrong, in the selector's own words
    replay_endpoint: str | None = None
    last_seq: int | None = None
    messages: int = 0
    skipped: dict[str, int] = {}
    lost_batches: int = 0
    last_error: str | None = None


class Discovery(msgspec.Struct):
    """A `--discover` or `--replica-sync-discover` of GET /discovery."""

    discovery: str
    finds: str  # "workers" or "peers"
    state: str  # starting, watching or failing
    found: int | None = None  # what it found last, which holds; None before
    last_error: str | None = None


class DiscoveredWorker(msgspec.Struct):
    """A worker that a discovery names."""

    endpoint: str
    worker_id: int
    state: str  # asking, registered, by_http, removed or refused
    discoveries: list[str] = []
    last_error: str | None = None


class DiscoveredPeer(msgspec.Struct):
    """A peer that a discovery names."""

    endpoint: str
    state: str  # registered, known, removed, refused or itself
    last_error: str | None = None


class Discoveries(msgspec.Struct):
    """Of GET /discovery."""

    discoveries: list[Discovery] = []
    workers: list[DiscoveredWorker] = []
    peers: list[DiscoveredPeer] = []


class OverlapRow(msgspec.Struct):
    """One rank of POST /overlap_scores."""

    worker_id: int
    dp_rank: int
    device_blocks: int = 0


class OverlapScores(msgspec.Struct):
    """POST /overlap_scores."""

    workers: list[OverlapRow] = []


class SelectorFacts(msgspec.Struct):
    """What a selector says of itself."""

    is_ready: bool
    workers: list[WorkerRecord]
    sources: list[Source] | None  # None: it does not tell
    discoveries: Discoveries | None = None  # None: it has none of its own, as the reference
    readiness: Readiness = msgspec.field(default_factory=Readiness)


# -- keys of engines that encrypt ------------------------------------------------------------------

SERVERS: Final = "--kv-events-curve-server-keys-file"
SECRET: Final = "--kv-events-curve-secret-key-file"

_OF_KEYS: Final = re.compile(r"\bkeys?\b")


def client_keys(servers_file: str | None, secret_file: str | None) -> CurveClient | None:
    """None: engines are asked in plain text. Raises OSError and ValueError."""
    if servers_file is None:
        if secret_file is not None:
            raise ValueError(f"{SECRET} requires {SERVERS}")
        return None
    check_curve(SERVERS)
    pair = new_pair() if secret_file is None else read_pair(secret_file)
    return CurveClient(pair, read_list(servers_file))


def is_about_keys(why: str) -> bool:
    """Whether there is no connection for want of the right keys, by the words of its failure."""
    return _OF_KEYS.search(why) is not None


# -- KV event sources ------------------------------------------------------------------------------

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


# -- endpoints that ranks share --------------------------------------------------------------------
# One engine may be registered as several workers, as for two tenants: their ranks share rightly.

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
                f"{first.field} {first.endpoint} is also {_named_uses(wrong)}: what one rank has "
                "cached counts for another",
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


def _named_uses(uses: Sequence[_Use]) -> str:
    named = [f"the {use.field} of {use.subject}" for use in uses[:_NAMED]]
    more = len(uses) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


# -- discoveries -----------------------------------------------------------------------------------

_SUBJECT: Final = "discovery"
_FINDS_WORKERS: Final = "workers"
# By what a discovery begins with.
_MENDS: Final = {
    "file": "put a list of workers there, for the selector to read",
    "dns": "check the name in DNS, as the selector asks it",
    "kubernetes": "check the service, and that the selector's account may watch its EndpointSlices",
}


def looks_for_workers(found: Discoveries | None) -> bool:
    """Whether it was told to find workers by itself."""
    return found is not None and any(
        discovery.finds == _FINDS_WORKERS for discovery in found.discoveries
    )


def judge_discoveries(found: Discoveries) -> Iterator[Finding]:
    """What keeps a discovery from finding, then who was found and is not registered."""
    for discovery in found.discoveries:
        yield from _judge_discovery(discovery)
    for worker in found.workers:
        yield from _judge_worker(worker)
    for peer in found.peers:
        if peer.last_error is not None:
            what = f"peer {peer.endpoint} is {peer.state}: {peer.last_error}"
            yield Finding(Level.WARNING, _SUBJECT, what)


def _judge_discovery(discovery: Discovery) -> Iterator[Finding]:
    name = discovery.discovery
    if discovery.state == "failing":
        mend = _MENDS.get(name.partition(":")[0])
        what = f"{name} fails: {discovery.last_error}"
        if discovery.found is None:
            yield Finding(Level.ERROR, _SUBJECT, what, mend)
        else:
            holds = f"{what}; the {discovery.found} {discovery.finds} that it found before hold"
            yield Finding(Level.WARNING, _SUBJECT, holds, mend)
    elif discovery.found is None:
        yield Finding(Level.NOTE, _SUBJECT, f"{name} has found nothing yet")
    elif not discovery.found:
        yield Finding(Level.NOTE, _SUBJECT, f"{name} finds no {discovery.finds}")


def _judge_worker(worker: DiscoveredWorker) -> Iterator[Finding]:
    subject = f"worker {worker.worker_id}"
    by = ", ".join(worker.discoveries) or "nobody any more"
    who = f"found at {worker.endpoint} by {by}"
    why = worker.last_error
    if worker.state == "asking" and why is None:
        yield Finding(Level.NOTE, subject, f"{who}: it is being asked what it is")
    elif worker.state == "asking":
        yield Finding(
            Level.ERROR,
            subject,
            f"{who}, not registered: it does not tell what it is: {why}",
            "start the engine, or correct where it is looked for; it is asked again by itself",
        )
    elif worker.state == "refused":
        yield Finding(
            Level.ERROR,
            subject,
            f"{who}, not registered: {why}",
            "correct its entry, --discover-defaults or --allow-endpoint, as that says",
        )
    elif worker.state == "removed":
        yield Finding(Level.NOTE, subject, f"{who}, deleted over HTTP: away until it is found anew")
    elif worker.state == "registered" and why is not None:
        yield Finding(Level.WARNING, subject, f"{who}: what it was registered as holds: {why}")


# -- workers ---------------------------------------------------------------------------------------

_SCHEDULABLE: Final = "schedulable"
_EJECTED: Final = "ejected"
_PROBATION: Final = "probation"


def can_be_chosen(workers: list[WorkerRecord]) -> int:
    """How many. Where all of a model are ejected they are tried all the same, and count."""
    return sum(
        sum(not _is_out(worker) for worker in alike) or len(alike)
        for alike in _schedulable(workers).values()
    )


def judge_workers(workers: list[WorkerRecord]) -> Iterator[Finding]:
    """Those that cannot be chosen, and what is held against the others."""
    for (model_name, tenant_id), alike in _schedulable(workers).items():
        if all(map(_is_out, alike)):
            yield Finding(
                Level.ERROR,
                f"model {model_name}",
                f"all its workers (tenant {tenant_id}) are ejected, and tried all the same",
                "mend the engines of the workers below",
            )
    for worker in workers:
        if worker.lifecycle != _SCHEDULABLE:
            yield _not_schedulable(worker)
        else:
            yield from _judge_health(worker)
    yield from _judge_block_sizes(workers)


def _schedulable(workers: list[WorkerRecord]) -> dict[tuple[str, str], list[WorkerRecord]]:
    """By model and tenant, among whose workers one is chosen."""
    found: dict[tuple[str, str], list[WorkerRecord]] = {}
    for worker in workers:
        if worker.lifecycle == _SCHEDULABLE:
            found.setdefault((worker.model_name, worker.tenant_id), []).append(worker)
    return found


def _ranks_that_are(worker: WorkerRecord, state: str) -> list[RankHealth]:
    return [rank for rank in worker.health.ranks if rank.state == state]


def _is_out(worker: WorkerRecord) -> bool:
    """With all its ranks."""
    return len(_ranks_that_are(worker, _EJECTED)) >= (worker.data_parallel_size or 1)


def _not_schedulable(worker: WorkerRecord) -> Finding:
    reasons = "; ".join(worker.not_schedulable_reasons) or worker.lifecycle
    return Finding(
        Level.ERROR,
        f"worker {worker.worker_id}",
        f"cannot be chosen: {reasons}",
        f"PATCH /workers/{worker.worker_id} with what is missing",
    )


def _judge_health(worker: WorkerRecord) -> Iterator[Finding]:
    """Of a worker with many ranks, those that are alike together, with the reason of the first."""
    subject = f"worker {worker.worker_id}"
    if ejected := _ranks_that_are(worker, _EJECTED):
        who = "" if _is_out(worker) else f"{_named_ranks(ejected)} "
        yield Finding(
            Level.WARNING,
            subject,
            f"{who}ejected, {_until(ejected[0])}: {_why(ejected[0])}",
            "mend its engine; it is given work again by itself",
        )
    if on_probation := _ranks_that_are(worker, _PROBATION):
        yield Finding(
            Level.NOTE,
            subject,
            f"{_named_ranks(on_probation)} on probation, where one failure ejects it again: "
            f"{_why(on_probation[0])}",
        )


def _named_ranks(ranks: list[RankHealth]) -> str:
    numbers = ", ".join(str(rank.dp_rank) for rank in ranks)
    return f"rank {numbers} is" if len(ranks) == 1 else f"ranks {numbers} are"


def _until(rank: RankHealth) -> str:
    if rank.returns_in_s is None:
        return "until a poll of it succeeds"
    return f"for {rank.returns_in_s:.0f} s more"


def _why(rank: RankHealth) -> str:
    return rank.reason or "no reason is told"


def _judge_block_sizes(workers: list[WorkerRecord]) -> Iterator[Finding]:
    sizes: dict[tuple[str, str], set[int]] = {}
    for worker in workers:
        if worker.block_size is not None:
            key = worker.model_name, worker.tenant_id
            sizes.setdefault(key, set()).add(worker.block_size)
    for (model_name, tenant_id), found in sizes.items():
        if len(found) > 1:
            yield Finding(
                Level.ERROR,
                f"model {model_name}",
                f"its workers (tenant {tenant_id}) have blocks of {sorted(found)} tokens",
                "start all engines of a model with one block size",
            )


# -- the selector as a whole -----------------------------------------------------------------------


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


# -- an engine's own words against its registration ------------------------------------------------


def judge_engine(worker: WorkerRecord, told: Particulars) -> Iterator[Finding]:
    """`told` is what the engine at the worker's endpoint says of itself."""
    subject = f"worker {worker.worker_id}"
    faults = list(_faults(worker, told, subject))
    yield from faults
    if not faults:
        model = told.model_name or "a model that it does not name"
        size = f"blocks of {told.block_size} tokens" if told.block_size else "no block size told"
        yield Finding(Level.OK, subject, f"the engine at {worker.endpoint} has {model}, {size}")


def _faults(worker: WorkerRecord, told: Particulars, subject: str) -> Iterator[Finding]:
    patch = f"PATCH /workers/{worker.worker_id}"
    if told.block_size is not None and worker.block_size not in (None, told.block_size):
        yield Finding(
            Level.ERROR,
            subject,
            f"registered with blocks of {worker.block_size} tokens, the engine has "
            f"{told.block_size}: its events are skipped",
            f'register it anew with "block_size": {told.block_size}, as all workers of its model',
        )
    if told.model_name is not None and told.model_name != worker.model_name:
        yield Finding(
            Level.WARNING,
            subject,
            f"registered for model {worker.model_name}, the engine serves {told.model_name}",
            f'callers ask for "model_name": "{worker.model_name}"; register the name that they use',
        )
    blocks = told.total_kv_blocks
    if blocks is not None and worker.total_kv_blocks not in (None, blocks):
        yield Finding(
            Level.WARNING,
            subject,
            f"registered with total_kv_blocks {worker.total_kv_blocks}, the engine has {blocks}",
            f'{patch} {{"total_kv_blocks": {blocks}}}',
        )
    if blocks is not None and worker.total_kv_blocks is None:
        yield Finding(
            Level.NOTE,
            subject,
            "registered without total_kv_blocks: busy thresholds cannot see how full it is",
            f'{patch} {{"total_kv_blocks": {blocks}}}',
        )
