"""What the gateway is told on its command line, where it is not taken as it stands."""

import argparse

import pytest

from lean_selector.process.gateway_config import GATEWAY_OPTIONS, gateway_config
from lean_selector.process.options import add_options


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
