"""The commands that documents print can be pasted: a shell reads them, the programs that they name
have their flags, and those of ours start."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import pytest

from lean_selector import cli
from lean_selector.app.flags import OneLineParser, add_flags
from lean_selector.app.gateway_flags import GatewayConfig
from lean_selector.app.selector_flags import SelectorConfig
from lean_selector.app.service_flags import TrackerConfig
from lean_selector.tools.check import add_arguments as add_check_arguments
from loadtest.child_service import JSON, ChildService, plain_environment
from tests.deploy.recipe_commands import OTHERS_FLAGS, OUR_FLAGS, flags_of
from tests.documents.pages import OURS, ROOT, blocks, commands
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


# What of the engines' flags the documents print, with whether a value follows: from the pages
# "vllm serve" of vLLM, "Server Arguments" of SGLang, and "TensorRT-LLM" of Dynamo.
ENGINES = {
    ("vllm", "serve"): {
        **dict.fromkeys(("--port", "--block-size", "--kv-events-config"), True),
        **dict.fromkeys(("--enable-prefix-caching", "--enable-prompt-tokens-details"), False),
    },
    ("python", "-m", "sglang.launch_server"): {
        **dict.fromkeys(("--model-path", "--port", "--page-size", "--kv-events-config"), True),
        "--enable-cache-report": False,
    },
    ("python", "-m", "dynamo.trtllm"): {
        **dict.fromkeys(("--model-path", "--connector"), True),
        "--publish-kv-events": False,
    },
}
SERVICES: dict[str, Any] = {"lean-selector": SelectorConfig, "lean-slot-tracker": TrackerConfig}
OTHERS = {"curl", "pip", "docker", "printf", "python", "python3", "python3.11", "pytest", "jq"}
SHELL = [
    pytest.param(content, id=f"{name}:{number}")
    for name, text in OURS.items()
    for number, (language, content) in enumerate(blocks(text, unnamed=True))
    if language == "sh" or (not language and content.split()[0] in {*SERVICES, *OTHERS, "vllm"})
]


@pytest.mark.parametrize("script", SHELL)
def test_a_shell_and_the_programs_read_every_printed_command(script: str) -> None:
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for command in commands(script):
        while re.fullmatch(r"[A-Z_]+=.*", command[0]):
            command = command[1:]
        read(command)


def test_the_request_that_shows_that_nginx_works_goes_to_its_port() -> None:
    listened = re.search(r"listen (\d+);", (ROOT / "deploy/nginx/njs/nginx.conf").read_text())
    assert listened is not None
    page = (ROOT / "docs/guide/gateways.md").read_text()
    assert f"curl -s localhost:{listened[1]}/v1/completions" in page


def read(command: list[str]) -> None:
    """Fails where the program of the command would refuse it."""
    if command[0].startswith(".ci/"):
        assert (ROOT / command[0]).is_file()
        return
    command = [command[0].rpartition("/")[2], *command[1:]]
    for start, flags in ENGINES.items():
        if tuple(command[: len(start)]) == start:
            rest = iter(command[len(start) :])
            for word in rest:
                if word.startswith("-"):
                    value = next(rest, None) if flags[word] else "none"
                    assert value is not None, f"{word} needs a value"
            return
    if command[0] not in SERVICES:
        assert command[0] in OTHERS, f"{command[0]} is no program that the documents use"
        return
    words = [word for word in command[1:] if word != "..."]
    if command[0] == "lean-selector" and words and words[0] in cli.TOOLS:
        parser = argparse.ArgumentParser(exit_on_error=False)
        import_module(f"lean_selector.tools.{cli.TOOLS[words[0]]}").add_arguments(parser)
        _, unknown = parser.parse_known_args(words[1:])
        assert [word for word in unknown if "=" not in word and word != "--set"] == []
        return
    config = SERVICES[command[0]]
    if "gateway" in words[:1]:
        words, config = words[1:], GatewayConfig
    parser = OneLineParser(prog="it", allow_abbrev=False)
    add_flags(parser, config)
    parser.parse_args(words)


def test_flags_named_in_the_documents_exist() -> None:
    named = {flag for text in OURS.values() for flag in re.findall(r"`(--[a-z-]+)[` ]", text)}
    assert named - OUR_FLAGS - OTHERS_FLAGS == set()


def test_the_page_of_the_check_lists_its_options() -> None:
    page = OURS["docs/guide/check.md"]
    assert set(re.findall(r"^\| `(--[a-z-]+)` \|", page, re.MULTILINE)) == flags_of(
        add_check_arguments
    )
