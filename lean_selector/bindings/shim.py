"""Which class stands where a program looks for Dynamo's."""

import functools
import os
from pathlib import Path
from typing import Any

from lean_selector.bindings.cache_config import SelectionCacheConfig
from lean_selector.bindings.errors import SelectionServiceError

# For the service at a URL: the file of a bearer token, read for each request, and PEM certificates
# to trust.
TOKEN_FILE = "LEAN_SELECTOR_TOKEN_FILE"
CA_FILE = "LEAN_SELECTOR_CA_FILE"


def class_of(name: str, url: str | None) -> type[Any]:
    """The class of this name; with a `url`, the service is the one there."""
    if name == "SelectionServiceError":
        return SelectionServiceError
    if name == "SelectionCacheConfig":
        return SelectionCacheConfig
    if url is not None:
        return _service_at(url)
    from lean_selector.bindings.in_process import SelectionService

    return SelectionService


@functools.cache  # one class for each URL, whoever asks
def _service_at(url: str) -> type[Any]:
    from lean_selector.bindings.remote import RemoteSelectionService

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
