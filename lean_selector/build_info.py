"""The running build: pure Python, or compiled by mypyc (setup.py)."""

from lean_selector.core.hashing import IS_COMPILED

PURE, COMPILED = "pure", "compiled"


def form() -> str:
    """All modules that `setup.py` selects are compiled together, so this checks one of them."""
    return COMPILED if IS_COMPILED else PURE
