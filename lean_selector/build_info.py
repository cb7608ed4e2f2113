"""How this build runs: as pure Python, or compiled by mypyc (setup.py)."""

from lean_selector.core.hashing import IS_COMPILED

PURE, COMPILED = "pure", "compiled"


def form() -> str:
    """Checks one module, because all that `setup.py` selects are compiled together."""
    return COMPILED if IS_COMPILED else PURE
