"""How the selector can be told to choose, to let requests wait, and to shed them.

Rows of the table of options, and what is made of them. Names, defaults and the environment follow
spec selection.md section 7.
"""

import argparse
from collections.abc import Mapping

from lean_selector.core.numbers import U64_MAX
from lean_selector.core.selection.settings import DISK_WEIGHT, HOST_WEIGHT
from lean_selector.core.settings import DEFAULT_BONUS_BLOCKS
from lean_selector.process.options import (
    Option,
    boolean,
    integer,
    number,
    or_none,
    status,
    unsupported,
    word,
)
from lean_selector.process.service_options import EXPIRY_OPTION, POSITIVE_SECONDS

ROUTER_OPTIONS = (
    Option(
        "--use-kv-events",
        boolean,
        True,
        "learn from the workers' KV events; off: no event endpoints needed, and overlap is 0, or"
        " what --router-ttl-secs believes",
        ("DYN_USE_KV_EVENTS", "DYN_ROUTER_USE_KV_EVENTS"),
        "BOOL",
    ),
    Option(
        "--router-ttl-secs",
        number(0.0),
        None,
        "with KV events off: believe what is booked to be cached for so long; 0: believe nothing;"
        " unset: 120 with --api 1.6, else nothing",
        ("DYN_ROUTER_TTL_SECS",),
    ),
    Option(
        "--router-predicted-ttl-secs",
        number(0.0),
        None,
        "with KV events on: the same beside them, for the moment until they tell",
        ("DYN_ROUTER_PREDICTED_TTL_SECS",),
    ),
    Option(
        "--router-approximate-cache-policy",
        word("ttl", "lru"),
        "ttl",
        "accepted for compatibility: lru is taken as ttl, and refused while KV events are on",
        ("DYN_ROUTER_APPROXIMATE_CACHE_POLICY",),
        "POLICY",
    ),
    Option(
        "--router-kv-overlap-score-credit",
        number(0.0),
        1.0,
        "blocks of prefill that a cached device block saves in the cost; above 1 with --api 1.6 "
        "alone",
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
        "--router-decode-active-request-weight",
        number(0.0),
        0.0,
        "blocks that each active request of a rank counts for in the cost, beside those it holds",
        ("DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",),
    ),
    Option(
        "--router-host-cache-hit-weight",
        number(0.0, 1.0),
        HOST_WEIGHT,
        "what a block cached on the host is worth, in device blocks",
        ("DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",),
    ),
    Option(
        "--router-disk-cache-hit-weight",
        number(0.0, 1.0),
        DISK_WEIGHT,
        "the same for a block on disk or beyond",
        ("DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",),
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
        "--queue-policy",
        word("fcfs", "lcfs", "wspt"),
        "fcfs",
        "who of those parked goes first: fcfs the first that came, lcfs the last, wspt the one with"
        " the least prefill left",
        ("DYN_ROUTER_QUEUE_POLICY",),
        "POLICY",
    ),
    Option(
        "--queue-max-wait-secs",
        POSITIVE_SECONDS,
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
        "--session-affinity-ttl-secs",
        number(1.0, 31_536_000.0),
        None,
        "keep the requests of a session on its rank, until so long after its last reservation has "
        "ended; unset: sessions count for nothing",
    ),
    Option(
        "--session-affinity",
        word("hard", "soft"),
        None,
        "hard: a session goes to its rank, however busy; soft: its rank is only favoured, and "
        "where it goes is its rank from then on (default hard)",
        metavar="MODE",
    ),
    Option(
        "--session-affinity-bonus-blocks",
        number(0.0),
        None,
        "how much dearer than another, in blocks of the cost, the rank of a soft session may be "
        f"(default {DEFAULT_BONUS_BLOCKS:g})",
    ),
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
        None,
        "HTTP status of a request that is shed because all workers are busy: 503, 429 or 529; "
        "unset: 503, and 429 with --api 1.6",
        ("DYN_HTTP_OVERLOAD_STATUS_CODE",),
        "STATUS",
    ),
)


# -- putting it together -----------------------------------------------------------------------


def router_of(
    parser: argparse.ArgumentParser, values: Mapping[str, object], args: argparse.Namespace
) -> tuple[dict[str, object], list[str]]:
    """What RouterSettings are made of, and what to warn of. `args` tell flags from environment."""
    warnings: list[str] = []
    scale, credit = values["router_prefill_load_scale"], values["router_kv_overlap_score_credit"]
    weight = values["router_kv_overlap_score_weight"]
    if weight is not None:
        warnings.append(
            "the overlap score weight is deprecated: set the prefill load scale "
            "and the overlap score credit instead"
        )
        # From the environment it gives way to a flag, from the command line to nothing (D15).
        by_flag = args.router_kv_overlap_score_weight is not None
        if by_flag or args.router_prefill_load_scale is None:
            scale = weight
        if weight == 0.0 and (by_flag or args.router_kv_overlap_score_credit is None):
            credit = 0.0
    warnings += _check_approximation(parser, values)
    refresh = values["router_overlap_refresh_after_secs"]
    assert isinstance(refresh, float)
    router = {
        "use_kv_events": values["use_kv_events"],
        "overlap_score_credit": credit,
        "overlap_score_credit_decay": values["router_kv_overlap_score_credit_decay"],
        "prefill_load_scale": scale,
        "ttl_s": values["router_ttl_secs"] or 0.0,
        "predicted_ttl_s": values["router_predicted_ttl_secs"] or 0.0,
        "active_request_weight": values["router_decode_active_request_weight"],
        "host_weight": values["router_host_cache_hit_weight"],
        "disk_weight": values["router_disk_cache_hit_weight"],
        "temperature": values["router_temperature"],
        "track_prefill_tokens": values["router_track_prefill_tokens"],
        "queue_threshold": values["queue_threshold"],
        "queue_policy": values["queue_policy"],
        "queue_max_wait_s": values["queue_max_wait_secs"],
        "overlap_refresh_after_s": refresh if refresh > 0.0 else None,
        "reservation_expiry_s": values["reservation_expiry_secs"],
    }
    return router, warnings


def _check_approximation(
    parser: argparse.ArgumentParser, values: Mapping[str, object]
) -> list[str]:
    """What to warn of; ends the start where the reference would."""
    lru = values["router_approximate_cache_policy"] == "lru"
    if values["use_kv_events"]:
        if lru:
            parser.error("the approximate cache policy lru requires KV events to be off")
        if values["router_ttl_secs"] is not None:
            return ["--router-ttl-secs has no effect while KV events are on"]
    elif values["router_predicted_ttl_secs"] is not None:
        parser.error("router_predicted_ttl_secs requires use_kv_events=true")
    return ["the approximate cache policy lru is not supported: ttl is used"] if lru else []


def sessions_of(
    parser: argparse.ArgumentParser, values: Mapping[str, object]
) -> dict[str, object] | None:
    """What SessionSettings are made of; None while they are off."""
    ttl_s, mode = values["session_affinity_ttl_secs"], values["session_affinity"]
    bonus = values["session_affinity_bonus_blocks"]
    if ttl_s is None and mode is not None:
        parser.error("--session-affinity requires --session-affinity-ttl-secs")
    if bonus is not None and mode != "soft":
        parser.error("--session-affinity-bonus-blocks requires --session-affinity soft")
    if ttl_s is None:
        return None
    return {
        "ttl_s": ttl_s,
        "is_soft": mode == "soft",
        "bonus_blocks": DEFAULT_BONUS_BLOCKS if bonus is None else bonus,
    }


def busy_of(values: Mapping[str, object]) -> dict[str, object]:
    """What the BusyThreshold of every model is made of."""
    return {
        "active_decode_blocks": values["active_decode_blocks_threshold"],
        "active_prefill_tokens": values["active_prefill_tokens_threshold"],
        "active_prefill_tokens_frac": values["active_prefill_tokens_threshold_frac"],
    }
