"""What a router may be told of sessions."""

import msgspec

DEFAULT_BONUS_BLOCKS = 64.0


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A bound session is given its own rank (hard), or that rank is made cheaper for it (soft)."""

    ttl_s: float  # that a binding outlives the last reservation of its session
    is_soft: bool = False
    bonus_blocks: float = DEFAULT_BONUS_BLOCKS  # taken off the cost of its rank; soft only
