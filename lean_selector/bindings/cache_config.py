"""How much of what `select` chose is kept for a later `create_reservation`, and for how long."""

import msgspec


class SelectionCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """None keeps the default: 120 seconds, 4096 selections, 256 MiB. 0 switches the cache off."""

    ttl_secs: float | None = None
    max_entries: int | None = None
    max_bytes: int | None = None
