"""Runs programs written for Dynamo's SelectionService with this one: `compat.install()`.

Provides modules named `dynamo.llm` and `dynamo._core` if none are installed, with only the
selection classes, which are imported at first use.
"""

import functools
import importlib.util
import os
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

# URL of the service to use; file with its bearer token, read for each request; PEM certificates to
# trust.
URL = "LEAN_SELECTOR_URL"
TOKEN_FILE = "LEAN_SELECTOR_TOKEN_FILE"
CA_FILE = "LEAN_SELECTOR_CA_FILE"

_NAMES = {
    "dynamo": (),
    "dynamo.llm": ("SelectionService",),
    "dynamo._core": ("SelectionCacheConfig", "SelectionService", "SelectionServiceError"),
}


class _Shim(ModuleType):
    """A stand-in module for one of Dynamo's."""

    def __init__(self, name: str, url: str | None) -> None:
        super().__init__(name, "From lean_selector.compat: only the selection classes.")
        self.__spec__ = ModuleSpec(name, None, is_package=name == "dynamo")
        if name == "dynamo":
            self.__path__: list[str] = []
        self._url = url

    def __getattr__(self, name: str) -> object:
        if name not in _NAMES[self.__name__]:
            hint = "lean_selector.compat has the selection classes alone"
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}: {hint}")
        if name == "SelectionService" and self._url is not None:
            return _service_at(self._url)
        return getattr(import_module("lean_selector"), name)


def install(url: str | None = None) -> bool:
    """Let `from dynamo.llm import SelectionService` find this project's class; return whether it
    does.

    With a `url` (http://host:port, or unix:PATH), or LEAN_SELECTOR_URL in the environment, it is
    RemoteSelectionService for that selector; else SelectionService in this process. If set,
    LEAN_SELECTOR_TOKEN_FILE names the file with the bearer token, and LEAN_SELECTOR_CA_FILE the
    certificates to trust. If Dynamo is installed, nothing changes, and the result is False.
    """
    if not isinstance(sys.modules.get("dynamo.llm"), _Shim) and _is_installed():
        return False
    url = url or os.environ.get(URL) or None
    for name in _NAMES:
        sys.modules[name] = _Shim(name, url)
    sys.modules["dynamo"].llm = sys.modules["dynamo.llm"]  # type: ignore[attr-defined]
    sys.modules["dynamo"]._core = sys.modules["dynamo._core"]  # type: ignore[attr-defined]
    return True


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("dynamo.llm") is not None
    except ModuleNotFoundError:
        return False


@functools.cache  # one class for each URL
def _service_at(url: str) -> type[Any]:
    from lean_selector.inprocess.remote import RemoteSelectionService

    class SelectionService(RemoteSelectionService):
        """A client of the service at one URL."""

        def __init__(self, *, indexer_threads: int = 4) -> None:
            """`indexer_threads` has no effect; other settings are the service's flags."""
            token_file = os.environ.get(TOKEN_FILE)
            super().__init__(
                url,
                verify=os.environ.get(CA_FILE) or True,
                token=None if not token_file else lambda: Path(token_file).read_text().strip(),
            )

    return SelectionService
