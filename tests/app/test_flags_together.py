"""Flags that need or exclude each other, and values that mean more than they say."""

import re
import sys
from pathlib import Path

import pytest

from lean_selector.app.flags import DROPPED, Config, fields_of
from lean_selector.app.gateway_flags import GatewayConfig
from lean_selector.app.gateway_routes import prompts_of
from lean_selector.app.host import StartError
from lean_selector.app.picker_flags import SelectorServiceConfig
from lean_selector.app.selector_flags import SelectorConfig
from lean_selector.app.service_flags import TrackerConfig
from lean_selector.gateway.prompt_shapes import Mode, PromptSettings
from lean_selector.http.outbound import OutboundClient
from lean_selector.links.names import Resolver
from tests.gateway.test_prompts import fleet_of
from tests.support.configured import configured, refusal


def gateway(words: str) -> GatewayConfig:
    return configured(GatewayConfig, words.split())


def selector(words: str) -> SelectorConfig:
    return configured(SelectorConfig, words.split())


@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("of", [SelectorConfig, GatewayConfig, TrackerConfig])
def test_a_removed_flag_is_refused_with_what_holds_instead(
    name: str, of: type[Config], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"{name.removeprefix('--')} = 1\n")
    for argv in ([name, "1"], [f"{name}=1"], ["--port", "1", "--config", str(file)]):
        said = refusal(capsys, of, argv)
        assert name.removeprefix("--") in said
        assert said.endswith(f"removed: {DROPPED[name]}")


def test_no_removed_flag_is_left_and_what_is_named_instead_exists() -> None:
    flags = {each.flag.name for each in fields_of(GatewayConfig)}
    named = {word for said in DROPPED.values() for word in re.findall(r"--[a-z-]+", said)}
    assert not flags & DROPPED.keys()
    assert named <= flags


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--prompts guess", "--prompts: invalid value `guess`: expected one of tokenize"),
        ("--prompts learn", "--prompts: invalid value `learn`: learn needs the engines'"),
        ("--prompts local", "--prompts local requires --prompts-tokenizer"),
        ("--lifecycle-from tcp:127.0.0.1:1", "--lifecycle-from: invalid value"),
        (
            "--lifecycle-from syslog:127.0.0.1:1 --lifecycle-allow 10.0.0.1/8",
            "--lifecycle-allow: invalid value `10.0.0.1/8`",
        ),
        (
            "--replica-sync-port 9092 --replica-sync-peers tcp://a:1,foo",
            "--replica-sync-peers: invalid value `tcp://a:1,foo`: invalid ZMQ endpoint `foo`",
        ),
        ('--discover-defaults {"worker_id":1}', "worker_id differs between workers"),
        ("--discover etcd:a", "expected file:PATH"),
        ("--replica-sync-port 1 --replica-sync-discover file:a", "peers are found by"),
        ("--replica-sync-bind nonsense", "missing scheme"),
        ("--replica-sync-port 9 --replica-sync-bind tcp://*:9", "give only one"),
        (
            "--replica-sync-bind tcp://*:9 --replica-sync-advertise tcp://a:1"
            " --replica-sync-peers tcp://b:1,tcp://a:1",
            "`tcp://a:1` is this replica's own",
        ),
        (
            "--allow-endpoint 127.0.0.0/8 --replica-sync-port 9092"
            " --replica-sync-peers tcp://127.0.0.1:9,tcp://198.51.100.1:5557",
            "--replica-sync-peers: `tcp://198.51.100.1:5557` is not allowed by --allow-endpoint",
        ),
        ("--allow-endpoint tcp://198.51.100.0/24:1", "a scheme has no meaning here"),
        ("--no-router-assume-kv-reuse --router-assume-kv-reuse on", "exclude each other"),
        ("--router-predicted-ttl-secs 5 --use-kv-events off", "use_kv_events=true"),
        ("--router-approximate-cache-policy lru", "lru"),
        ("--queue-threshold 1 --trust-priority --auth-token-file /x", "max-priority=high"),
    ],
)
def test_what_cannot_go_together_ends_the_start(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, SelectorServiceConfig, words.split())


def test_what_a_flag_needs_is_a_flag() -> None:
    """That it is refused without it: test_flags.py."""
    flags = {each.flag.name: each.flag for each in fields_of(GatewayConfig)}
    flags |= {each.flag.name: each.flag for each in fields_of(SelectorConfig)}
    needs = {need for flag in flags.values() for need in flag.needs}
    assert len(needs) > 10
    assert sorted(needs - flags.keys()) == []


# -- the gateway's workers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "workers"),
    [
        ("http://a:8000/v1 http://b:8000/v1/", ["http://a:8000", "http://b:8000"]),
        ("http://A:8000 http://a:8000/v1 http://a:8000/", ["http://a:8000"]),
        ("https://a", ["https://a:443"]),
    ],
)
def test_a_worker_s_url_may_be_the_one_that_openai_s_clients_have(
    words: str, workers: list[str]
) -> None:
    config = gateway(words)
    assert config.gateway.workers == workers
    assert config.selector.discover.targets == [f"url:{each}" for each in workers]


@pytest.mark.parametrize(
    "rest", ["?x", "/llama", "/llama/v1", "/v2", "/v1/models", "/?x", "/v1?x=1", "/#x"]
)
def test_a_path_that_would_be_left_out_ends_the_start(
    rest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, GatewayConfig, [f"http://a{rest}"])
    assert f"`http://a{rest}`: expected http://HOST:PORT" in line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--prompts-tokenizer /x", "--prompts local"),
        ("--allow-endpoint b", "`http://a:80` is not allowed by --allow-endpoint"),
        ("--worker-health-interval-secs none --worker-health-path /x", "-interval-secs"),
    ],
)
def test_a_flag_that_the_gateway_would_ignore_ends_the_start(
    words: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refusal(capsys, GatewayConfig, ["http://a", *words.split()])


def test_the_selector_in_it_is_told_what_the_gateway_is_but_has_a_port_of_its_own() -> None:
    config = gateway("http://a --reservation-expiry-secs 90 --port 1 --uds /x --selector-port 2")
    inner = config.selector
    assert (config.listen.port, config.listen.uds, config.reservations.touch_after_s) == (
        1,
        "/x",
        30.0,
    )
    assert (inner.listen.port, inner.listen.uds) == (2, None)
    assert inner.settings.reservation_expiry_s == 90.0
    assert (inner.prompts.settings, inner.settings.needs_kv_events) == (None, False)
    for words, ttl_s in (
        ("", 10.0),
        (" --use-kv-events off", 0.0),
        (" --router-predicted-ttl-secs 0", 0.0),
    ):
        assert gateway(f"http://a{words}").selector.settings.predicted_ttl_s == ttl_s
    for words, policy in (("", "latency"), (" --policy dynamo", "dynamo")):
        assert gateway(f"http://a{words}").selector.settings.policy == policy
    assert gateway("http://a").selector.discover.defaults == '{"block_size": 16}'
    assert gateway("a:1/v1").selector.discover.targets == ["url:http://a:1"]
    for words in ("http://a", "--discover file:/w"):
        given = gateway(f'{words} --discover-defaults {{"events_port":5557}}')
        assert given.selector.discover.defaults == '{"block_size": 16, "events_port": 5557}'


# -- how prompts become blocks ---------------------------------------------------------------------


def settings_of(config: SelectorConfig) -> PromptSettings:
    settings = config.prompts.settings
    assert settings is not None
    return settings


def test_each_way_in_has_its_default() -> None:
    learning = settings_of(gateway("http://a"))
    assert (learning.mode, learning.ask_from_bytes) == (Mode.LEARN, 16_384)
    assert selector("").prompts.settings is None
    tokenizing = settings_of(selector("--prompts tokenize"))
    assert (tokenizing.mode, tokenizing.ask_from_bytes) == (Mode.TOKENIZE, 0)
    given = settings_of(gateway("http://a --prompts tokenize --prompts-tokenize-from none"))
    assert given.ask_from_bytes > 1 << 30


def started_with(tokenizer: str) -> object:
    settings = PromptSettings(mode=Mode.LOCAL, tokenizer=tokenizer)
    return prompts_of(settings, fleet_of({}), OutboundClient(Resolver().resolve))


def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--prompts-tokenizer: .*tokenizer\.json"):
        started_with(str(tmp_path))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(StartError, match=r"lean-selector\[tokenizers\]"):
        started_with("/nowhere")
