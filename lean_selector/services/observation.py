"""What a process has for all that is observed."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a process has for all that is observed. `call_soon` and `call_later` are the loop's."""

    service: str
    document: str  # of `openapi.services`
    version: str
    access_log: bool
    suppressed_log_lines: Callable[[], int]
    dropped_log_lines: Callable[[], int]
    call_soon: Callable[[Callable[[], None]], object]
    call_later: Callable[[float, Callable[[], None]], object]
