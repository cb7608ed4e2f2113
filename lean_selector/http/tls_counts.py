"""What became of the TLS handshakes of one server: plain counts, for metrics and the log."""

from typing import Final

# Why handshakes fail: the labels of a metric.
REASONS: Final = (
    "client_certificate",  # none, or none that is trusted
    "closed",  # the client left in the middle
    "not_tls",
    "other",
    "refused_by_client",  # it said so; mostly it does not trust our certificate
    "timeout",
    "version_or_cipher",  # nothing that both know
)


class TlsCounts:
    """Ever; all 0 while TLS is off."""

    __slots__ = (
        "completed",
        "failures",
        "is_on",
        "last_failure",
        "not_after",
        "reload_failures",
        "reloads",
    )

    def __init__(self) -> None:
        self.is_on = False
        self.completed = 0
        self.failures: dict[str, int] = dict.fromkeys(REASONS, 0)
        self.last_failure = ""  # who, and why, in words
        self.reloads = 0  # of the files
        self.reload_failures = 0
        self.not_after: int | None = None  # of the certificate, in seconds since 1970
