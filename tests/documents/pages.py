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


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Fenced blocks with a language, in order, as (language, content)."""
    for found in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.M | re.S):
        yield found[1], found[2]


PYTHON = [text for page in OURS.values() for kind, text in blocks(page) if kind == "python"]


def python_example(words: str) -> str:
    """The one printed Python example that has these words."""
    [found] = {text for text in PYTHON if words in text}
    return found


def commands(script: str) -> Iterator[list[str]]:
    """The commands of a shell block, a list of words each, `&&` between two or not."""
    script = script.replace("\\\n", " ")
    for line in script.split("\n") if "'" not in script else [script]:
        yield from _commands_of(line)


def _commands_of(text: str) -> Iterator[list[str]]:
    command: list[str] = []
    # In a block with quotes a command may go over several lines: it ends where another begins.
    for word in [*shlex.split(text.replace("\n", " \n "), comments=True), "&&"]:
        if word == "&&" or (word == "curl" and command):
            if command:
                yield command
            command = []
        if word != "&&":
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
