"""Programs written for Dynamo's SelectionService, run with this one: `compat.install()`.

Puts modules of the names `dynamo.llm` and `dynamo._core` where none are installed, with the
selection classes alone. What they hold is imported when it is first asked for.
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

# Where the service is that stands for the program's own; the file of a bearer token for it, read
# for each request; and PEM certificates to trust.
URL = "LEAN_SELECTOR_URL"
TOKEN_FILE = "LEAN_SELECTOR_TOKEN_FILE"
CA_FILE = "LEAN_SELECTOR_CA_FILE"

_NAMES = {
    "dynamo": (),
    "dynamo.llm": ("SelectionService",),
    "dynamo._core": ("SelectionCacheConfig", "SelectionService", "SelectionServiceError"),
}


class _Shim(ModuleType):
    """A module whose names are ours."""

    def __init__(self, name: str, url: str | None) -> None:
        super().__init__(name, "From lean_selector.compat: the selection classes alone.")
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
    """Let `from dynamo.llm import SelectionService` find this project's class; whether it does.

    With a `url` (http://host:port, or unix:PATH), or with one in the environment as
    LEAN_SELECTOR_URL, it is RemoteSelectionService in front of that selector; else SelectionService
    in this process. The selector is shown the token in the file LEAN_SELECTOR_TOKEN_FILE, and held
    against the certificates in LEAN_SELECTOR_CA_FILE, where the environment has those. Where Dynamo
    is installed nothing changes, and the answer is False.
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
        """In front of the service at one URL."""

        def __init__(self, *, indexer_threads: int = 4) -> None:
            """`indexer_threads` is the service's business; other settings are its flags."""
            token_file = os.environ.get(TOKEN_FILE)
            super().__init__(
                url,
                verify=os.environ.get(CA_FILE) or True,
                token=None if not token_file else lambda: Path(token_file).read_text().strip(),
            )

    return SelectionService
