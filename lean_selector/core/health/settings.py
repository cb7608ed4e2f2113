"""What it takes to be ejected, and for how long."""

import msgspec


class EjectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The model is envoy's outlier detection: consecutive failures, a time that grows with each
    ejection, and a share of the ranks beyond which nobody else is ejected."""

    failures: int = 3  # reported in a row; 0: reports eject nobody
    failed_polls: int = 3  # in a row
    base_s: float = 30.0  # the first ejection; the nth in a row takes n times as long
    longest_s: float = 300.0
    most_percent: float = 50.0  # of a partition's ranks; the ranks of one worker may always go
