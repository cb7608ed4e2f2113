"""The option that says what may be connected to, and the flags that are held against it."""

import argparse
from collections.abc import Mapping, Sequence

from lean_selector.process.options import Option


def _patterns(value: str) -> list[str]:
    """Comma-separated patterns, each once."""
    from lean_selector.outbound.allowed_endpoints import AllowedEndpoints

    items = list(dict.fromkeys(item.strip() for item in value.split(",") if item.strip()))
    AllowedEndpoints(items)
    return items


ALLOW_OPTION = Option(
    "--allow-endpoint",
    _patterns,
    [],
    "endpoints of workers, events, replays and peers that may be connected to: SCHEME://HOST:PORT, "
    "HOST a name with * in it, a network such as 10.0.0.0/8, or *; may be repeated; unset: all",
    metavar="PATTERN",
    repeats=True,
)


def check_peer_flags(parser: argparse.ArgumentParser, values: Mapping[str, object]) -> None:
    """Peers by flag are allowed, or the start ends here."""
    peers = values["replica_sync_peers"]
    assert isinstance(peers, list)
    check_given(parser, values, "--replica-sync-peers: ", peers)


def check_given(
    parser: argparse.ArgumentParser,
    values: Mapping[str, object],
    where: str,
    endpoints: Sequence[str],
) -> None:
    """These endpoints are allowed, or the start ends with a line that begins with `where`."""
    patterns = values["allow_endpoint"]
    assert isinstance(patterns, list)
    if not patterns or not endpoints:
        return
    from lean_selector.outbound.allowed_endpoints import AllowedEndpoints

    allowed = AllowedEndpoints(patterns)
    for endpoint in endpoints:
        refusal = allowed.refusal(endpoint)
        if refusal is not None:
            parser.error(where + refusal)
