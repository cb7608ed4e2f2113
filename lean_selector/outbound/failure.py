"""Why a request of ours has no answer that can be used."""


class OutboundFailed(Exception):
    """One clear line, which names what was asked; `status` is that of the answer, if one came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class OutboundTimedOut(OutboundFailed):
    """Nobody answered in the time that there was."""
