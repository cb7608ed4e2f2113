"""The commands that documents print can be pasted: a shell reads them, the programs that they name
have their flags, and those of ours start."""

import json
import re
import shlex
import sys
from contextlib import ExitStack

import pytest

from loadtest.child_service import JSON, ChildService, plain_environment
from tests.documents.pages import OURS, blocks, commands
from tests.support.openai_worker import MODEL, OpenAiWorker
from tests.support.own_network import own_network
from tests.support.running_service import DEADLINE_S, RunningService, free_port, wait_until

MODULES = {"lean-selector": "lean_selector", "lean-slot-tracker": "lean_selector.slot_tracker"}
PRINTED = sorted(
    {
        shlex.join(command)
        for text in OURS.values()
        for language, content in blocks(text)
        if language == "sh"
        for command in commands(content)
        if command[0] in MODULES and command[1:2] not in (["check"], ["simulate"])
    }
)
GATEWAYS = [line for line in PRINTED if line.startswith("lean-selector gateway ")]
STARTS = [line for line in PRINTED if line not in GATEWAYS]


@pytest.mark.parametrize("line", STARTS)
def test_every_printed_command_line_starts_a_service(line: str) -> None:
    """On ports of its own, for those printed may be taken."""
    program, *flags = shlex.split(line)
    kept = []
    for flag in flags:
        if flag == "9092":
            flag = str(free_port())
        kept.append(re.sub("selector-[ab]", "127.0.0.1", flag))
    if "--port" in kept:  # the service's own, which RunningService chooses
        at = kept.index("--port")
        del kept[at : at + 2]
    with RunningService(*kept, module=MODULES[program]) as service:
        assert service.request("GET", "/health")[0] == 200


@pytest.mark.parametrize("line", GATEWAYS)
def test_every_printed_gateway_answers_a_chat_on_its_own_ports(line: str) -> None:
    """Nothing is replaced but the workers' names."""
    _, _, *arguments = shlex.split(line)
    with own_network(), ExitStack() as running:
        a, b = (running.enter_context(OpenAiWorker()) for _ in range(2))
        ours = {"http://gpu-a:8000": a.url, "http://gpu-b:8000": b.url}
        command = [sys.executable, "-m", "lean_selector", "gateway"]
        command += [ours.get(each, each) for each in arguments]
        gateway = ChildService(command, 8080, env=plain_environment())
        running.callback(gateway.stop, 15, DEADLINE_S)
        chat = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        body = json.dumps(chat).encode()

        def is_served() -> bool:
            assert gateway.process.poll() is None, gateway.log()
            try:
                return gateway.request("POST", "/v1/chat/completions", body, JSON)[0] == 200
            except OSError:
                return False

        wait_until(is_served, "a request is answered")
