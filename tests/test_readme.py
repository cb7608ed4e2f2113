"""The README tells the truth: examples are run, flags and routes are those of the program."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lean_selector.config import SELECTOR_OPTIONS
from tests.running_service import RunningService

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
API = TEXT.split("## The API by example")[1].split("\n## ")[0]


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Fenced blocks with a language, in order."""
    for found in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.M | re.S):
        yield found[1], found[2]


def requests_of(script: str) -> Iterator[tuple[str, str, bytes | None, dict[str, str]]]:
    """The curl commands of a shell block as (method, path, body, headers)."""
    words = shlex.split(script.replace("\n", " \n "), comments=True)
    commands: list[list[str]] = []
    for word in words:
        if word == "curl":
            commands.append([])
        elif commands:
            commands[-1].append(word)
    for command in commands:
        method, path, body, headers = "GET", "", None, {}
        rest = iter(command)
        for word in rest:
            if word == "-X":
                method = next(rest)
            elif word == "-H":
                name, _, value = next(rest).partition(":")
                headers[name] = value.strip()
            elif word == "-d":
                body = next(rest).encode()
            else:
                path = word.removeprefix("localhost:8092")
        yield method, path, body, headers


def test_every_example_of_the_api_answers_as_printed() -> None:
    answer: Any = None
    played = compared = 0
    with RunningService() as service:
        for language, content in blocks(API):
            if language == "sh":
                for method, path, body, headers in requests_of(content):
                    status, answer = service.request(method, path, raw=body, headers=headers)
                    played += 1
                    assert status is not None
                    assert status < 500, (path, answer)
            elif language == "json":
                assert answer == json.loads(content)
                compared += 1
    assert played >= 9
    assert compared >= 5


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"`(--[a-z-]+)`", TEXT))))
def test_flags_named_in_the_readme_exist(flag: str) -> None:
    known = {option.flag for option in SELECTOR_OPTIONS} | {"--seconds"}
    assert flag in known


def test_the_route_table_of_the_readme_is_that_of_the_service() -> None:
    from lean_selector.services.selection import SelectionService

    table = API.split("| route |")[1].split("\n\n")[0]
    printed = set(re.findall(r"`(GET|POST|PATCH|DELETE) (/[^`]*)`", table))
    service = SelectionService.__new__(SelectionService)
    served = {(method, path) for method, path, _ in service.routes()}
    assert printed == served
