"""What the gateway is told on its command line, where it is not taken as it stands."""

import pytest

from lean_selector.server.flags import OneLineParser, add_flags, load
from lean_selector.server.gateway_flags import GatewayConfig


def configured(words: str) -> GatewayConfig:
    parser = OneLineParser(prog="lean-selector gateway", allow_abbrev=False)
    add_flags(parser, GatewayConfig)
    return load(parser, GatewayConfig, words.split(), {})


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
    config = configured(words)
    assert config.gateway.workers == workers
    assert config.selector.discover.targets == [f"url:{each}" for each in workers]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"http://a:8000/{rest}", f"`http://a:8000/{rest}`: expected http://HOST:PORT")
        for rest in ("llama", "llama/v1", "v2", "v1/models", "?x", "v1?x=1", "#x")
    ]
    + [
        ("http://a?x", "`http://a?x`: expected http://HOST:PORT"),
    ],
)
def test_a_path_that_would_be_left_out_ends_the_start(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        configured(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("http://a --session-affinity-ttl-secs 60", "--session-affinity-ttl-secs"),
        ("http://a --prompts-tokenizer /x", "--prompts local"),
        ("http://a --worker-health-interval-secs none --worker-health-path /x", "-interval-secs"),
    ],
)
def test_a_flag_that_would_be_ignored_ends_the_start(
    words: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        configured(words)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def test_the_selector_in_it_is_told_what_the_gateway_is_but_has_a_port_of_its_own() -> None:
    config = configured("http://a --reservation-expiry-secs 90 --port 1 --uds /x --selector-port 2")
    selector = config.selector
    assert (config.listen.port, config.listen.uds, config.touch_after_s) == (1, "/x", 30.0)
    assert (selector.listen.port, selector.listen.uds) == (2, None)
    assert selector.settings.reservation_expiry_s == 90.0
    assert (selector.prompts.settings, selector.settings.needs_kv_events) == (None, False)
    assert configured("http://a").selector.discover.defaults == '{"block_size": 16}'
    own = configured("http://a --discover-defaults {}").selector.discover
    assert own.defaults == "{}"
