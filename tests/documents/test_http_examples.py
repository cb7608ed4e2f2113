"""Every request printed in a document is sent, page by page, and answers as the page says."""

import json
from contextlib import ExitStack
from typing import Any

import pytest

from tests.documents.pages import OURS, Request, blocks, commands, request_of
from tests.support.running_service import RunningService

MODULES = {8092: "lean_selector", 8091: "lean_selector.slot_tracker"}
# Pages that speak of a service that was started otherwise.
FLAGS = {
    "docs/reference/http-api-16.md": ("--api", "1.6"),
    "docs/guide/sessions.md": ("--session-affinity-ttl-secs", "600", "--use-kv-events", "false"),
}
# Pages whose examples go on where another page's first request has led.
BEGIN_WITH_A_WORKER = {"docs/guide/load-shedding.md", "docs/reference/http-api.md"}


def requests_of(text: str) -> list[Request]:
    return [
        request_of(command)
        for language, content in blocks(text)
        if language == "sh"
        for command in commands(content)
        if command[0] == "curl"
    ]


WITH_REQUESTS = sorted(name for name, text in OURS.items() if requests_of(text))
REGISTRATION = requests_of(OURS["README.md"])[0]


def test_the_pages_with_requests_are_those_known() -> None:
    """A page whose examples are no longer found would pass below by showing nothing."""
    assert {
        *("README.md", "docs/guide/load-shedding.md", "docs/reference/http-api.md"),
        "docs/reference/slot-tracker-api.md",
    } <= set(WITH_REQUESTS)


@pytest.mark.parametrize("page", WITH_REQUESTS)
def test_every_example_answers_as_printed(page: str) -> None:
    answer: Any = None
    compared = 0
    with ExitStack() as running:
        services: dict[int, RunningService] = {}

        def send(request: Request) -> Any:
            if request.port not in services:
                service = RunningService(*FLAGS.get(page, ()), module=MODULES[request.port])
                services[request.port] = running.enter_context(service)
            status, said = services[request.port].request(
                request.method, request.path, raw=request.body, headers=request.headers
            )
            assert status < 500, (request.path, said)
            return said

        if page in BEGIN_WITH_A_WORKER:
            send(REGISTRATION)
        for language, content in blocks(OURS[page]):
            if language == "sh":
                for command in commands(content):
                    if command[0] == "curl":
                        answer = send(request_of(command))
            elif language == "json":
                assert answer == json.loads(content)
                compared += 1
    assert compared, "a page that shows requests shows an answer"
