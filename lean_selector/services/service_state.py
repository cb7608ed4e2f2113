"""What a service is in the middle of: who starts and stops it says so, its handlers read it."""


class ServiceState:
    """`is_recovering` while an index is fetched from a peer; `is_draining` once a stop began."""

    __slots__ = ("is_draining", "is_recovering")

    def __init__(self, *, is_recovering: bool = False) -> None:
        self.is_recovering = is_recovering
        self.is_draining = False

    def recovered(self) -> None:
        """Whether the index came or not: what there is now is what is served."""
        self.is_recovering = False

    def drain(self) -> None:
        """From here on not ready: what comes is still answered."""
        self.is_draining = True
