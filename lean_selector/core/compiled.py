"""Whether the core runs compiled: what is quick in one form of the package is slow in the other.

A leaf: the form of all modules, for people, is told by `lean_selector/form.py`.
"""

from types import FunctionType


def _probe() -> None:
    """A plain function only where this module is interpreted."""


IS_COMPILED = not isinstance(_probe, FunctionType)
