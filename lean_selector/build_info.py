"""Whether this installation runs as pure Python or compiled by mypyc."""

from lean_selector.core.hashing import IS_COMPILED

PURE, COMPILED = "pure", "compiled"


def form() -> str:
    """Return COMPILED if mypyc has compiled this package, otherwise PURE."""
    return COMPILED if IS_COMPILED else PURE
