"""The commands by which documents start the gateway do so, in front of workers of ours."""

import shlex

import pytest

from tests.documents.pages import OURS, blocks, commands
from tests.gateway.running_gateway import RunningGateway
from tests.openai_worker import OpenAiWorker
from tests.running_service import RunningService, wait_until

LINES = sorted(
    {
        shlex.join(command)
        for text in OURS.values()
        for language, content in blocks(text)
        if language == "sh"
        for command in commands(content)
        if command[:2] == ["lean-selector", "gateway"]
    }
)


def test_there_are_some() -> None:
    assert len(LINES) >= 2


@pytest.mark.parametrize("line", LINES)
def test_every_printed_gateway_answers_a_chat(line: str) -> None:
    _, _, *arguments = shlex.split(line)
    with OpenAiWorker() as a, OpenAiWorker() as b:
        found = [f"--discover=url:{each.url}" for each in (a, b)]
        with RunningService(*found) as beside:
            ours = {
                "http://gpu-a:8000": a.url,
                "http://gpu-b:8000": b.url,
                "http://127.0.0.1:8092": f"http://127.0.0.1:{beside.port}",
            }
            given = [ours.get(each, each) for each in arguments]
            with RunningGateway(*given) as gateway:
                wait_until(
                    lambda: "x-lean-overlap" in gateway.chat("hello " * 20).headers,
                    "requests are placed by the selector",
                )
