"""What a check found, one thing at a time."""

from enum import StrEnum

import msgspec


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
