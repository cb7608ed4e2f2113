"""The options of CURVE, and the structs made of them."""

import argparse
from collections.abc import Mapping

from lean_selector.process.options import Option, path

REPLICA_SECRET = "--replica-sync-curve-secret-key-file"
REPLICA_PEERS = "--replica-sync-curve-peer-keys-file"
EVENTS_SERVERS = "--kv-events-curve-server-keys-file"
EVENTS_SECRET = "--kv-events-curve-secret-key-file"

REPLICA_CURVE_OPTIONS = (
    Option(
        REPLICA_SECRET,
        path,
        None,
        "encrypt replica sync (CURVE) with this key pair, as `lean-selector keys` makes it",
        metavar="PATH",
    ),
    Option(
        REPLICA_PEERS,
        path,
        None,
        "public keys of the replicas, one a line: these are admitted and believed; unset: all have "
        "the pair of this one",
        metavar="PATH",
    ),
)

EVENTS_CURVE_OPTIONS = (
    Option(
        EVENTS_SERVERS,
        path,
        None,
        "engines' events and replays are encrypted (CURVE), and this file has the public keys of "
        "the engines, one a line",
        metavar="PATH",
    ),
    Option(
        EVENTS_SECRET,
        path,
        None,
        "key pair that engines admit, as `lean-selector keys` makes it; unset: one that is made at "
        "each start",
        metavar="PATH",
    ),
)


def replica_keys_of(
    parser: argparse.ArgumentParser, values: Mapping[str, object], is_on: bool
) -> dict[str, object] | None:
    """None while replicas do not encrypt. `is_on`: there is replica sync at all."""
    secret, peers = values[_name(REPLICA_SECRET)], values[_name(REPLICA_PEERS)]
    if secret is None:
        if peers is not None:
            parser.error(f"{REPLICA_PEERS} requires {REPLICA_SECRET}")
        return None
    if not is_on:
        parser.error(f"{REPLICA_SECRET} requires --replica-sync-bind or --replica-sync-port")
    return {"secret_key_file": secret, "peer_keys_file": peers}


def engine_keys_of(
    parser: argparse.ArgumentParser, values: Mapping[str, object]
) -> dict[str, object] | None:
    """None while engines do not encrypt."""
    servers, secret = values[_name(EVENTS_SERVERS)], values[_name(EVENTS_SECRET)]
    if servers is None:
        if secret is not None:
            parser.error(f"{EVENTS_SECRET} requires {EVENTS_SERVERS}")
        return None
    return {"server_keys_file": servers, "secret_key_file": secret}


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
