"""The rows with which a door is told how prompts become blocks."""

import argparse
import sys
from pathlib import Path

import msgspec
import pytest

from lean_selector.outbound.client import OutboundClient
from lean_selector.process.host import StartError
from lean_selector.process.options import OneLineParser, add_options, resolve
from lean_selector.process.prompt_options import prompt_options, prompt_settings_of
from lean_selector.process.prompt_plane import prompts_of
from lean_selector.prompts.settings import Mode, PromptSettings
from lean_selector.sockets.resolver import Resolver
from tests.prompts.test_prompts import Workers

GATEWAY = (Mode.LEARN, *Mode)
SELECTOR = (None, Mode.TOKENIZE, Mode.LOCAL, Mode.OFF)


def settings_of(*args: str, of: tuple[Mode | None, ...] = GATEWAY) -> PromptSettings | None:
    parser = OneLineParser(prog="door")
    default, *modes = of
    rows = prompt_options(default, *(mode for mode in modes if mode is not None))
    add_options(parser, rows)
    given: argparse.Namespace = parser.parse_args(args)
    told = prompt_settings_of(parser, resolve(parser, rows, given, {}))
    return None if told is None else msgspec.convert(told, PromptSettings)


def test_each_door_has_its_default() -> None:
    learning = settings_of()
    assert learning is not None
    assert (learning.mode, learning.ask_from_bytes) == (Mode.LEARN, 16_384)
    assert learning.memory_bytes == 128 << 20
    assert settings_of(of=SELECTOR) is None
    tokenizing = settings_of("--prompts", "tokenize", of=SELECTOR)
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
        settings_of(*args, of=SELECTOR)
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
