"""What the selection service can be told, as a table of options, and the structs made of it.

Names, defaults and the environment follow spec selection.md section 7; shared rows serve the slot
tracker too.
"""

import argparse
from collections.abc import Mapping

import msgspec

from lean_selector.core.index.kv_index import DEFAULT_DEVICE_BLOCKS, DEFAULT_LOWER_TIER_BLOCKS
from lean_selector.core.load.busy import BusyThreshold
from lean_selector.core.selection.settings import RouterSettings
from lean_selector.core.u64 import U64_MAX
from lean_selector.process.options import (
    Option,
    boolean,
    endpoint,
    integer,
    number,
    or_none,
    path,
    peer_endpoints,
    resolve,
    status,
    text,
    unsupported,
    urls,
    word,
    zmq_port,
)


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a service is reached, and how it leaves."""

    host: str
    port: int
    uds: str | None
    drain_s: float
    max_connections: int
    log_level: str
    log_format: str
    access_log: bool


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a service speaks to its replicas."""

    bind: str  # ZMQ endpoint of the PUB
    advertise: str | None
    peers: list[str]
    catch_up: list[str]  # HTTP URLs


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


# -- the table ------------------------------------------------------------------------------------

_PORT = integer(0, 65535)
_POSITIVE_SECONDS = number(1e-3)

LISTEN_OPTIONS = (
    Option("--host", text, "0.0.0.0", "address to bind", metavar="ADDRESS"),
    Option("--uds", path, None, "listen on this UNIX socket too (mode 0660)", metavar="PATH"),
    Option("--drain-secs", number(0.0), 5.0, "how long a stop may take"),
    Option(
        "--max-connections",
        integer(1, 2**20),
        16_384,
        "most HTTP connections at a time; one more is answered 503 and closed",
    ),
    Option(
        "--log-level",
        word("debug", "info", "warning", "error"),
        "info",
        "least severe lines to log",
        metavar="LEVEL",
    ),
    Option(
        "--log-format",
        word("text", "json"),
        "text",
        "how a line is written to stderr",
        metavar="FORMAT",
    ),
    Option("--access-log", boolean, False, "log every request", metavar="BOOL"),
)

REPLICA_OPTIONS = (
    Option(
        "--replica-sync-port",
        zmq_port,
        None,
        "ZMQ PUB port for load events to other replicas, bound on every IPv4 interface",
    ),
    Option(
        "--replica-sync-bind",
        endpoint,
        None,
        "the same as a ZMQ endpoint, such as tcp://*:9092",
        metavar="ENDPOINT",
    ),
    Option(
        "--replica-sync-advertise",
        endpoint,
        None,
        "that endpoint as other replicas reach it; refused as a peer",
        metavar="ENDPOINT",
    ),
    Option(
        "--replica-sync-peers",
        peer_endpoints,
        [],
        "comma-separated ZMQ PUB endpoints of other replicas; may be repeated",
        metavar="ENDPOINTS",
        repeats=True,
    ),
    Option(
        "--replica-sync-catch-up",
        urls,
        [],
        "comma-separated HTTP URLs of other replicas: take over the live reservations of the first "
        "that answers, at start, and ask all of them when events were missed",
        metavar="URLS",
        repeats=True,
    ),
)

EXPIRY_OPTION = Option(
    "--reservation-expiry-secs",
    _POSITIVE_SECONDS,
    300.0,
    "drop a reservation this long after its last lifecycle call",
    ("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",),
)

ROUTER_OPTIONS = (
    Option(
        "--use-kv-events",
        boolean,
        True,
        "learn from the workers' KV events; off: no event endpoints needed, overlap always 0",
        ("DYN_USE_KV_EVENTS", "DYN_ROUTER_USE_KV_EVENTS"),
        "BOOL",
    ),
    Option(
        "--router-kv-overlap-score-credit",
        number(0.0, 1.0),
        1.0,
        "blocks of prefill that a cached device block saves in the cost",
        ("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",),
    ),
    Option(
        "--router-kv-overlap-score-credit-decay",
        number(0.0),
        0.0,
        "how fast that credit falls with a rank's waiting prefill",
        ("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",),
    ),
    Option(
        "--router-prefill-load-scale",
        number(0.0),
        1.0,
        "weight of prefill against decode in the cost",
        ("DYN_ROUTER_PREFILL_LOAD_SCALE",),
    ),
    Option(
        "--router-kv-overlap-score-weight",
        number(0.0),
        None,
        "deprecated: sets the prefill load scale, and at 0 the overlap credit to 0",
        (
            "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
            "DYN_OVERLAP_SCORE_WEIGHT",
            "DYN_KV_OVERLAP_SCORE_WEIGHT",
        ),
    ),
    Option(
        "--router-temperature",
        number(0.0),
        0.0,
        "0 takes the cheapest rank; above, ranks are drawn by cost",
        ("DYN_ROUTER_TEMPERATURE",),
    ),
    Option(
        "--router-track-prefill-tokens",
        boolean,
        True,
        "count the prefill tokens of what is placed",
        ("DYN_ROUTER_TRACK_PREFILL_TOKENS",),
        "BOOL",
    ),
    Option(
        "--queue-threshold",
        number(0.0, infinite=True),
        None,
        "park requests while every eligible rank has more prefill tokens than this many times "
        "its max_num_batched_tokens; unset: never",
        ("DYN_ROUTER_QUEUE_THRESHOLD",),
    ),
    Option(
        "--queue-max-wait-secs",
        _POSITIVE_SECONDS,
        None,
        "answer 503 to a request parked this long; unset: it waits",
    ),
    Option(
        "--router-overlap-refresh-after-secs",
        number(),
        10.0,
        "look up a parked request's overlap again after this wait; 0 or less: never",
        ("DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS",),
    ),
    EXPIRY_OPTION,
    Option(
        "--router-policy-config",
        unsupported,
        None,
        "not supported yet: stops the start",
        ("DYN_ROUTER_POLICY_CONFIG",),
        "PATH",
    ),
    *(
        Option(f"--router-{name}", read, None, "accepted, without effect", (env,), metavar)
        for name, read, env, metavar in (
            ("predicted-ttl-secs", number(0.0), "DYN_ROUTER_PREDICTED_TTL_SECS", "N"),
            ("track-active-blocks", boolean, "DYN_ROUTER_TRACK_ACTIVE_BLOCKS", "BOOL"),
            ("track-output-blocks", boolean, "DYN_ROUTER_TRACK_OUTPUT_BLOCKS", "BOOL"),
            ("replica-sync", boolean, "DYN_ROUTER_REPLICA_SYNC", "BOOL"),
        )
    ),
)

BUSY_OPTIONS = (
    Option(
        "--active-decode-blocks-threshold",
        or_none(number(0.0, 1.0)),
        None,
        "a rank is busy above this part of its total_kv_blocks; unset: never",
        ("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",),
    ),
    Option(
        "--active-prefill-tokens-threshold",
        or_none(integer(0, U64_MAX)),
        None,
        "a rank is busy above this many active prefill tokens; unset: never",
        ("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",),
    ),
    Option(
        "--active-prefill-tokens-threshold-frac",
        or_none(number(0.0)),
        None,
        "a rank is busy above this many times its max_num_batched_tokens; unset: never",
        ("DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",),
    ),
    Option(
        "--overload-status",
        status(503, 429, 529),
        503,
        "HTTP status of a request that is shed because all workers are busy: 503, 429 or 529",
        ("DYN_HTTP_OVERLOAD_STATUS_CODE",),
        "STATUS",
    ),
)

SELECTOR_OPTIONS = (
    Option("--port", _PORT, 8092, "HTTP port; 0 takes a free one"),
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
        _POSITIVE_SECONDS,
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


# -- putting it together -----------------------------------------------------------------------


def selector_config(
    parser: argparse.ArgumentParser, args: argparse.Namespace, environ: Mapping[str, str]
) -> SelectorConfig:
    """The configuration of `lean-selector`."""
    values = resolve(parser, SELECTOR_OPTIONS, args, environ)
    warnings: list[str] = []
    weight = values.pop("router_kv_overlap_score_weight")
    if weight is not None:
        warnings.append(
            "the overlap score weight is deprecated: set the prefill load scale "
            "and the overlap score credit instead"
        )
        # From the environment it gives way to a flag, from the command line to nothing (D15).
        by_flag = args.router_kv_overlap_score_weight is not None
        if by_flag or args.router_prefill_load_scale is None:
            values["router_prefill_load_scale"] = weight
        if weight == 0.0 and (by_flag or args.router_kv_overlap_score_credit is None):
            values["router_kv_overlap_score_credit"] = 0.0
    if values["indexer_peers"] and not values["use_kv_events"]:
        warnings.append("--indexer-peers has no effect while KV events are off: there is no index")
    refresh = values["router_overlap_refresh_after_secs"]
    assert isinstance(refresh, float)
    router = {
        "use_kv_events": values["use_kv_events"],
        "overlap_score_credit": values["router_kv_overlap_score_credit"],
        "overlap_score_credit_decay": values["router_kv_overlap_score_credit_decay"],
        "prefill_load_scale": values["router_prefill_load_scale"],
        "temperature": values["router_temperature"],
        "track_prefill_tokens": values["router_track_prefill_tokens"],
        "queue_threshold": values["queue_threshold"],
        "queue_max_wait_s": values["queue_max_wait_secs"],
        "overlap_refresh_after_s": refresh if refresh > 0.0 else None,
        "reservation_expiry_s": values["reservation_expiry_secs"],
    }
    return msgspec.convert(
        {
            "listen": listen_of(values),
            "router": router,
            "indexer_peers": values["indexer_peers"],
            "recovery_timeout_s": values["recovery_timeout_secs"],
            "replica": replica_of(parser, values),
            "device_blocks_per_rank": values["device_blocks_per_rank"],
            "lower_tier_blocks_per_rank": values["lower_tier_blocks_per_rank"],
            "busy": {
                "active_decode_blocks": values["active_decode_blocks_threshold"],
                "active_prefill_tokens": values["active_prefill_tokens_threshold"],
                "active_prefill_tokens_frac": values["active_prefill_tokens_threshold_frac"],
            },
            "overload_status": values["overload_status"],
            "warnings": warnings,
        },
        SelectorConfig,
    )


def replica_of(
    parser: argparse.ArgumentParser, values: Mapping[str, object]
) -> dict[str, object] | None:
    """Both families of replica flags as one; None while replica sync is off."""
    port, bind = values["replica_sync_port"], values["replica_sync_bind"]
    advertise, peers = values["replica_sync_advertise"], values["replica_sync_peers"]
    assert isinstance(peers, list)
    if port is not None and bind is not None:
        parser.error("--replica-sync-port and --replica-sync-bind mean one socket: give only one")
    if port is None and bind is None:
        if values["replica_sync_catch_up"]:
            parser.error("--replica-sync-catch-up requires --replica-sync-port")
        if advertise is not None or peers:
            parser.error(
                "--replica-sync-advertise and --replica-sync-peers require --replica-sync-bind "
                "or --replica-sync-port"
            )
        return None
    if advertise in peers:
        parser.error(
            f"--replica-sync-peers: `{advertise}` is this replica's own --replica-sync-advertise"
        )
    return {
        "bind": bind if port is None else f"tcp://*:{port}",
        "advertise": advertise,
        "peers": peers,
        "catch_up": values["replica_sync_catch_up"],
    }


def listen_of(values: Mapping[str, object]) -> dict[str, object]:
    return {
        "host": values["host"],
        "port": values["port"],
        "uds": values["uds"],
        "drain_s": values["drain_secs"],
        "max_connections": values["max_connections"],
        "log_level": values["log_level"],
        "log_format": values["log_format"],
        "access_log": values["access_log"],
    }
