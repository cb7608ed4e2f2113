"""One discovery, seen from outside: what it last found, and what keeps it from finding now."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from lean_selector.discovery.particulars import Place

log = logging.getLogger("lean_selector.discovery")

WARN_EVERY_S: Final = 60.0


class Sighting:
    """The state of a discovery. What it found holds until it finds something else: a failure
    changes nothing but `error`."""

    def __init__(self, name: str) -> None:
        """`name` as in the flag that asks for it."""
        self.name: Final = name
        self.count: int | None = None  # of what it found; None until it found something
        self.error: str | None = None
        self.since = time.monotonic()  # of `error`, or of its absence
        self.failures = 0
        self._warned_at = 0.0

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failing"
        return "starting" if self.count is None else "watching"

    def found(self, count: int) -> None:
        if self.error is not None or self.count is None:
            log.info("discovery %s: %d found", self.name, count, extra={"discovery": self.name})
            self.since = time.monotonic()
        self.count = count
        self.error = None

    def failed(self, reason: str) -> None:
        """May be called for every try: it is logged when it begins, and once a minute."""
        now = time.monotonic()
        self.failures += 1
        if self.error is None:
            self.since = now
            self._warned_at = 0.0
        self.error = reason
        if not self._warned_at or now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            text = "discovery %s fails, what it found before holds: %s"
            log.warning(text, self.name, reason, extra={"discovery": self.name})


# What is found, and of what is not, what is said to end.
OnPlaces = Callable[[Iterable[Place], Iterable[Place]], None]
