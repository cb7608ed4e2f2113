"""What the gateway is told on its command line, where it is not taken as it stands."""

import argparse

import pytest

from lean_selector.process.gateway_config import GATEWAY_OPTIONS, gateway_config
from lean_selector.process.options import add_options


@pytest.mark.parametrize(
    ("words", "touch_after_s"),
    [
        ("http://a --reservation-expiry-secs 90", 30.0),
        ("--selector http://s --reservation-expiry-secs 90", 10.0),
        ("--selector http://s --reservation-expiry-secs 6", 2.0),
    ],
)
def test_reservations_are_touched_often_enough_for_a_selector_whose_expiry_is_not_known(
    words: str, touch_after_s: float
) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, GATEWAY_OPTIONS)
    parser.add_argument("workers", nargs="*")
    config = gateway_config(parser, parser.parse_args(words.split()), {})
    assert config.touch_after_s == touch_after_s


@pytest.mark.parametrize(
    ("words", "port"),
    [
        ("http://a", 8092),
        ("--selector http://127.0.0.1:8092", 8094),
        ("--selector unix:/run/selector.sock http://a", 8094),
        ("--selector http://s --selector-port 8092", 8092),
        ("http://a --selector-port 0", 0),
    ],
)
def test_metrics_beside_a_selector_are_not_on_the_port_that_it_has_itself(
    words: str, port: int
) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, GATEWAY_OPTIONS)
    parser.add_argument("workers", nargs="*")
    config = gateway_config(parser, parser.parse_args(words.split()), {})
    assert config.selector.listen.port == port


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
    parser = argparse.ArgumentParser()
    add_options(parser, GATEWAY_OPTIONS)
    parser.add_argument("workers", nargs="*")
    config = gateway_config(parser, parser.parse_args(words.split()), {})
    assert config.workers == workers
    assert config.selector.discover is not None
    assert config.selector.discover.targets == [f"url:{each}" for each in workers]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"http://a:8000/{rest}", f"`http://a:8000/{rest}`: expected http://HOST:PORT")
        for rest in ("llama", "llama/v1", "v2", "v1/models", "?x", "v1?x=1", "#x")
    ]
    + [
        ("http://a?x", "`http://a?x`: expected http://HOST:PORT"),
        ("--selector http://s/x", "--selector: invalid value `http://s/x`: expected http://HOST"),
        ("--selector http://s?x", "--selector: invalid value `http://s?x`: expected http://HOST"),
    ],
)
def test_a_path_that_would_be_left_out_ends_the_start(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, GATEWAY_OPTIONS)
    parser.add_argument("workers", nargs="*")
    with pytest.raises(SystemExit):
        gateway_config(parser, parser.parse_args(words.split()), {})
    assert said in capsys.readouterr().err


def test_the_state_of_a_selector_that_runs_beside_is_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, GATEWAY_OPTIONS)
    parser.add_argument("workers", nargs="*")
    args = parser.parse_args(["--selector", "http://s", "--state-dir", "here"])
    with pytest.raises(SystemExit):
        gateway_config(parser, args, {})
    assert "--state-dir is the selector's" in capsys.readouterr().err
