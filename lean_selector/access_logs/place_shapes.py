"""What a place is: a UDP address, or the path of a UNIX socket."""

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Of lines that are read."""

    host: str = ""
    port: int = 0
    path: str | None = None
