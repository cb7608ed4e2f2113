"""Flags and environment: names, precedence, ranges, and the one line that a bad value gets."""

import math
from typing import Any

import pytest

from lean_selector.app.flags import fields_of
from lean_selector.app.selector_flags import SelectorConfig
from lean_selector.core.selection.router_settings import RouterSettings
from tests.support.configured import configured as configured_as
from tests.support.configured import refusal


def configured(*flags: str, **environ: str) -> SelectorConfig:
    return configured_as(SelectorConfig, flags, **environ)


def seen(config: SelectorConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_nothing_said_means_the_documented_defaults() -> None:
    config = configured()
    assert config.settings == RouterSettings()
    listen = config.listen
    assert (listen.host, listen.port, listen.uds, listen.drain_s) == ("0.0.0.0", 8092, None, 5.0)
    assert (config.index.recover_from, config.replica.endpoint, config.warnings) == ([], None, [])


# Flags that set more, or something else, than the one field that declares them.
FLAGS = [
    ("--indexer-peers", "index.recover_from", "http://a:1/, http://b", ["http://a:1", "http://b"]),
    ("--replica-sync-port", "replica.endpoint", "9092", "tcp://*:9092"),
    ("--api", "settings.dialect.name", "1.6", "1.6"),
    ("--router-predicted-ttl-secs", "settings.predicted_ttl_s", "5", 5.0),
    ("--selection-cache-ttl-secs", "settings.selection_cache.ttl_s", "5", 5.0),
    ("--selection-cache-max-entries", "settings.selection_cache.max_entries", "0", 0),
    ("--selection-cache-max-bytes", "settings.selection_cache.max_bytes", "99", 99),
    ("--router-assume-kv-reuse", "settings.assume_kv_reuse", "off", False),
    ("--no-router-assume-kv-reuse", "settings.assume_kv_reuse", "true", False),
    ("--router-kv-overlap-score-weight", "settings.prefill_load_scale", "3", 3.0),
    ("--router-track-prefill-tokens", "settings.track_prefill_tokens", "No", False),
    ("--queue-threshold", "settings.queue_threshold", "inf", math.inf),
    ("--policy", "settings.policy", "latency", "latency"),
    ("--model-policy", "settings.model_policies", "a=b=latency", {"a=b": "latency"}),
    ("--queue-policy", "settings.queue_policy", "WSPT", "wspt"),
    ("--queue-fairness", "settings.queue_fairness", "on", "on"),
    ("--fairness-header", "queue.fairness_header", "x-team", "x-team"),
    ("--priority-header", "queue.priority_header", "x-urgency", "x-urgency"),
    ("--queue-weight", "settings.queue_weights", "a=b=2", {"a=b": 2.0}),
    ("--active-decode-blocks-threshold", "thresholds.active_decode_blocks", "0.85", 0.85),
    ("--overload-status", "overload_status", "529", 529),
    *(
        ("--router-overlap-refresh-after-secs", "settings.overlap_refresh_after_s", text, None)
        for text in ("0", "-1", "-0.5")
    ),
]
FLAG_OF = {each.flag.name: each.flag for each in fields_of(SelectorConfig)}


@pytest.mark.parametrize(("flag", "path", "text", "value"), FLAGS)
def test_a_flag_sets_what_it_names(flag: str, path: str, text: str, value: object) -> None:
    needed = ["--queue-threshold", "1"] if FLAG_OF[flag].needs else []
    if "--queue-fairness" in FLAG_OF[flag].needs:
        needed += ["--queue-fairness", "on"]
    assert seen(configured(flag, text, *needed), path) == value


def test_every_number_and_switch_of_the_settings_is_what_its_flag_says() -> None:
    """Settings are filled from the flags' fields by their names."""
    names = {*RouterSettings.__struct_fields__} - {"ttl_s"}  # which goes by events, and by dialect
    seen = 0
    for each in fields_of(SelectorConfig):
        if each.name in names and each.kind in (int, float, bool):
            text = str(not each.default) if each.kind is bool else "1" if each.default != 1 else "0"
            needed = ("--queue-threshold", "2") if each.flag.needs else ()
            config = configured(f"{each.flag.name}={text}", *needed)
            assert getattr(config.settings, each.name) == each.read(text), each.flag.name
            seen += 1
    assert seen > 8


def test_the_documented_variables_are_all_there() -> None:
    names = {name for each in FLAG_OF.values() for name in each.env}
    documented = {
        *("DYN_USE_KV_EVENTS", "DYN_ROUTER_USE_KV_EVENTS", "DYN_ROUTER_TEMPERATURE"),
        *("DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY"),
        *("DYN_ROUTER_PREFILL_LOAD_SCALE", "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT"),
        *("DYN_OVERLAP_SCORE_WEIGHT", "DYN_ROUTER_TRACK_PREFILL_TOKENS"),
        *("DYN_ROUTER_QUEUE_THRESHOLD", "DYN_ROUTER_POLICY_CONFIG"),
        *("DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS", "DYN_ROUTER_PREDICTED_TTL_SECS"),
        *("DYN_ROUTER_TRACK_ACTIVE_BLOCKS", "DYN_ROUTER_TRACK_OUTPUT_BLOCKS"),
        *("DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT", "DYN_ROUTER_QUEUE_POLICY"),
        *("DYN_ROUTER_HOST_CACHE_HIT_WEIGHT", "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT"),
        *("DYN_ROUTER_REPLICA_SYNC", "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS"),
        *("DYN_ROUTER_TTL_SECS", "DYN_ROUTER_APPROXIMATE_CACHE_POLICY"),
    }
    assert documented <= names


FIRST, SECOND = "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "DYN_OVERLAP_SCORE_WEIGHT"
SCALE, CREDIT = "DYN_ROUTER_PREFILL_LOAD_SCALE", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT"
NEW_FLAGS = ("--router-prefill-load-scale=5", "--router-kv-overlap-score-credit=0.5")


@pytest.mark.parametrize(
    ("environ", "flags", "terms"),
    [
        ({FIRST: "3"}, (), (3.0, 1.0)),
        ({SECOND: "3"}, (), (3.0, 1.0)),
        ({FIRST: "2", SECOND: "3"}, (), (2.0, 1.0)),  # the first that is set wins
        ({SECOND: "0"}, (), (0.0, 0.0)),  # 0 sets the credit to 0
        ({SECOND: "0", SCALE: "5", CREDIT: "0.5"}, (), (0.0, 0.0)),  # it wins over the new names
        ({SECOND: "0"}, NEW_FLAGS, (5.0, 0.5)),  # but not over their flags
        ({}, (*NEW_FLAGS, "--router-kv-overlap-score-weight=0"), (0.0, 0.0)),
    ],
)
def test_the_old_overlap_weight_sets_two_terms_and_warns(
    environ: dict[str, str], flags: tuple[str, ...], terms: tuple[float, float]
) -> None:
    config = configured(*flags, **environ)
    settings = config.settings
    assert (settings.prefill_load_scale, settings.overlap_score_credit) == terms
    (warning,) = config.warnings
    assert "deprecated" in warning


def test_what_is_believed_cached_depends_on_whether_there_are_events() -> None:
    off = {"DYN_USE_KV_EVENTS": "false"}
    config = configured(DYN_ROUTER_TTL_SECS="9", **off)
    assert (config.settings.routed_ttl_s, config.warnings) == (9.0, [])
    assert configured("--router-ttl-secs", "0", **off).settings.routed_ttl_s == 0.0
    assert configured(**off).settings.routed_ttl_s == 0.0
    assert configured("--router-ttl-secs", "9").settings.routed_ttl_s == 0.0
    assert configured(DYN_ROUTER_PREDICTED_TTL_SECS="5").settings.routed_ttl_s == 5.0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--router-ttl-secs", "9"), "--router-ttl-secs"),
        (("--indexer-peers", "http://a:1"), ""),
        (("--indexer-peers", "http://a:1", "--use-kv-events=off"), "--indexer-peers"),
        (("--router-approximate-cache-policy", "lru", "--use-kv-events=off"), "lru"),
    ],
)
def test_what_has_no_effect_is_said(flags: tuple[str, ...], said: str) -> None:
    warnings = configured(*flags).warnings
    assert len(warnings) == bool(said)
    assert all(said in warning for warning in warnings)


def test_what_the_reference_has_without_effect_is_taken() -> None:
    assert (
        configured(
            DYN_ROUTER_TRACK_ACTIVE_BLOCKS="false",
            DYN_ROUTER_TRACK_OUTPUT_BLOCKS="true",
            DYN_ROUTER_REPLICA_SYNC="1",
            DYN_UNKNOWN="x",
        )
        == configured("--threads", "0")
        == configured()
    )


# -- what is refused -------------------------------------------------------------------------------

# How numbers, words and lists are refused is in test_flags.py: here are readers of their own, and
# bounds that the reference has.
BAD = {
    "--host": [""],
    "--uds": [""],
    "--port": ["65536", "-1", "80.0", "1_0", "\u0661\u0662"],
    "--drain-secs": ["1_0", "\u0661"],
    "--indexer-peers": ["tcp://a:1", "a:1", "http://name:word@a:1"],
    "--replica-sync-port": ["0", "65536", "9_092"],
    "--replica-sync-peers": ["foo", "tcp://a:1,http://b:1"],
    "--lower-tier-blocks-per-rank": ["1e3"],
    "--router-tracking-hash": ["keyed-xxh3-v1"],
    "--router-kv-overlap-score-credit": ["1.1", "-0.1"],
    "--router-kv-overlap-score-weight": ["-1"],
    "--router-temperature": ["-1", "nan", ""],
    "--router-policy-config": ["/x.yaml"],
    "--active-decode-blocks-threshold": ["1.5", "nan"],
    "--active-prefill-tokens-threshold-frac": ["inf", "-0.1"],
    "--prompts-tokenize-from": ["1_0"],
    "--allow-endpoint": ["", " , "],
    "--lifecycle-allow": [""],
    "--model-policy": ["latency", "=latency", "a=fastest"],
    "--peer-tls-name": [""],
}


@pytest.mark.parametrize("flag", BAD)
def test_a_bad_value_is_refused_by_one_line_that_names_its_flag(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in BAD[flag]:
        line = refusal(capsys, SelectorConfig, [f"{flag}={text}"])
        assert line.startswith(flag)
        assert f"`{text}`" in line


def test_peers_are_kept_once_each() -> None:
    config = configured(
        "--replica-sync-port", "9092", "--replica-sync-peers", "tcp://a:1, tcp://b:1,tcp://a:1"
    )
    assert config.replica.peers == ["tcp://a:1", "tcp://b:1"]


def test_the_1_6_dialect_brings_its_own_defaults() -> None:
    assert configured().overload_status == 503
    assert configured("--api", "1.6").overload_status == 429
    assert configured("--api", "1.6", "--overload-status", "503").overload_status == 503
    above_one = configured("--api", "1.6", "--router-kv-overlap-score-credit", "2.5")
    assert above_one.settings.overlap_score_credit == 2.5
    assert configured().settings.ttl_s == 0.0
    assert configured("--api", "1.6").settings.ttl_s == 120.0
    assert (
        configured("--api", "1.6", "--use-kv-events=off", "--router-ttl-secs=0").settings.ttl_s == 0
    )
