"""What is registered where neither a discovery nor the engine says it, as a flag tells it."""

import msgspec

from lean_selector.discovery.particulars import Particulars


def defaults_of(text: str) -> Particulars:
    """Of a JSON object. Raises ValueError, saying what was wrong."""
    defaults = msgspec.json.decode(text, type=Particulars)
    for name in ("worker_id", "endpoint"):
        if getattr(defaults, name) is not None:
            raise ValueError(f"{name} is a worker's own")
    return defaults
