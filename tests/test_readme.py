"""The README tells the truth: examples are run, flags and routes are those of the program."""

import http.client
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lean_selector.config import SELECTOR_OPTIONS
from lean_selector.services.selection import SelectionService
from lean_selector.services.slot_tracker import SlotTrackerService
from lean_selector.slot_tracker_config import SLOT_TRACKER_OPTIONS
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
                path = word.removeprefix("localhost:8092").removeprefix("localhost:8091")
        yield method, path, body, headers


def section(title: str) -> str:
    return TEXT.split(f"\n{title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize(
    ("module", "text", "played", "compared"),
    [
        pytest.param(
            "lean_selector", API + section("### Load shedding"), 12, 8, id="lean-selector"
        ),
        pytest.param(
            "lean_selector.slot_tracker", section("## The slot tracker"), 7, 4, id="slot tracker"
        ),
    ],
)
def test_every_example_answers_as_printed(
    module: str, text: str, played: int, compared: int
) -> None:
    answer: Any = None
    with RunningService(module=module) as service:
        for language, content in blocks(text):
            if language == "sh":
                for method, path, body, headers in requests_of(content):
                    status, answer = service.request(method, path, raw=body, headers=headers)
                    played -= 1
                    assert status is not None
                    assert status < 500, (path, answer)
            elif language == "json":
                assert answer == json.loads(content)
                compared -= 1
    assert played <= 0, "fewer requests than the README is known to show"
    assert compared <= 0, "fewer answers than the README is known to show"


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"`(--[a-z-]+)[` ]", TEXT))))
def test_flags_named_in_the_readme_exist(flag: str) -> None:
    options = (*SELECTOR_OPTIONS, *SLOT_TRACKER_OPTIONS)
    known = {option.flag for option in options} | {"--seconds", "--trace", "--load-format"}
    assert flag in known


@pytest.mark.parametrize(
    ("module", "text"),
    [
        pytest.param("lean_selector", API, id="lean-selector"),
        pytest.param("lean_selector.slot_tracker", section("## The slot tracker"), id="tracker"),
    ],
)
def test_the_methods_of_each_route_in_the_readme_are_those_that_are_allowed(
    module: str, text: str
) -> None:
    table = text.split("| route |")[1].split("\n\n")[0]
    printed: dict[str, set[str]] = {}
    for method, path in re.findall(r"`(GET|POST|PATCH|DELETE) (/[^`]*)`", table):
        printed.setdefault(re.sub(r"{\w+}", "1", path), set()).add(method)
    with RunningService(module=module) as service:
        for path, methods in printed.items():
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
            connection.request("TRACE", path)
            answer = connection.getresponse()
            assert answer.status == 405, path
            assert set(answer.headers["allow"].split(",")) - {"HEAD"} == methods, path
            connection.close()


def test_no_route_is_missing_in_the_readme() -> None:
    selection = SelectionService.__new__(SelectionService).routes()
    slot_tracker = SlotTrackerService.__new__(SlotTrackerService).routes()
    for method, path, _ in (*selection, *slot_tracker):
        assert f"`{method} {path}`" in TEXT
