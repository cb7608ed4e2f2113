"""A selector and the state directory that it is written to and read from, without a process."""

import fcntl
from pathlib import Path

from lean_selector.app.state import (
    PeersByHttp,
    SelectorCatalog,
    restore_catalog,
    restore_reservation,
    restore_reservations,
)
from lean_selector.app.state_files import CATALOG, RESERVATIONS, StateDirectory, sealed
from lean_selector.app.state_persister import LiveReservations
from lean_selector.core.replication.shapes import LiveReservation
from lean_selector.core.selection.inspection import established
from tests.support.driven_selector import DrivenSelector

EXPIRY_S = 300.0


class Kept:
    """`save` writes what there is, `restore` reads it into a selector that knows nothing yet."""

    def __init__(self, path: Path, driven: DrivenSelector | None = None) -> None:
        self.directory = StateDirectory(str(path))
        self.driven = DrivenSelector(use_kv_events=False) if driven is None else driven
        self.selector = self.driven.selector
        self.contents = SelectorCatalog(self.selector, PeersByHttp(None, (), lambda: ()))
        self.lives = LiveReservations(
            lambda: established(self.selector.catalog, None, None), 7, lambda: 0
        )

    def save(self, now: float, wall_s: float = 0.0) -> None:
        self.directory.take()
        try:
            self.directory.write(CATALOG, sealed([self.contents.text()], wall_s))
            self.directory.write(RESERVATIONS, sealed(self.lives.parts(now), wall_s))
        finally:
            self.directory.close()

    def restore(self, now: float, wall_s: float = 0.0) -> tuple[int, int]:
        """How many reservations are live again, and how many were dropped."""
        restore_catalog(self.directory, self.contents, now)
        return restore_reservations(
            self.directory, self._book, EXPIRY_S, EXPIRY_S + 60.0, now, wall_s
        )

    def _book(self, live: LiveReservation, router_id: int | None) -> bool:
        return restore_reservation(self.selector, live, router_id)


def is_free(path: Path) -> bool:
    """Whether no process holds the directory."""
    with open(path / "lock", "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
