"""The names of workers that nobody has named: the same at every replica, and after a restart."""

from typing import Final

import xxhash

from lean_selector.outbound.url import base_without_version, endpoint_url

# 53 bits: what JavaScript, Lua and jq still read as they stand. Of 10 000 workers two have the same
# with a probability of one in a hundred million.
_BITS: Final = (1 << 53) - 1


def endpoint_key(endpoint: str) -> str:
    """The same for every spelling of one endpoint, also without a scheme: `http://host:port`, and a
    path if it has one, without the /v1 at its end.

    Whatever is no URL stands for itself.
    """
    try:
        url = endpoint_url(endpoint)
    except ValueError:
        return endpoint
    return base_without_version(url.origin + url.target)


def worker_id_of(key: str) -> int:
    """XXH3-64 (seed 0) of the UTF-8 bytes of an endpoint's key, its lowest 53 bits (D33)."""
    return xxhash.xxh3_64_intdigest(key.encode()) & _BITS
