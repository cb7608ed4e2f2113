"""Lets programs written for Dynamo's SelectionService use this project's SelectionService.

install() provides the modules `dynamo.llm` and `dynamo._core`, unless Dynamo is installed. Each of
these modules has only the classes for selection."""

import importlib.util
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAMES = {
    "dynamo": (),
    "dynamo.llm": ("SelectionService",),
    "dynamo._core": ("SelectionCacheConfig", "SelectionService", "SelectionServiceError"),
}


class _Shim(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name, "From lean_selector.compat: only the selection classes.")
        self.__spec__ = ModuleSpec(name, None, is_package=name == "dynamo")
        if name == "dynamo":
            self.__path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name not in _NAMES[self.__name__]:
            hint = "lean_selector.compat has only the selection classes"
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}: {hint}")
        return getattr(import_module("lean_selector"), name)


def install() -> bool:
    """Lets `from dynamo.llm import SelectionService` import this project's class. If Dynamo is
    installed, changes nothing and returns False."""
    if not isinstance(sys.modules.get("dynamo.llm"), _Shim) and _is_installed():
        return False
    for name in _NAMES:
        sys.modules[name] = _Shim(name)
    sys.modules["dynamo"].llm = sys.modules["dynamo.llm"]  # type: ignore[attr-defined]
    sys.modules["dynamo"]._core = sys.modules["dynamo._core"]  # type: ignore[attr-defined]
    return True


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("dynamo.llm") is not None
    except ModuleNotFoundError:
        return False
