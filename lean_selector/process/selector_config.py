"""What `lean-selector` can be told, as a table of options, and the struct made of it."""

import argparse
from collections.abc import Mapping

import msgspec

from lean_selector.core.index.kv_index import DEFAULT_DEVICE_BLOCKS, DEFAULT_LOWER_TIER_BLOCKS
from lean_selector.core.load.busy_limits import BusyThreshold
from lean_selector.core.selection.settings import RouterSettings
from lean_selector.process.options import Option, integer, resolve, urls
from lean_selector.process.router_options import BUSY_OPTIONS, ROUTER_OPTIONS, busy_of, router_of
from lean_selector.process.service_options import (
    LISTEN_OPTIONS,
    POSITIVE_SECONDS,
    REPLICA_OPTIONS,
    Listen,
    ReplicaConfig,
    listen_of,
    port_option,
    replica_of,
)


class SelectorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `lean-selector` was told."""

    listen: Listen
    router: RouterSettings
    indexer_peers: list[str]
    recovery_timeout_s: float
    replica: ReplicaConfig | None
    device_blocks_per_rank: int
    lower_tier_blocks_per_rank: int
    busy: BusyThreshold
    overload_status: int
    warnings: list[str]


SELECTOR_OPTIONS = (
    port_option(8092),
    *LISTEN_OPTIONS,
    Option(
        "--threads",
        integer(0, 2**31),
        4,
        "accepted for compatibility, has no effect: one thread serves everything",
    ),
    Option(
        "--indexer-peers",
        urls,
        [],
        "comma-separated HTTP URLs to recover the KV index from at start, through /dump",
        metavar="URLS",
    ),
    Option(
        "--recovery-timeout-secs",
        POSITIVE_SECONDS,
        10.0,
        "longest that start-up recovery may take",
    ),
    *REPLICA_OPTIONS,
    Option(
        "--device-blocks-per-rank",
        integer(1, 2**40),
        DEFAULT_DEVICE_BLOCKS,
        "most device blocks indexed for a rank that does not report total_kv_blocks",
    ),
    Option(
        "--lower-tier-blocks-per-rank",
        integer(1, 2**40),
        DEFAULT_LOWER_TIER_BLOCKS,
        "most blocks indexed for a rank on each lower tier",
    ),
    *ROUTER_OPTIONS,
    *BUSY_OPTIONS,
)


def selector_config(
    parser: argparse.ArgumentParser, args: argparse.Namespace, environ: Mapping[str, str]
) -> SelectorConfig:
    """The configuration of `lean-selector`."""
    values = resolve(parser, SELECTOR_OPTIONS, args, environ)
    router, warnings = router_of(values, args)
    if values["indexer_peers"] and not values["use_kv_events"]:
        warnings.append("--indexer-peers has no effect while KV events are off: there is no index")
    return msgspec.convert(
        {
            "listen": listen_of(values),
            "router": router,
            "indexer_peers": values["indexer_peers"],
            "recovery_timeout_s": values["recovery_timeout_secs"],
            "replica": replica_of(parser, values),
            "device_blocks_per_rank": values["device_blocks_per_rank"],
            "lower_tier_blocks_per_rank": values["lower_tier_blocks_per_rank"],
            "busy": busy_of(values),
            "overload_status": values["overload_status"],
            "warnings": warnings,
        },
        SelectorConfig,
    )
