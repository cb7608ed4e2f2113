"""Reads a state directory at the start. What cannot be read is set aside, and never stops it."""

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from lean_selector.core.replication.shapes import LiveBooking
from lean_selector.state.catalog_text import read_catalog
from lean_selector.state.directory import StateDirectory
from lean_selector.state.keeper import CATALOG, RESERVATIONS
from lean_selector.state.seal import Damaged, OtherVersion, elapsed_s, opened
from lean_selector.state.shapes import CatalogFile, Stamp
from lean_selector.wire.replica_snapshot import BadSnapshot, decode_line, split_snapshot

log = logging.getLogger("lean_selector.state")

T = TypeVar("T")

_MOST_LOGGED = 10


class Restored(Protocol):
    """The catalog of a service, out of a file."""

    @property
    def service(self) -> str: ...

    def restore(self, file: CatalogFile, now: float) -> list[str]: ...


class OtherService(Exception):
    """The directory is whole, and that of the other service."""


def restore_catalog(directory: StateDirectory, contents: Restored, now: float) -> None:
    """Raises OtherService, with nothing restored."""

    def read(text: bytes, _: Stamp) -> CatalogFile:
        return read_catalog(text)

    file = _read(directory, CATALOG, read)
    if file is None:
        return
    if file.service != contents.service:
        raise OtherService(f"{directory.path} has the state of a {file.service}")
    problems = contents.restore(file, now)
    _log_problems("the catalog", problems)
    fields: dict[str, object] = {
        "file": CATALOG,
        "workers": len(file.workers),
        "unfit": len(problems),
    }
    if problems:
        # The file is written without them at the next change; a flag may have been mistyped.
        try:
            fields["kept_as"] = directory.keep_copy(CATALOG)
        except OSError as error:
            log.error("what does not fit could not be kept", extra={"reason": error.strerror})
    log.info("state restored", extra=fields)


def restore_reservations(
    directory: StateDirectory,
    book: Callable[[LiveBooking, int | None], bool],
    expiry_s: float,
    copies_expire_s: float,
    now: float,
    stamp: Stamp,
) -> tuple[int, int]:
    """How many are live again, and how many are not: too old by now, or their rank is gone.

    `book` gets each with the peer that admitted it, None if this replica did; the oldest first.
    It is `now`, in monotonic seconds, and `stamp` by the clocks that files are stamped by.
    """
    problems: list[str] = []

    def read(text: bytes, written: Stamp) -> tuple[int, list[LiveBooking]]:
        try:
            snapshot = split_snapshot(text)
        except BadSnapshot as error:
            raise Damaged(str(error)) from None
        then = now - elapsed_s(written, stamp)
        found: list[LiveBooking] = []
        for line in snapshot.lines:
            try:
                found.append(decode_line(line, then))
            except BadSnapshot as error:
                problems.append(str(error))
        return snapshot.router_id, found

    taken = _read(directory, RESERVATIONS, read)
    if taken is None:
        return 0, 0
    _log_problems("reservations", problems)
    own_id, found = taken
    found.sort(key=_touched_at)
    booked = 0
    for live in found:
        is_own = live.router_id == own_id
        if now - live.touched_at <= (expiry_s if is_own else copies_expire_s):
            booked += book(live, None if is_own else live.router_id)
    dropped = len(found) - booked
    fields = {"file": RESERVATIONS, "reservations": booked, "dropped": dropped}
    log.info("state restored", extra=fields)
    return booked, dropped


def _touched_at(live: LiveBooking) -> float:
    return live.touched_at


def _read(directory: StateDirectory, name: str, read: Callable[[bytes, Stamp], T]) -> T | None:
    """None: there is none, or it was set aside."""
    try:
        sealed = directory.read(name)
        if sealed is None:
            return None
        return read(*opened(sealed))
    except (Damaged, OSError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        fields = {"file": name, "reason": reason}
        is_other = isinstance(error, OtherVersion)
        what = "state is of another release" if is_other else "state is damaged"
        try:
            log.error(f"{what}, and set aside", extra={**fields, "as": directory.set_aside(name)})
        except OSError as failed:
            log.error(what, extra={**fields, "not_set_aside": failed.strerror})
    return None


def _log_problems(what: str, problems: list[str]) -> None:
    for problem in problems[:_MOST_LOGGED]:
        log.warning("some of the state does not fit", extra={"of": what, "reason": problem})
    if len(problems) > _MOST_LOGGED:
        more = len(problems) - _MOST_LOGGED
        log.warning("more of it does not fit", extra={"of": what, "count": more})
