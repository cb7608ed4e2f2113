"""The flags that say how prompts become blocks."""

import sys
from pathlib import Path

import pytest

from lean_selector.events.names import Resolver
from lean_selector.gateway.prompt_shapes import Mode, PromptSettings
from lean_selector.http.outbound import OutboundClient
from lean_selector.server.flags import OneLineParser, add_flags, load
from lean_selector.server.gateway_flags import GatewayConfig
from lean_selector.server.gateway_routes import prompts_of
from lean_selector.server.host import StartError
from lean_selector.server.selector_flags import SelectorConfig
from tests.gateway.test_prompts import Workers


def settings_of(*args: str, of: type[SelectorConfig] = GatewayConfig) -> PromptSettings | None:
    parser = OneLineParser(prog="lean-selector")
    add_flags(parser, of)
    workers = ("http://a",) if of is GatewayConfig else ()
    return load(parser, of, [*workers, *args], {}).prompts.settings


def test_each_door_has_its_default() -> None:
    learning = settings_of()
    assert learning is not None
    assert (learning.mode, learning.ask_from_bytes) == (Mode.LEARN, 16_384)
    assert learning.memory_bytes == 128 << 20
    assert settings_of(of=SelectorConfig) is None
    tokenizing = settings_of("--prompts", "tokenize", of=SelectorConfig)
    assert tokenizing is not None
    assert (tokenizing.mode, tokenizing.ask_from_bytes) == (Mode.TOKENIZE, 0)


def test_what_is_given_counts() -> None:
    told = settings_of(
        *("--prompts", "tokenize", "--prompts-memory-mb", "2", "--prompts-tokenize-from", "none"),
        *("--prompts-tokenize-timeout-secs", "0.5"),
    )
    assert told is not None
    assert (told.memory_bytes, told.ask_timeout_s) == (2 << 20, 0.5)
    assert told.ask_from_bytes > 1 << 30


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--prompts", "guess"), "--prompts: invalid value `guess`: expected one of tokenize"),
        (("--prompts", "learn"), "learning needs the engines' answers, which do not pass here"),
        (("--prompts", "local"), "--prompts local needs --prompts-tokenizer"),
        (("--prompts-memory-mb", "0"), "expected 1 to"),
        (("--prompts-tokenize-from", "-1"), "expected 0 to"),
        (("--prompts-tokenize-timeout-secs", "0"), "expected at least"),
    ],
)
def test_a_bad_setting_stops_the_start(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        settings_of(*args, of=SelectorConfig)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    settings = PromptSettings(mode=Mode.LOCAL, tokenizer=str(tmp_path))
    with pytest.raises(StartError, match=r"--prompts-tokenizer: .*tokenizer\.json"):
        prompts_of(settings, Workers({}), OutboundClient(Resolver().resolve))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    settings = PromptSettings(mode=Mode.LOCAL, tokenizer="/nowhere")
    with pytest.raises(StartError, match=r"lean-selector\[tokenizers\]"):
        prompts_of(settings, Workers({}), OutboundClient(Resolver().resolve))
