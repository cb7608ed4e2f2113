"""What a service is in the middle of: who starts and stops it says so, its handlers read it."""


class ServiceState:
    """`is_recovering` while an index is fetched from a peer; `is_draining` once a stop began;
    `state_fault` while the state directory cannot be written: why."""

    __slots__ = ("is_draining", "is_recovering", "state_fault")

    def __init__(self, *, is_recovering: bool = False) -> None:
        self.is_recovering = is_recovering
        self.is_draining = False
        self.state_fault: str | None = None

    def recovered(self) -> None:
        """Whether the index came or not: what there is now is what is served."""
        self.is_recovering = False

    def drain(self) -> None:
        """From here on not ready: what comes is still answered."""
        self.is_draining = True
