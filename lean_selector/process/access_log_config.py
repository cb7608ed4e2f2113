"""What the selector was told of gateways' access logs."""

import msgspec


class AccessLogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where lines are read, `syslog:HOST:PORT` or `unixgram:PATH`, and the networks that may write
    besides loopback."""

    places: list[str]
    allowed: list[str]
