"""The documents, their fenced blocks, and the requests that their examples send."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    )
}
# What was found by probing another program: it holds no example of ours, and that one's flags.
OURS = {name: text for name, text in PAGES.items() if not name.startswith("docs/spec/")}


class Request(NamedTuple):
    """One curl command."""

    method: str
    port: int  # as printed: 8092 is the selector's, 8091 the slot tracker's
    path: str
    body: bytes | None
    headers: dict[str, str]


def blocks(text: str, *, unnamed: bool = False) -> Iterator[tuple[str, str]]:
    """Fenced blocks, in order, as (language, content): those with a language, or all."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if found[1] or unnamed:
            yield found[1], found[2]


PYTHON = [text for page in OURS.values() for kind, text in blocks(page) if kind == "python"]


def python_example(words: str) -> str:
    """The one printed Python example that has these words."""
    [found] = {text for text in PYTHON if words in text}
    return found


def commands(script: str) -> Iterator[list[str]]:
    """The commands of a shell block as a shell splits them, a list of words each. What stands in
    quotes may go over several lines; a line goes on after a backslash."""
    lexer = shlex.shlex(script.replace("\\\n", " "), posix=True, punctuation_chars="\n;&|")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    command: list[str] = []
    is_comment = False
    for word in [*lexer, "\n"]:
        if set(word) <= set("\n;&|"):
            if command:
                yield command
            command, is_comment = [], is_comment and "\n" not in word
        elif word == "#" or is_comment:
            is_comment = True
        else:
            command.append(word)


def request_of(command: list[str]) -> Request:
    """What a curl command sends."""
    method, port, path, body = "GET", 0, "", None
    headers: dict[str, str] = {}
    rest = iter(command[1:])
    for word in rest:
        if word == "-X":
            method = next(rest)
        elif word == "-H":
            name, _, value = next(rest).partition(":")
            headers[name] = value.strip()
        elif word == "-d":
            body = next(rest).encode()
        else:
            found = re.fullmatch(r"localhost:(809[12])(/.*)", word)
            assert found is not None, f"curl what? {word}"
            port, path = int(found[1]), found[2]
    return Request(method, port, path, body, headers)
