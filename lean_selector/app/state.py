"""The saved state of a service: written to `--state-dir`, restored at start. Imported only with
this flag. A file that cannot be read is moved aside, and does not prevent the start."""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import msgspec

from lean_selector.api.worker_handlers import ServiceState
from lean_selector.app.host import StartError, os_reason
from lean_selector.app.service_flags import ServiceConfig
from lean_selector.app.state_files import (
    CATALOG,
    RESERVATIONS,
    CatalogFile,
    Damaged,
    DirectoryHeld,
    PartitionRow,
    StateDirectory,
    StoredThreshold,
    opened,
)
from lean_selector.app.state_persister import LiveReservations, Persister
from lean_selector.core.errors import SelectorError
from lean_selector.core.load.shapes import WorkerRow
from lean_selector.core.replication.events import restore
from lean_selector.core.replication.ledger import ReplicaTarget, copies_expire_s
from lean_selector.core.replication.shapes import LiveReservation
from lean_selector.core.selection.inspection import established
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.core.trackers import Trackers
from lean_selector.wire.discovery_states import KeptWorker
from lean_selector.wire.replica_snapshot import BadSnapshot, decode_line, split_snapshot

if TYPE_CHECKING:
    from lean_selector.app.replication import Replication
    from lean_selector.app.selector_parts import SelectorCore
    from lean_selector.discovery.discoveries import Discoveries
    from lean_selector.discovery.roster import Roster

# -- the file --------------------------------------------------------------------------------------

log = logging.getLogger("lean_selector.state")

T = TypeVar("T")

_MOST_LOGGED = 10
UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError, RecursionError
_encode = msgspec.json.Encoder().encode
_decode_file = msgspec.json.Decoder(CatalogFile).decode


@dataclass
class Restoring:
    """Restores what can be restored."""

    unfit: int = 0  # how much could not be

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Logs why `what` could not be restored. The rest of the state is restored without it."""
        try:
            yield
        except (SelectorError, BadSnapshot, *UNREADABLE) as error:
            self.unfit += 1
            if self.unfit > _MOST_LOGGED:
                return
            reason = error.message if isinstance(error, SelectorError) else str(error)
            fields = {"of": what, "reason": reason}
            log.warning("some of the state could not be restored", extra=fields)

    def rows(self, rows: Sequence[msgspec.Raw], decode: Callable[[bytes], T]) -> list[T]:
        """Decodes a state file's workers. Leaves invalid ones out."""
        found: list[T] = []
        for row in rows:
            with self.trying("a worker"):
                found.append(decode(bytes(row)))
        return found


# -- peers added and removed over HTTP -------------------------------------------------------------


@dataclass
class PeersByHttp:
    """The peers added and removed over HTTP. These changes take precedence over the flags."""

    mesh: "Replication | None"  # None: restored peers are kept unchanged
    given: Collection[str]  # from flags
    found: Callable[[], Collection[str]]  # from discoveries
    restored: tuple[list[str], list[str]] = ([], [])

    def changes(self) -> tuple[list[str], list[str]]:
        """Return the peers added and the peers removed over HTTP, each list sorted."""
        if self.mesh is None:
            return self.restored
        peers = set(self.mesh.peers())
        return sorted(peers - {*self.given, *self.found()}), sorted({*self.given} - peers)

    def restore(self, added: list[str], removed: list[str], restoring: Restoring) -> None:
        """Adds and removes peers as saved in a state file. Call this before replica sync starts."""
        self.restored = added, removed
        if self.mesh is None:
            return
        for endpoint in added:
            with restoring.trying(f"peer {endpoint}"):
                self.mesh.register_peer(endpoint)
        for endpoint in removed:
            if endpoint in self.given:
                self.mesh.deregister_peer(endpoint)


# -- the selector's --------------------------------------------------------------------------------
# A worker that was found by discovery stays under its control after a restart (D33).

_decode_spec = msgspec.json.Decoder(WorkerSpec).decode


@dataclass
class SelectorCatalog:
    """Saves and restores a selector's file `catalog`. `roster` has the discovered workers;
    `discoveries` has the values of the flag --discover, such as dns:NAME:PORT."""

    selector: Selector
    peers: PeersByHttp
    roster: "Roster | None" = None
    discoveries: Collection[str] = ()
    service: ClassVar[Literal["selector"]] = "selector"

    @property
    def revision(self) -> int:
        """A number that increases with each change of a registered worker."""
        return self.selector.catalog.revision

    def text(self) -> bytes:
        """Return the current text of the file `catalog`. A thousand workers take half a ms."""
        selector, (added, removed) = self.selector, self.peers.changes()
        return _encode(
            CatalogFile(
                version=1,
                service=self.service,
                partitions=[
                    PartitionRow(*key, each.block_size, each.is_eagle, sorted(each.members))
                    for key, each in selector.catalog.partitions.items()
                    if each.members
                ],
                thresholds=[
                    StoredThreshold(*key, threshold) for key, threshold in selector.limits.own()
                ],
                found=[] if self.roster is None else self.roster.kept(),
                peers_added=added,
                peers_removed=removed,
                workers=[
                    msgspec.Raw(_encode(worker.spec))
                    for worker in selector.catalog.workers.values()
                ],
            )
        )

    def restore(self, file: CatalogFile, now: float, restoring: Restoring) -> None:
        """Restores `file` into a new selector."""
        self.peers.restore(file.peers_added, file.peers_removed, restoring)
        selector = self.selector
        for row in file.thresholds:
            with restoring.trying(f"threshold of {row.model_name}"):
                selector.limits.restore((row.model_name, row.tenant_id), row.threshold)
        sought = dict[int, KeptWorker]()
        for kept in file.found:
            names = [name for name in kept.discoveries if name in self.discoveries]
            if names:
                sought[kept.worker_id] = msgspec.structs.replace(kept, discoveries=names)
        ours = {kept.worker_id for kept in file.found if not kept.is_removed}
        workers = {
            spec.worker_id: spec
            for spec in restoring.rows(file.workers, _decode_spec)
            if spec.worker_id not in ours or spec.worker_id in sought
        }
        for part in file.partitions:
            key = part.model_name, part.tenant_id
            # Workers with another block size are refused while one of `members` has this one (D3).
            partition = selector.catalog.new_partition(key, part.block_size, part.is_eagle)
            selector.catalog.partitions[key] = partition
            partition.restore(part.members)
        for spec in workers.values():
            with restoring.trying(f"worker {spec.worker_id}"):
                selector.upsert_worker(spec, now)
        catalog = selector.catalog
        for part in file.partitions:  # members that were not restored hold no block size
            key = part.model_name, part.tenant_id
            for member in part.members:
                if member not in catalog.workers or catalog.workers[member].spec.key != key:
                    catalog.leave(key, member)
        if self.roster is not None:  # treat them as just found by their discoveries
            for kept in sought.values():
                worker = selector.catalog.workers.get(kept.worker_id)
                if kept.is_removed:
                    self.roster.take_back(kept, None)
                elif worker is not None:
                    self.roster.take_back(kept, worker.spec)


# -- the slot tracker's ----------------------------------------------------------------------------

_decode_row = msgspec.json.Decoder(WorkerRow).decode


@dataclass
class TrackerCatalog:
    """Saves and restores a slot tracker's file `catalog`."""

    trackers: Trackers
    peers: PeersByHttp
    service: ClassVar[Literal["slot_tracker"]] = "slot_tracker"

    @property
    def revision(self) -> int:
        """A number that increases with each change of a registered worker."""
        return self.trackers.revision

    def text(self) -> bytes:
        """Return the current text of the file `catalog`."""
        added, removed = self.peers.changes()
        return _encode(
            CatalogFile(
                version=1,
                service=self.service,
                peers_added=added,
                peers_removed=removed,
                workers=[msgspec.Raw(_encode(row)) for row in self.trackers.workers()],
            )
        )

    def restore(self, file: CatalogFile, now: float, restoring: Restoring) -> None:
        """Restores `file` into new trackers."""
        self.peers.restore(file.peers_added, file.peers_removed, restoring)
        for row in restoring.rows(file.workers, _decode_row):
            with restoring.trying(f"worker {row.worker_id}"):
                self.trackers.register(row)


# -- restoring at start ----------------------------------------------------------------------------


class OtherService(Exception):
    """The state directory is intact, but the other service (selector or slot tracker) wrote it."""


def restore_catalog(
    directory: StateDirectory, contents: SelectorCatalog | TrackerCatalog, now: float
) -> None:
    """Restores everything except reservations. If OtherService is raised, nothing was restored."""
    file = _read(directory, CATALOG, lambda text, _: _decode_file(text))
    if file is None:
        return
    if file.service != contents.service:
        raise OtherService(f"{directory.path} has the state of a {file.service}")
    restoring = Restoring()
    contents.restore(file, now, restoring)
    fields: dict[str, object] = {
        "file": CATALOG,
        "workers": len(file.workers),
        "unfit": restoring.unfit,
    }
    if restoring.unfit:  # the next catalog is without them; a mistyped flag may be the cause
        try:
            fields["kept_as"] = directory.keep_copy(CATALOG)
        except OSError as error:
            log.error("the unfit state was not copied", extra={"reason": os_reason(error)})
    log.info("state restored", extra=fields)


def restore_reservations(
    directory: StateDirectory,
    book: Callable[[LiveReservation, int | None], bool],
    expiry_s: float,
    copies_expire_s: float,
    now: float,
    wall_now: float,
) -> tuple[int, int]:
    """Calls `book(reservation, peer)` for saved reservations, least recently used first. `peer` is
    the id of the admitting replica, or None for this replica. Drops a reservation if `book` returns
    False, or if it was idle longer than `expiry_s` (if a peer admitted it: `copies_expire_s`).
    Return how many were restored and dropped. `now` is monotonic, `wall_now` is Unix time."""

    def read(text: bytes, written_at: float) -> tuple[int, list[LiveReservation]]:
        snapshot = split_snapshot(text)
        then = now - max(0.0, wall_now - written_at)
        found: list[LiveReservation] = []
        restoring = Restoring()
        for line in snapshot.lines:
            with restoring.trying("a reservation"):
                found.append(decode_line(line, then))
        return snapshot.router_id, found

    taken = _read(directory, RESERVATIONS, read)
    if taken is None:
        return 0, 0
    own_id, found = taken
    found.sort(key=lambda live: live.touched_at)
    booked = 0
    for live in found:
        is_own = live.router_id == own_id
        if now - live.touched_at <= (expiry_s if is_own else copies_expire_s):
            booked += book(live, None if is_own else live.router_id)
    dropped = len(found) - booked
    fields = {"file": RESERVATIONS, "reservations": booked, "dropped": dropped}
    log.info("state restored", extra=fields)
    return booked, dropped


def _read(directory: StateDirectory, name: str, read: Callable[[bytes, float], T]) -> T | None:
    """Reads a state file. Return None if the file does not exist or is damaged."""
    try:
        content = directory.read(name)
        return None if content is None else read(*opened(content))
    except (Damaged, BadSnapshot, *UNREADABLE, OSError) as error:
        fields = {"file": name, "reason": str(error)}
    try:
        log.error(
            "damaged state was moved aside", extra={**fields, "as": directory.set_aside(name)}
        )
    except OSError as failed:
        log.error("state is damaged", extra={**fields, "not_set_aside": failed.strerror})
    return None


# -- wiring ----------------------------------------------------------------------------------------

# The previous process unlocks the directory when it has drained and written everything.
AFTER_DRAIN_S = 2.0
_LOOK_S = 0.05
# Faults of a disk that may pass; the service is needed now.
_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}


def keep_selector(
    core: "SelectorCore", replication: "Replication | None", finding: "Discoveries | None"
) -> Persister:
    """Locks the state directory and restores a selector. Return a Persister for later changes.

    Call this before anything else is added to the selector, and before replica sync starts. Raises
    StartError."""
    config, selector = core.config, core.selector
    peers = PeersByHttp(replication, config.replica.peers, _found_peers(finding))
    contents = SelectorCatalog(selector, peers)
    if finding is not None:
        contents.roster = finding.workers
        contents.discoveries = [one.name for finds, one in finding.sightings if finds == "workers"]

    def targets() -> Iterable[ReplicaTarget]:
        return established(selector.catalog, None, None)

    book = partial(restore_reservation, selector)
    return _kept(config, contents, targets, book, replication, core.state)


def restore_reservation(selector: Selector, live: LiveReservation, router_id: int | None) -> bool:
    """Restore a reservation of an earlier process. `router_id`: the replica that admitted the
    request; None: this replica. Return False if the reservation could not be restored."""
    partition = selector.scheduling_partition(live.model_name, live.tenant_id)
    if partition is None:
        return False
    request_id, reservations = live.spec.request_id, selector.reservations
    if router_id is not None:
        return restore(partition, live, router_id)
    if reservations.local_holder(request_id) is not None or not restore(partition, live, None):
        return False
    reservations.restored(partition, request_id)
    return True


def keep_trackers(
    config: ServiceConfig,
    trackers: Trackers,
    replication: "Replication | None",
    finding: "Discoveries | None",
) -> Persister:
    """Locks the state directory and restores trackers. Return a Persister. Raises StartError."""
    peers = PeersByHttp(replication, config.replica.peers, _found_peers(finding))
    contents = TrackerCatalog(trackers, peers)

    def book(live: LiveReservation, router_id: int | None) -> bool:
        target = trackers.lookup(live.model_name, live.tenant_id)
        return target is not None and restore(target, live, router_id)

    return _kept(config, contents, trackers.in_order, book, replication, ServiceState())


def _kept(
    config: ServiceConfig,
    contents: SelectorCatalog | TrackerCatalog,
    targets: Callable[[], Iterable[ReplicaTarget]],
    book: Callable[[LiveReservation, int | None], bool],
    replication: "Replication | None",
    state: ServiceState,
) -> Persister:
    assert config.state.path is not None
    directory = StateDirectory(config.state.path)
    expiry_s = config.reservations.reservation_expiry_s
    _take(directory, config.listen.drain_s + AFTER_DRAIN_S)
    try:
        restore_catalog(directory, contents, time.monotonic())
    except OtherService as error:
        raise StartError(f"--state-dir: {error}") from None
    booked, dropped = restore_reservations(
        directory, book, expiry_s, copies_expire_s(expiry_s), time.monotonic(), time.time()
    )

    def on_fault(reason: str | None) -> None:
        state.state_fault = reason

    lives = LiveReservations(
        targets,
        0 if replication is None else replication.router_id,
        (lambda: 0) if replication is None else (lambda: replication.sync.sequence),
    )
    persister = Persister(directory, contents, lives, on_fault)
    persister.restored, persister.dropped = booked, dropped
    return persister


def _take(directory: StateDirectory, patience_s: float) -> None:
    """Locks the directory. Raises StartError if another process holds it for `patience_s`, and at
    once if it cannot be created or may not be locked. If only the disk is full, faulty or
    read-only, the first write that succeeds locks the directory."""
    gives_up_at = time.monotonic() + patience_s
    while True:
        try:
            directory.take()
            return
        except DirectoryHeld as error:
            if time.monotonic() >= gives_up_at:
                raise StartError(f"--state-dir: {error}") from None
        except OSError as error:
            if error.errno in _MAY_PASS and os.path.isdir(directory.path):
                return
            raise StartError(f"--state-dir: {os_reason(error)}: {directory.path}") from None
        time.sleep(_LOOK_S)


def _found_peers(finding: "Discoveries | None") -> Callable[[], Collection[str]]:
    roster = None if finding is None else finding.peers
    if roster is None:
        return lambda: ()
    return lambda: [known.endpoint for known in roster.known() if known.state == "registered"]
