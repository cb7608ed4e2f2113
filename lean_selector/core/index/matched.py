"""How much of a prompt a rank holds."""

import msgspec


class Matched(msgspec.Struct, frozen=True, gc=False):
    """Leading blocks of a prompt that a rank holds: D, then H more, then K + X more (spec 3.5)."""

    device: int
    host: int = 0
    disk: int = 0
