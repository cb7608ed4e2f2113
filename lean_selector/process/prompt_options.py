"""How prompts become blocks: rows of the tables of the doors that take raw requests."""

import argparse
from collections.abc import Callable, Mapping
from typing import Final

from lean_selector.process.options import Option, integer, path, word
from lean_selector.process.service_options import POSITIVE_SECONDS
from lean_selector.prompts.settings import Mode, PromptSettings

_DEFAULTS: Final = PromptSettings(mode=Mode.OFF)
# Of an unknown prompt that was not seen before: some 4 000 tokens, which take an engine longer to
# compute than to tokenize.
ASK_WHEN_LEARNING_BYTES: Final = 16_384
_NEVER: Final = 1 << 40
_MEGABYTE: Final = 1 << 20


def prompt_options(default: Mode | None, *modes: Mode) -> tuple[Option, ...]:
    """The rows of a door that knows these modes."""
    return (
        Option(
            "--prompts",
            _mode(modes),
            None if default is None else default.value,
            "where the tokens of raw prompts come from: " + ", ".join(modes),
            metavar="MODE",
        ),
        Option(
            "--prompts-tokenizer",
            path,
            None,
            "folder with tokenizer.json and the chat template, for --prompts local",
            metavar="PATH",
        ),
        Option(
            "--prompts-memory-mb",
            integer(1, 1 << 20),  # a terabyte
            _DEFAULTS.memory_bytes // _MEGABYTE,
            "most memory for prompts that were seen before",
        ),
        Option(
            "--prompts-tokenize-from",
            _bytes_or_never,
            None,
            "ask for tokens when so many bytes of a prompt, or more, were not seen before; `none`:"
            " never; unset: 0, or 16384 with --prompts learn",
            metavar="BYTES",
        ),
        Option(
            "--prompts-tokenize-timeout-secs",
            POSITIVE_SECONDS,
            _DEFAULTS.ask_timeout_s,
            "longest that an engine may take to answer; then what is known decides",
        ),
    )


def prompt_settings_of(
    parser: argparse.ArgumentParser, values: Mapping[str, object]
) -> dict[str, object] | None:
    """What PromptSettings are made of; None where the door has no prompts."""
    mode = values["prompts"]
    if mode is None:
        return None
    if mode == Mode.LOCAL and values["prompts_tokenizer"] is None:
        parser.error("--prompts local needs --prompts-tokenizer: a folder with tokenizer.json")
    megabytes = values["prompts_memory_mb"]
    assert isinstance(megabytes, int)
    above = values["prompts_tokenize_from"]
    if above is None:
        above = ASK_WHEN_LEARNING_BYTES if mode == Mode.LEARN else 0
    return {
        "mode": mode,
        "tokenizer": values["prompts_tokenizer"],
        "memory_bytes": megabytes * _MEGABYTE,
        "ask_from_bytes": above,
        "ask_timeout_s": values["prompts_tokenize_timeout_secs"],
    }


def _mode(modes: tuple[Mode, ...]) -> Callable[[str], str]:
    read_one = word(*modes)

    def read(text: str) -> str:
        if text.lower() == Mode.LEARN and Mode.LEARN not in modes:
            raise ValueError(
                "learning needs the engines' answers, which do not pass here; expected one of "
                + ", ".join(modes)
            )
        return read_one(text)

    return read


def _bytes_or_never(text: str) -> int:
    return _NEVER if text.lower() == "none" else integer(0, _NEVER)(text)
