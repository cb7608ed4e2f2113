"""How the selector can be told to choose, to let requests wait, and to shed them.

Rows of the table of options, and what is made of them. Names, defaults and the environment follow
spec selection.md section 7.
"""

import argparse
from collections.abc import Mapping

from lean_selector.core.limits import U64_MAX
from lean_selector.process.options import (
    Option,
    boolean,
    integer,
    number,
    or_none,
    status,
    unsupported,
)
from lean_selector.process.service_options import EXPIRY_OPTION, POSITIVE_SECONDS

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


# -- putting it together -----------------------------------------------------------------------


def router_of(
    values: Mapping[str, object], args: argparse.Namespace
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
    refresh = values["router_overlap_refresh_after_secs"]
    assert isinstance(refresh, float)
    router = {
        "use_kv_events": values["use_kv_events"],
        "overlap_score_credit": credit,
        "overlap_score_credit_decay": values["router_kv_overlap_score_credit_decay"],
        "prefill_load_scale": scale,
        "temperature": values["router_temperature"],
        "track_prefill_tokens": values["router_track_prefill_tokens"],
        "queue_threshold": values["queue_threshold"],
        "queue_max_wait_s": values["queue_max_wait_secs"],
        "overlap_refresh_after_s": refresh if refresh > 0.0 else None,
        "reservation_expiry_s": values["reservation_expiry_secs"],
    }
    return router, warnings


def busy_of(values: Mapping[str, object]) -> dict[str, object]:
    """What the BusyThreshold of every model is made of."""
    return {
        "active_decode_blocks": values["active_decode_blocks_threshold"],
        "active_prefill_tokens": values["active_prefill_tokens_threshold"],
        "active_prefill_tokens_frac": values["active_prefill_tokens_threshold_frac"],
    }
