"""What is remembered of a rank that has failed."""

IN_SERVICE, PROBATION, EJECTED = "in_service", "probation", "ejected"


class RankHealth:
    """Of one rank. Read it anywhere; only Ejections changes it. Times are monotonic seconds."""

    __slots__ = (
        "ejections",
        "failed_polls",
        "failures",
        "healed_at",
        "is_down",
        "is_out",
        "on_probation",
        "probation_ends_at",
        "reason",
        "returns_at",
        "since",
        "was_refused",
    )

    def __init__(self) -> None:
        self.failures = 0  # reported in a row
        self.failed_polls = 0  # in a row
        self.was_refused = False  # at the last failure nobody listened
        self.is_out = False  # ejected: by reports until `returns_at`, by polls while `is_down`
        self.is_down = False
        self.on_probation = False  # back, and ejected again by one failure
        self.since = 0.0  # when it was ejected, while it is out; when it came back, on probation
        self.returns_at = 0.0
        self.probation_ends_at = 0.0
        self.ejections = 0  # by reports; less one for each `base_s` in service after `healed_at`
        self.healed_at = 0.0
        self.reason = ""  # why it is, or was last, ejected

    @property
    def state(self) -> str:
        if self.is_out:
            return EJECTED
        return PROBATION if self.on_probation else IN_SERVICE
