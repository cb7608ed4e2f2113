"""Registers the workers that --discover finds, and removes workers that are gone.

Uses the calls behind POST and DELETE /workers, so metrics, event sources and reservations are
updated too. HTTP takes precedence: a worker that was registered, changed or deleted over HTTP is
left alone until no target lists it. `Roster` opens no sockets, and never waits; the time is an
argument."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from lean_selector.core.errors import SelectorError
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.discovery.particulars import (
    Found,
    Particulars,
    endpoint_key,
    is_complete,
    spec_of,
    worker_id_of,
)
from lean_selector.http.outbound import OutboundFailed
from lean_selector.tasks import supervise
from lean_selector.wire.discovery_states import KeptWorker


class WorkerState(Enum):
    ASKING = "asking"  # the engine has not answered yet
    REGISTERED = "registered"  # by discovery; its record tells whether it can be scheduled
    BY_HTTP = "by_http"  # registered or changed over HTTP, which takes precedence
    REMOVED = "removed"  # deleted over HTTP; stays deleted until no discovery finds it
    REFUSED = "refused"  # its description cannot be registered


@dataclass(eq=False, slots=True)
class KnownWorker:
    """A discovered worker. `spec`: discovery's registration; None if missing or changed by HTTP."""

    key: Final[str]  # of the endpoint
    entry: Particulars
    worker_id: int = field(init=False)
    discoveries: list[str] = field(default_factory=list)
    engine: Particulars | None = None  # the engine's own description
    state: WorkerState = WorkerState.ASKING
    error: str | None = None
    spec: WorkerSpec | None = None
    leaves_at: float | None = None  # monotonic time; set while no discovery finds it
    asking: asyncio.Task[None] | None = None
    warnings: Sequence[str] = ()  # of its last registration, as logged
    is_restored: bool = False  # not found since the process started
    uid: str = ""  # of the pod that is there; "" if no target knows it

    def __post_init__(self) -> None:
        self.worker_id = self.id_by(self.entry)

    def id_by(self, entry: Particulars) -> int:
        """Return the worker's id: the one in `entry`, or else a hash of the endpoint."""
        return worker_id_of(self.key) if entry.worker_id is None else entry.worker_id

    def set_entry(self, entry: Particulars) -> None:
        self.entry = entry
        self.worker_id = self.id_by(entry)
        self.is_restored = False


log = logging.getLogger("lean_selector.discovery")


@dataclass(eq=False)
class Roster:
    """The workers that --discover finds. `register` and `remove` change the catalog, and may raise
    SelectorError. `register(spec, anew)` returns warnings; with `anew` the worker's reservations
    and blocks go, as by DELETE and POST. Used only on the event loop's thread."""

    catalog: Catalog
    register: Callable[[WorkerSpec, bool], Sequence[str]]
    remove: Callable[[int], object]
    defaults: Particulars
    grace_s: float
    use_kv_events: bool
    on_new: Callable[[KnownWorker], None]  # called for workers whose engines must be queried
    on_gone: Callable[[KnownWorker], None]  # called for every worker that is dropped
    # Return why a worker at this endpoint is neither queried nor registered, or None.
    refusal: Callable[[str], str | None] = lambda endpoint: None
    registrations: int = 0
    removals: int = 0

    def __post_init__(self) -> None:
        self._found: dict[str, dict[str, Particulars]] = {}  # discovery -> key -> entry
        self._uids: dict[str, Mapping[str, str]] = {}  # discovery -> key -> uid of the pod there
        self._known: dict[str, KnownWorker] = {}  # by key
        self._revision = -1  # revision of the catalog at the last comparison
        self._retried = -1  # revision when refused workers were last tried again
        # Endpoint -> id of workers that discovery does not control
        self._others: dict[str, int] = {}

    def __iter__(self) -> Iterator[KnownWorker]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def found(self, discovery: str, found: Found, now: float) -> None:
        """Handles the list of all workers at one target of --discover. A worker that no target
        lists any more is removed after a grace period, or at once if in `found.leaving`."""
        entries = {endpoint_key(entry.endpoint or ""): entry for entry in found.entries}
        before = self._found.get(discovery, {})
        self._found[discovery] = entries
        self._uids[discovery] = found.uids
        self._compare()
        for key in [*before.keys() - entries.keys(), *entries]:
            self._name(key, now)
        for key in map(endpoint_key, found.leaving):
            known = self._known.get(key)
            if known is not None and known.leaves_at is not None:
                known.leaves_at = now
        self.sweep(now)

    def engine_answered(self, known: KnownWorker, engine: Particulars) -> None:
        """Stores what a worker's engine reports about itself, and registers the worker."""
        known.engine = engine
        known.error = None
        self._settle(known)

    def failed(self, known: KnownWorker, reason: str) -> None:
        """Records that a worker's engine did not answer. The last answer stays in effect."""
        if known.error is None:
            log.warning(
                "the engine of discovered worker %s cannot be queried: %s", known.key, reason
            )
        known.error = reason

    def sweep(self, now: float) -> None:
        """Removes workers that no target lists and whose grace period is over. Notices workers that
        were changed over HTTP. Tries again what was refused, for an id for example, after any
        worker has changed. Call this about twice a second."""
        self._compare()
        for known in list(self._known.values()):
            if known.leaves_at is not None and known.leaves_at <= now:
                self._drop(known)
        if self._retried != self.catalog.revision:
            for known in self._known.values():
                if known.state is WorkerState.REFUSED and self.refusal(known.key) is None:
                    self._settle(known)
            self._retried = self.catalog.revision

    # -- what outlives the process -----------------------------------------------------------------

    def kept(self) -> list[KeptWorker]:
        """Return workers to store: those discovery registered, and those deleted over HTTP."""
        self._compare()
        return [
            KeptWorker(known.key, known.worker_id, known.discoveries, known.spec is None, known.uid)
            for known in self._known.values()
            if known.spec is not None or known.state is WorkerState.REMOVED
        ]

    def take_back(self, kept: KeptWorker, spec: WorkerSpec | None) -> None:
        """Restores a worker after a restart. `spec`: its registration; None if deleted over HTTP.

        A target that listed the worker earlier counts as listing it until the target is read
        again."""
        entry = Particulars(endpoint=kept.key, worker_id=kept.worker_id)
        known = KnownWorker(kept.key, entry)
        known.is_restored = True
        known.uid = kept.uid
        known.discoveries = kept.discoveries
        known.spec = spec
        known.state = WorkerState.REMOVED if spec is None else WorkerState.REGISTERED
        self._known[kept.key] = known
        for discovery in kept.discoveries:
            self._found.setdefault(discovery, {})[kept.key] = entry

    # -- found workers -----------------------------------------------------------------------------

    def _name(self, key: str, now: float) -> None:
        """Updates the worker at the endpoint `key` after a target was read. If several targets list
        the worker, the description in the target that was read first is used. Another pod at the
        same endpoint is another worker."""
        by = [name for name, entries in self._found.items() if key in entries]
        known = self._known.get(key)
        uid = next((uid for name in by if (uid := self._uids.get(name, {}).get(key))), "")
        if known is not None and uid and known.uid and uid != known.uid:
            self._drop(known)
            known = None
        if not by:
            if known is not None and known.leaves_at is None:
                known.discoveries = []
                known.leaves_at = now + self.grace_s
            return
        entry = self._found[by[0]][key]
        is_new = known is None
        if known is None:
            known = self._known[key] = KnownWorker(key, entry)
        known.uid = uid or known.uid
        changed = not is_new and (
            known.entry != entry or (known.is_restored and known.entry is not entry)
        )
        known.discoveries = by
        known.leaves_at = None
        if changed:
            if known.id_by(entry) != known.worker_id:
                self._withdraw(known)
            known.set_entry(entry)
        if not is_new and not changed:
            return
        refusal = self.refusal(key)
        if refusal is not None:
            self._refuse(known, refusal)
            return
        self._settle(known)
        if not self._is_complete(known):
            self.on_new(known)

    def _is_complete(self, known: KnownWorker) -> bool:
        return is_complete(known.entry, self.use_kv_events)

    # -- registrations -----------------------------------------------------------------------------

    def _settle(self, known: KnownWorker) -> None:
        """Registers a new or changed worker, unless its engine has to be queried first."""
        if known.state in (WorkerState.BY_HTTP, WorkerState.REMOVED):
            return
        if known.engine is None and not self._is_complete(known):
            return
        try:
            spec = spec_of(known.worker_id, known.entry, known.engine, self.defaults)
            if known.spec is not None and spec == known.spec:
                return
            if self._is_taken(known):
                return
            warnings = [
                *self.register(spec, _has_restarted(known.spec, spec)),
                *(known.entry.ignored() or self.defaults.ignored()),
            ]
        except (SelectorError, ValueError) as error:
            self._refuse(known, error.message if isinstance(error, SelectorError) else str(error))
            return
        what = "changed" if known.spec is not None else "registered"
        known.spec, known.state = spec, WorkerState.REGISTERED
        known.error = None
        self.registrations += 1
        self._log_state(what, known)
        given = [each.block_size for each in (known.entry, known.engine) if each is not None]
        if not any(given) and spec.block_size and what == "registered":
            text = "discovered worker %s: its engine reports no block size; %d tokens are assumed"
            log.info(text, known.key, spec.block_size, extra=_named(known))
        self._warn(known, warnings)

    def _refuse(self, known: KnownWorker, reason: str) -> None:
        """Records why a worker's new description is not registered. An old registration stays."""
        if known.error != reason:
            log.warning("discovered worker %s: %s", known.key, reason)
        known.error = reason
        if known.spec is None:
            known.state = WorkerState.REFUSED

    def _is_taken(self, known: KnownWorker) -> bool:
        """Whether a worker with this id or endpoint was registered over HTTP, so that discovery
        must not change it. Raises ValueError if another discovered worker has the id."""
        holder = self.catalog.workers.get(known.worker_id)
        if holder is not None and holder.spec is not known.spec:
            ours = [each for each in self._known.values() if each.spec is holder.spec]
            if ours:
                raise ValueError(f"worker_id {known.worker_id} is that of {ours[0].key}")
            known.state = WorkerState.BY_HTTP
            return True
        if known.spec is None and known.key in self._others:
            known.state = WorkerState.BY_HTTP
            return True
        return False

    def _drop(self, known: KnownWorker) -> None:
        del self._known[known.key]
        self.on_gone(known)
        self._withdraw(known)

    def _withdraw(self, known: KnownWorker) -> None:
        spec, known.spec = known.spec, None
        known.state = WorkerState.ASKING
        if spec is None:
            return
        holder = self.catalog.workers.get(spec.worker_id)
        if holder is not None and holder.spec is spec:
            self.remove(spec.worker_id)
            self.removals += 1
            self._log_state("removed", known)

    def _log_state(self, what: str, known: KnownWorker) -> None:
        log.info("discovered worker %s is %s", known.key, what, extra=_named(known))

    def _warn(self, known: KnownWorker, warnings: Sequence[str]) -> None:
        """Logs the warnings that POST /workers would return for this registration."""
        if warnings and warnings != known.warnings:
            text = "; ".join(warnings)
            log.warning("discovered worker %s: %s", known.key, text, extra=_named(known))
        known.warnings = warnings

    # -- changes over HTTP -------------------------------------------------------------------------

    def _compare(self) -> None:
        """Finds out which discovered workers were registered, changed or deleted over HTTP."""
        if self.catalog.revision == self._revision:
            return
        workers = self.catalog.workers
        ours = set()
        for known in self._known.values():
            if known.spec is None:
                continue
            holder = workers.get(known.spec.worker_id)
            if holder is not None and holder.spec is known.spec:
                ours.add(known.spec.worker_id)
                continue
            known.spec = None
            known.state = WorkerState.REMOVED if holder is None else WorkerState.BY_HTTP
            self._log_state("deleted over HTTP" if holder is None else "taken over by HTTP", known)
        self._others = {
            endpoint_key(worker.spec.endpoint): worker_id
            for worker_id, worker in workers.items()
            if worker_id not in ours and worker.spec.endpoint
        }
        for known in self._known.values():
            if known.spec is not None and known.key in self._others:
                self._withdraw(known)
                known.state = WorkerState.BY_HTTP
            elif known.state in (WorkerState.BY_HTTP, WorkerState.REMOVED):
                is_there = known.worker_id in workers or known.key in self._others
                known.state = WorkerState.BY_HTTP if is_there else WorkerState.REMOVED
        self._revision = self.catalog.revision


def _has_restarted(old: WorkerSpec | None, new: WorkerSpec) -> bool:
    """Whether an engine has other blocks than before, which it cannot get while it runs."""
    return old is not None and (
        old.block_size != new.block_size or bool(old.is_eagle) != bool(new.is_eagle)
    )


def _named(known: KnownWorker) -> dict[str, object]:
    return {"worker_id": known.worker_id, "endpoint": known.key}


def by_state(known: Iterable[KnownWorker]) -> dict[WorkerState, int]:
    """Return the number of discovered workers in each state."""
    counts = dict.fromkeys(WorkerState, 0)
    for each in known:
        counts[each.state] += 1
    return counts


# -- asking engines --------------------------------------------------------------------------------
# An engine that does not answer yet is queried again after a pause that doubles. One that has
# answered is queried periodically, because it may have been restarted with another configuration.

MOST_AT_ONCE: Final = 16  # engines
AGAIN_FIRST_S: Final = 0.5
AGAIN_LIMIT_S: Final = 15.0


@dataclass(eq=False)
class Asking:
    """Queries engines of discovered workers, each in its own task, and a limited number at a time.
    `ask(base_url)` queries one engine, and may raise OutboundFailed."""

    ask: Callable[[str], Awaitable[Particulars]]
    on_heard: Callable[[KnownWorker, Particulars], None]
    on_failed: Callable[[KnownWorker, str], None]
    refresh_s: float
    again_first_s: float = AGAIN_FIRST_S

    def __post_init__(self) -> None:
        self._turn = asyncio.Semaphore(MOST_AT_ONCE)
        self._ending: set[asyncio.Task[None]] = set()

    def begin(self, known: KnownWorker) -> None:
        if known.asking is None:
            known.asking = supervise("asking an engine", lambda: self._run(known))

    def end(self, known: KnownWorker) -> None:
        task, known.asking = known.asking, None
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Waits until cancelled queries have stopped. First call `end(known)` for each worker."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _run(self, known: KnownWorker) -> None:
        pause_s = self.again_first_s
        while True:
            if known.state in (WorkerState.BY_HTTP, WorkerState.REMOVED):  # no answer is needed
                await asyncio.sleep(self.refresh_s)
                continue
            try:
                async with self._turn:
                    engine = await self.ask(known.key)
            except OutboundFailed as error:
                self.on_failed(known, error.message)
                # Jitter, because the engines of a rack often start together.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, AGAIN_LIMIT_S)
                continue
            pause_s = self.again_first_s
            self.on_heard(known, engine)
            await asyncio.sleep(self.refresh_s * random.uniform(0.8, 1.2))
