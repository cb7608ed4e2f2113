"""Which generation of clients the selector speaks with, and what came with the newer one.

Rows of the table of options, and what is made of them. Names and defaults of selection_16.md 10.
"""

import argparse
from collections.abc import Mapping

from lean_selector.core.numbers import U64_MAX
from lean_selector.core.selection.settings import SelectionCacheSettings
from lean_selector.core.settings import API_1_3, API_1_6, DIALECTS
from lean_selector.process.options import Option, boolean, integer, number, word

_CACHE = SelectionCacheSettings()
TTL_S = 120.0  # of what is believed cached without KV events, where nothing is said


def _public_only(text: str) -> str:
    if text != "public-xxh3-v1":
        raise ValueError("only public-xxh3-v1 is supported: sequence hashes have no key here")
    return text


DIALECT_OPTIONS = (
    Option(
        "--api",
        word(*DIALECTS),
        API_1_3.name,
        "whose HTTP is spoken: 1.3 is the source document's, 1.6 that of Dynamo 1.6",
        metavar="VERSION",
    ),
    Option(
        "--selection-cache-ttl-secs",
        number(0.0, 1e9),
        _CACHE.ttl_s,
        "how long what /select chose under a selection_id can be booked by that id alone",
    ),
    Option(
        "--selection-cache-max-entries",
        integer(0, U64_MAX),
        _CACHE.max_entries,
        "most selections kept for that; the oldest go first; 0: none",
    ),
    Option(
        "--selection-cache-max-bytes",
        integer(0, U64_MAX),
        _CACHE.max_bytes,
        "most bytes of hashes and names that they may have together; 0: none",
    ),
    Option(
        "--router-decode-busy-threshold",
        number(0.0),
        None,
        "answers say decode_busy above this part of a worker's total_kv_blocks (1.6); unset: "
        "nothing",
        ("DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD",),
    ),
    Option(
        "--router-prefill-busy-threshold",
        number(0.0),
        None,
        "advisory selects say prefill_busy above this part of a worker's max_num_batched_tokens; "
        "unset: nothing",
        ("DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD",),
    ),
    Option(
        "--router-assume-kv-reuse",
        boolean,
        True,
        "off: every block of a prompt counts as another than those that are active (1.6)",
        ("DYN_ROUTER_ASSUME_KV_REUSE",),
        "BOOL",
    ),
    Option(
        "--no-router-assume-kv-reuse",
        boolean,
        False,
        "the same as --router-assume-kv-reuse false",
        metavar="BOOL",
    ),
    Option(
        "--router-tracking-hash",
        _public_only,
        None,
        "only public-xxh3-v1; anything else stops the start",
        ("DYN_ROUTER_TRACKING_HASH",),
        "NAME",
    ),
)


def check_dialect(
    parser: argparse.ArgumentParser, values: Mapping[str, object], args: argparse.Namespace
) -> None:
    """Ends the start for what does not go together."""
    credit = values["router_kv_overlap_score_credit"]
    assert isinstance(credit, float)
    if credit > 1.0 and values["api"] == API_1_3.name:
        parser.error(
            "--router-kv-overlap-score-credit, DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT: invalid value "
            f"`{credit:g}`: expected 0 to 1, or --api 1.6"
        )
    if values["no_router_assume_kv_reuse"] and args.router_assume_kv_reuse is not None:
        parser.error("--router-assume-kv-reuse and --no-router-assume-kv-reuse exclude each other")


def overload_status_of(values: Mapping[str, object]) -> int:
    """The HTTP status of what is shed."""
    given = values["overload_status"]
    if isinstance(given, int):
        return given
    return 429 if values["api"] == API_1_6.name else 503


def dialect_of(values: Mapping[str, object]) -> dict[str, object]:
    """What these add to that which RouterSettings are made of."""
    dialect = DIALECTS[str(values["api"])]
    more: dict[str, object] = {}
    if dialect == API_1_6 and values["router_ttl_secs"] is None:
        more["ttl_s"] = TTL_S
    return {
        **more,
        "dialect": dialect,
        "selection_cache": {
            "ttl_s": values["selection_cache_ttl_secs"],
            "max_entries": values["selection_cache_max_entries"],
            "max_bytes": values["selection_cache_max_bytes"],
        },
        "decode_busy_threshold": values["router_decode_busy_threshold"],
        "prefill_busy_threshold": values["router_prefill_busy_threshold"],
        "assume_kv_reuse": values["router_assume_kv_reuse"]
        and not values["no_router_assume_kv_reuse"],
    }
