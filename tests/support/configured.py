"""Flags read as at the start of a service."""

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from lean_selector.app.flags import OneLineParser, add_flags, load

T = TypeVar("T")


def configured(config: type[T], words: Sequence[str], **environ: str) -> T:
    """Wrong ones end in SystemExit."""
    parser = OneLineParser(prog="it", allow_abbrev=False)
    add_flags(parser, config)
    return load(parser, config, words, environ)


def refusal(
    capsys: pytest.CaptureFixture[str], config: Any, words: Sequence[str], **environ: str
) -> str:
    """The one line with which a start ends."""
    with pytest.raises(SystemExit) as ended:
        configured(config, words, **environ)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("it: error: ")
    assert error.count("\n") == 1
    return error.removeprefix("it: error: ").removesuffix("\n")
