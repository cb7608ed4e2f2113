"""What `lean-selector` can be told, as a table of options, and the struct made of it."""

import argparse
from collections.abc import Mapping

import msgspec

from lean_selector.core.index.kv_index import DEFAULT_DEVICE_BLOCKS, DEFAULT_LOWER_TIER_BLOCKS
from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.core.selection.settings import RouterSettings
from lean_selector.process.access_log_config import AccessLogConfig
from lean_selector.process.access_log_options import ACCESS_LOG_OPTIONS, access_logs_of
from lean_selector.process.curve_config import EngineKeys
from lean_selector.process.curve_options import EVENTS_CURVE_OPTIONS, engine_keys_of
from lean_selector.process.dialect_options import (
    DIALECT_OPTIONS,
    check_dialect,
    dialect_of,
    overload_status_of,
)
from lean_selector.process.discovery_config import AccessFiles, FinderConfig, WorkerDiscovery
from lean_selector.process.discovery_options import (
    WORKER_OPTIONS,
    finder_of,
    worker_discovery_of,
)
from lean_selector.process.endpoint_options import ALLOW_OPTION, check_peer_flags
from lean_selector.process.health_options import HEALTH_OPTIONS, ejection_of, polls_of
from lean_selector.process.options import Option, integer, number, resolve, urls
from lean_selector.process.peer_access_options import (
    PEER_ACCESS_OPTIONS,
    access_of,
    peer_access_of,
)
from lean_selector.process.prompt_options import prompt_options, prompt_settings_of
from lean_selector.process.router_options import (
    BUSY_OPTIONS,
    ROUTER_OPTIONS,
    busy_of,
    router_of,
    sessions_of,
)
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
from lean_selector.process.state_config import StateConfig
from lean_selector.process.state_options import STATE_OPTIONS, state_of
from lean_selector.prompts.settings import Mode, PromptSettings
from lean_selector.sockets.poll_settings import PollSettings


class SelectorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `lean-selector` was told."""

    listen: Listen
    router: RouterSettings
    indexer_peers: list[str]
    recovery_timeout_s: float
    kv_source_grace_s: float
    replica: ReplicaConfig | None
    finder: FinderConfig
    discover: WorkerDiscovery | None
    engines: AccessFiles
    peers: AccessFiles
    allowed_endpoints: list[str]
    engine_keys: EngineKeys | None
    device_blocks_per_rank: int
    lower_tier_blocks_per_rank: int
    busy: BusyThreshold
    overload_status: int
    polls: PollSettings | None
    access_logs: AccessLogConfig | None
    prompts: PromptSettings | None
    state: StateConfig | None = None
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
    Option(
        "--kv-source-grace-secs",
        number(0.0),
        60.0,
        "how long a worker's KV events may be unreachable, silent or without a replay before that"
        " is a warning",
    ),
    *STATE_OPTIONS,
    *REPLICA_OPTIONS,
    *PEER_ACCESS_OPTIONS,
    ALLOW_OPTION,
    *EVENTS_CURVE_OPTIONS,
    *WORKER_OPTIONS,
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
    *DIALECT_OPTIONS,
    *ROUTER_OPTIONS,
    *BUSY_OPTIONS,
    *HEALTH_OPTIONS,
    *prompt_options(None, Mode.TOKENIZE, Mode.LOCAL, Mode.OFF),
    *ACCESS_LOG_OPTIONS,
)


def selector_config(
    parser: argparse.ArgumentParser, args: argparse.Namespace, environ: Mapping[str, str]
) -> SelectorConfig:
    """The configuration of `lean-selector`."""
    values = resolve(parser, SELECTOR_OPTIONS, args, environ)
    check_peer_flags(parser, values)
    router, warnings = router_of(parser, values, args)
    router["ejection"] = ejection_of(values)
    check_dialect(parser, values, args)
    router.update(dialect_of(values))
    router["sessions"] = sessions_of(parser, values)
    if values["indexer_peers"] and not values["use_kv_events"]:
        warnings.append("--indexer-peers has no effect while KV events are off")
    return msgspec.convert(
        {
            "listen": listen_of(parser, values),
            "router": router,
            "indexer_peers": values["indexer_peers"],
            "recovery_timeout_s": values["recovery_timeout_secs"],
            "kv_source_grace_s": values["kv_source_grace_secs"],
            "replica": replica_of(parser, values),
            "finder": finder_of(values),
            "discover": worker_discovery_of(values),
            "engines": access_of(parser, values, "worker"),
            "peers": peer_access_of(parser, values),
            "allowed_endpoints": values["allow_endpoint"],
            "engine_keys": engine_keys_of(parser, values),
            "device_blocks_per_rank": values["device_blocks_per_rank"],
            "lower_tier_blocks_per_rank": values["lower_tier_blocks_per_rank"],
            "busy": busy_of(values),
            "overload_status": overload_status_of(values),
            "polls": polls_of(values),
            "access_logs": access_logs_of(parser, values),
            "prompts": prompt_settings_of(parser, values),
            "state": state_of(values),
            "warnings": warnings,
        },
        SelectorConfig,
    )
