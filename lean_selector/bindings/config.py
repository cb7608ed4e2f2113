"""The configuration of a selector that runs inside another program.

The arguments of the class are flags of `lean-selector`, so that ranges are checked and defaults
stand in one place; what has no argument comes from the same environment, DYN_*.
"""

import os
from collections.abc import Sequence
from typing import NoReturn

from lean_selector.bindings.cache_config import SelectionCacheConfig
from lean_selector.core.numbers import not_a, number, optional, whole
from lean_selector.process.options import OneLineParser, add_options
from lean_selector.process.selector_config import (
    SELECTOR_OPTIONS,
    SelectorConfig,
    selector_config,
)

# The flags that are not called as the arguments are.
_ARGUMENTS = {
    "--threads": "indexer_threads",
    "--selection-cache-ttl-secs": "selection_cache.ttl_secs",
    "--selection-cache-max-entries": "selection_cache.max_entries",
    "--selection-cache-max-bytes": "selection_cache.max_bytes",
}


class _Parser(OneLineParser):
    """Complains to the caller."""

    def error(self, message: str) -> NoReturn:
        flag, colon, fault = message.removeprefix("argument ").partition(": ")
        raise ValueError(
            _ARGUMENTS.get(flag, flag.removeprefix("--").replace("-", "_")) + colon + fault
        )


def config_of(
    indexer_threads: int,
    indexer_peers: Sequence[str] | None,
    replica_sync_port: int | None,
    replica_sync_peers: Sequence[str] | None,
    selection_cache: SelectionCacheConfig | None,
    session_affinity_ttl_secs: float | None,
) -> SelectorConfig:
    """What arguments and environment say. Raises ValueError or, for one of a wrong type, TypeError;
    both name it."""
    if not isinstance(selection_cache, SelectionCacheConfig | None):
        raise not_a("selection_cache", "a SelectionCacheConfig", selection_cache)
    cache = selection_cache or SelectionCacheConfig()
    ttl_s, entries, size = cache.ttl_secs, cache.max_entries, cache.max_bytes
    given = {
        "--threads": whole("indexer_threads", indexer_threads),
        "--indexer-peers": _joined("indexer_peers", indexer_peers),
        "--replica-sync-port": optional(whole, "replica_sync_port", replica_sync_port),
        "--replica-sync-peers": _joined("replica_sync_peers", replica_sync_peers),
        "--session-affinity-ttl-secs": optional(
            number, "session_affinity_ttl_secs", session_affinity_ttl_secs
        ),
        "--selection-cache-ttl-secs": optional(number, "selection_cache.ttl_secs", ttl_s),
        "--selection-cache-max-entries": optional(whole, "selection_cache.max_entries", entries),
        "--selection-cache-max-bytes": optional(whole, "selection_cache.max_bytes", size),
    }
    if replica_sync_peers and replica_sync_port is None:
        raise ValueError("replica_sync_peers requires replica_sync_port")
    flags = ["--api=1.6"]
    flags += [f"{flag}={value}" for flag, value in given.items() if value is not None]
    parser = _Parser(prog="SelectionService", allow_abbrev=False)
    add_options(parser, SELECTOR_OPTIONS)
    return selector_config(parser, parser.parse_args(flags), os.environ)


def _joined(name: str, values: Sequence[str] | None) -> str | None:
    return None if values is None else ",".join(texts_of(name, values)) or None


def texts_of(name: str, values: object) -> list[str]:
    """Raises TypeError, also for a text alone, which is a sequence of its letters."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise not_a(name, "a sequence of str", values)
    for place, value in enumerate(values):
        if not isinstance(value, str):
            raise not_a(f"{name}[{place}]", "a str", value)
    return list(values)
