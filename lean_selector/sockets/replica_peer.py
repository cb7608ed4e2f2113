"""A peer of a replica, as it is shown."""

import msgspec


class Peer(msgspec.Struct):
    """A peer and the state of the connection to it."""

    endpoint: str
    state: str  # "connecting" or "resolving" until the first handshake, then "connected" or
    # "disconnected"
    since: float  # monotonic seconds of the last change of state
    retries: int  # attempts to connect since then
    last_error: str | None  # why there is no connection now
