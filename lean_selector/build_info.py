"""The build that is running: pure Python, or compiled by mypyc.

`setup.py` selects the modules to compile; this module only inspects the result.
"""

import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

PURE, COMPILED = "pure", "compiled"
_LIBRARY = "lean_selector__mypyc"  # of all compiled modules, which are its attributes
_PREFIX = "init_"


def form() -> str:
    """`pure` or `compiled`, or the number of compiled modules if only some are.

    Only some are compiled if the other libraries are missing and the sources are used.
    """
    names = compiled_modules()
    compiled = sum(map(_is_compiled, names))
    if compiled == len(names):
        return COMPILED if names else PURE
    return f"{compiled} of {len(names)} modules compiled" if compiled else PURE


def compiled_modules() -> list[str]:
    """Names of the modules that the installation has compiled, whether or not they are the ones
    imported."""
    try:
        library = import_module(_LIBRARY)
    except ImportError:
        return []
    return [
        name.removeprefix(_PREFIX).replace("___", ".")
        for name in vars(library)
        if name.startswith(_PREFIX)
    ]


def _is_compiled(name: str) -> bool:
    module = sys.modules.get(name)
    spec = find_spec(name) if module is None else module.__spec__
    return spec is not None and str(spec.origin).endswith(tuple(EXTENSION_SUFFIXES))
