"""What the gateway counts: plain numbers, added to where things happen and read by a scrape."""

from collections import Counter
from typing import Final

from lean_selector.service.exposition import Histogram

FIRST_BYTE_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Counts:
    """Ever, since the process began; `active` is now."""

    __slots__ = (
        "active",
        "answers",
        "broken",
        "compared_cached_tokens",
        "compared_predicted_tokens",
        "compared_prompt_tokens",
        "connections_made",
        "first_byte",
        "hung_up",
        "passed_on_bytes",
        "pieces",
        "retries",
        "stale",
        "unrouted",
    )

    def __init__(self) -> None:
        self.active = 0  # requests that have no end yet
        self.answers: Counter[int] = Counter()  # by status, of those that began
        self.hung_up = 0  # clients
        self.broken = 0  # answers that were cut short after their first byte
        self.retries: Counter[str] = Counter()  # tried elsewhere, by how the worker failed
        self.stale = 0  # kept connections that ended under a request, which was asked anew
        self.unrouted: Counter[str] = Counter()  # sent on in turn, and why nobody chose
        self.connections_made = 0
        self.pieces = 0  # of answers' bodies
        self.passed_on_bytes = 0
        # Of the answers whose engine told how many tokens were cached: what was predicted.
        self.compared_predicted_tokens = 0
        self.compared_cached_tokens = 0
        self.compared_prompt_tokens = 0
        self.first_byte = Histogram(FIRST_BYTE_BOUNDS_S)
