"""What a service was told of its state directory."""

import msgspec


class StateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where state is kept, and how often what lives is written."""

    path: str
    interval_s: float
