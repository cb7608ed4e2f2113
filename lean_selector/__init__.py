"""lean-selector: which inference worker should serve this prompt?

Each exported name is imported when it is first used, so that a server never imports the client's
httpx, and an engine that publishes events imports no code of the server.

block_hashes(tokens, block_size, lora_name=None, cache_salt=None) hashes the full blocks of a
prompt. sequence_hashes(block_hashes) hashes each prefix that ends with a block. The hashes are
unsigned XXH3-64 hashes, as engines and services of the Dynamo family compute them.

>>> from lean_selector import block_hashes, sequence_hashes
>>> block_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9], block_size=4)
[14643705804678351452, 16777012769546811212]
>>> sequence_hashes([14643705804678351452, 16777012769546811212])
[14643705804678351452, 4945711292740353085]
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lean_selector.client import KvPushRouter as KvPushRouter
    from lean_selector.client import KvRouter as KvRouter
    from lean_selector.client import KvRouterConfig as KvRouterConfig
    from lean_selector.client import SyncKvRouter as SyncKvRouter
    from lean_selector.core.hashing import block_hashes as block_hashes
    from lean_selector.core.hashing import sequence_hashes as sequence_hashes
    from lean_selector.embedded.dialect import SelectionCacheConfig as SelectionCacheConfig
    from lean_selector.embedded.dialect import SelectionServiceError as SelectionServiceError
    from lean_selector.embedded.service import SelectionService as SelectionService
    from lean_selector.publisher import KvEventPublisher as KvEventPublisher

__version__ = "0.2.0"

_HOME = {
    "KvEventPublisher": "lean_selector.publisher",
    "KvPushRouter": "lean_selector.client",
    "KvRouter": "lean_selector.client",
    "KvRouterConfig": "lean_selector.client",
    "SelectionCacheConfig": "lean_selector.embedded.dialect",
    "SelectionService": "lean_selector.embedded.service",
    "SelectionServiceError": "lean_selector.embedded.dialect",
    "SyncKvRouter": "lean_selector.client",
    "block_hashes": "lean_selector.core.hashing",
    "sequence_hashes": "lean_selector.core.hashing",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
