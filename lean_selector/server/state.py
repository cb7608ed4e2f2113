"""The state directory of a service, wired. Imported only where there is one."""

import errno
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from lean_selector.core.replication.events import ReplicaTarget, restore
from lean_selector.core.replication.ledger import copies_expire_s
from lean_selector.core.replication.shapes import LiveBooking
from lean_selector.core.selection.inspection import established
from lean_selector.core.selection.selector import Selector, restore_booking
from lean_selector.core.trackers import Trackers
from lean_selector.server.host import StartError, os_reason
from lean_selector.server.replication import Replication
from lean_selector.server.service_flags import ServiceConfig
from lean_selector.server.state_catalog import (
    OtherService,
    PeersByHttp,
    SelectorCatalog,
    TrackerCatalog,
    restore_catalog,
    restore_reservations,
)
from lean_selector.server.state_files import DirectoryHeld, StateDirectory, stamp_now
from lean_selector.server.state_persister import LiveBookings, Persister
from lean_selector.service.worker_handlers import ServiceState

if TYPE_CHECKING:
    from lean_selector.workers.discoveries import Discoveries

# The process before this one lets go as soon as it has written all, once it is told to stop.
TAKE_WAIT_S = 2.0
_LOOK_S = 0.05
# A disk that is full or ill now may be well later, and the service is wanted now.
_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}


def keep_selector(
    config: ServiceConfig,
    selector: Selector,
    replication: Replication | None,
    finding: "Discoveries | None",
    state: ServiceState,
) -> Persister:
    """Takes the directory, restores what is in it, and keeps it from `start` on.

    Before anything else is put into the selector, and before replica sync starts. Raises
    StartError.
    """
    peers = PeersByHttp(replication, config.replica.peers, _found_peers(finding))
    contents = SelectorCatalog(selector, peers)
    if finding is not None:
        contents.roster = finding.workers
        contents.discoveries = [one.name for finds, one in finding.sightings if finds == "workers"]

    def book(live: LiveBooking, router_id: int | None) -> bool:
        return restore_booking(selector, live, router_id)

    def targets() -> Iterable[ReplicaTarget]:
        return established(selector.catalog, None, None)

    return _kept(config, contents, targets, book, replication, state)


def keep_trackers(
    config: ServiceConfig,
    trackers: Trackers,
    replication: Replication | None,
    finding: "Discoveries | None",
) -> Persister:
    """The same of a slot tracker."""
    peers = PeersByHttp(replication, config.replica.peers, _found_peers(finding))
    contents = TrackerCatalog(trackers, peers)

    def book(live: LiveBooking, router_id: int | None) -> bool:
        target = trackers.lookup(live.model_name, live.tenant_id)
        return target is not None and restore(target, live, router_id)

    return _kept(config, contents, trackers.in_order, book, replication, ServiceState())


def _kept(
    config: ServiceConfig,
    contents: SelectorCatalog | TrackerCatalog,
    targets: Callable[[], Iterable[ReplicaTarget]],
    book: Callable[[LiveBooking, int | None], bool],
    replication: Replication | None,
    state: ServiceState,
) -> Persister:
    assert config.state.path is not None
    directory = StateDirectory(config.state.path)
    expiry_s = config.reservations.reservation_expiry_s
    fault = _taken(directory)
    try:
        restore_catalog(directory, contents, time.monotonic())
    except OtherService as error:
        raise StartError(f"--state-dir: {error}") from None
    booked, dropped = restore_reservations(
        directory, book, expiry_s, copies_expire_s(expiry_s), time.monotonic(), stamp_now()
    )

    def on_fault(reason: str | None) -> None:
        state.state_fault = reason

    lives = LiveBookings(
        targets,
        0 if replication is None else replication.router_id,
        (lambda: 0) if replication is None else (lambda: replication.sync.sequence),
    )
    persister = Persister(directory, contents, lives, config.state.interval_s, on_fault)
    persister.restored, persister.dropped = booked, dropped
    persister.begin_with(fault)
    return persister


def _taken(directory: StateDirectory) -> str | None:
    """Holds the directory, or tells what keeps it from doing so for now. Raises StartError."""
    gives_up_at = time.monotonic() + TAKE_WAIT_S
    while True:
        try:
            directory.create()
            directory.take()
            return None
        except DirectoryHeld as error:
            if time.monotonic() >= gives_up_at:
                raise StartError(f"--state-dir: {error}") from None
        except OSError as error:
            if error.errno not in _MAY_PASS:
                raise StartError(f"--state-dir: {os_reason(error)}: {directory.path}") from None
            directory.wish()
            return os_reason(error)
        time.sleep(_LOOK_S)


def _found_peers(finding: "Discoveries | None") -> Callable[[], Collection[str]]:
    """The endpoints that discoveries added to the mesh."""
    roster = None if finding is None else finding.peers
    if roster is None:
        return lambda: ()
    return lambda: [known.endpoint for known in roster.known() if known.state == "registered"]
