"""What the status of a worker's answer says of its health: one rule for all who see answers."""

from typing import Final

from lean_selector.core.health.ejections import FAILED, OK

# Of who sheds load or is starting up: that is neither a failure nor a request that was served.
NOT_FREE: Final = frozenset({429, 503, 529})


def outcome_of_status(status: int) -> str | None:
    """Of an HTTP status from 200 on, of an answer that came to its end; None: it says nothing.

    Who says that a request makes no sense is well.
    """
    if status in NOT_FREE:
        return None
    return FAILED if status >= 500 else OK
