"""The commands by which documents start the gateway do so, in front of workers of ours."""

import json
import shlex
import sys
from contextlib import ExitStack

import pytest

from loadtest.child_service import JSON, ChildService, plain_environment
from tests.documents.pages import OURS, blocks, commands
from tests.openai_worker import MODEL, OpenAiWorker
from tests.support.own_network import own_network
from tests.support.running_service import DEADLINE_S, wait_until

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

CHAT = "/v1/chat/completions"


def test_there_are_some() -> None:
    assert LINES


@pytest.mark.parametrize("line", LINES)
def test_every_printed_gateway_answers_a_chat_on_its_own_ports(line: str) -> None:
    """Nothing is replaced but the workers' names."""
    _, _, *arguments = shlex.split(line)
    with own_network(), ExitStack() as running:
        a, b = (running.enter_context(OpenAiWorker()) for _ in range(2))
        ours = {"http://gpu-a:8000": a.url, "http://gpu-b:8000": b.url}

        def started(port: int, *words: str) -> ChildService:
            command = [sys.executable, "-m", "lean_selector", *words]
            service = ChildService(command, port, env=plain_environment())
            running.callback(service.stop, 15, DEADLINE_S)
            return service

        gateway = started(8080, "gateway", *(ours.get(each, each) for each in arguments))
        chat = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}

        def is_served() -> bool:
            assert gateway.process.poll() is None, gateway.log()
            try:
                return gateway.request("POST", CHAT, json.dumps(chat).encode(), JSON)[0] == 200
            except OSError:
                return False

        wait_until(is_served, "a request is answered")
