"""How workers are polled."""

import msgspec


class PollSettings(msgspec.Struct, frozen=True, kw_only=True):
    interval_s: float
    path: str = "/health"
    timeout_s: float = 2.0  # for the whole answer
