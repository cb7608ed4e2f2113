"""The commands that documents print start, and name only flags that there are."""

import argparse
import re
import shlex

import pytest

from lean_selector.server.flags import FILE, fields_of
from lean_selector.server.gateway_flags import GatewayConfig
from lean_selector.tools.check import add_arguments as add_check_arguments
from tests.documents.pages import OURS, blocks, commands
from tests.support.running_service import RunningService, free_port

MODULES = {"lean-selector": "lean_selector", "lean-slot-tracker": "lean_selector.slot_tracker"}
COMMANDS = {"check", "gateway"}
STARTS = sorted(
    {
        shlex.join(command)
        for text in OURS.values()
        for language, content in blocks(text)
        if language == "sh"
        for command in commands(content)
        if command[0] in MODULES and not COMMANDS.intersection(command[1:2])
    }
)
# Those of other programs, of `demo`, and of the load tests.
OTHER_FLAGS = {"--seconds", "--trace", "--load-format", "--explore", "--help", "--detail"}
OTHER_FLAGS |= {"--help-all"}
OTHER_FLAGS |= {"--cases", "--reference"}  # of loadtest/versus.py
OTHER_FLAGS |= {"--lifecycles", "--pin", "--python"}  # of loadtest/soak.py
OTHER_FLAGS |= {"--long", "--missing", "--show"}  # of the tests, of coverage and of mutation
OTHER_FLAGS |= {"--probe", "--json", "--ca-file", "--worker-token-file"}  # of `check`
OTHER_FLAGS |= {"--token-file", "--cert-file", "--key-file"}
OTHER_FLAGS |= {"--build-arg", "--entrypoint"}  # of docker
OTHER_FLAGS |= {"--router-tracking-key-file", "--router-tracking-key-id"}  # of Dynamo 1.6 alone
OTHER_FLAGS |= {"--file-flush-interval-msec"}  # of envoy
OTHER_FLAGS |= {"--enable-cache-report", "--enable-prompt-tokens-details"}  # of engines
OTHER_FLAGS |= {"--default-chat-template-kwargs"}


def test_there_are_commands_to_start() -> None:
    assert len(STARTS) >= 5


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


@pytest.mark.parametrize(
    "flag",
    sorted({flag for text in OURS.values() for flag in re.findall(r"`(--[a-z-]+)[` ]", text)}),
)
def test_flags_named_in_the_documents_exist(flag: str) -> None:
    assert flag in {FILE, *(each.flag.name for each in fields_of(GatewayConfig))} | OTHER_FLAGS


def test_the_options_that_the_page_of_the_check_lists_are_those_that_it_has() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_check_arguments(parser)
    page = OURS["docs/guide/check.md"]
    listed = set(re.findall(r"^\| `(--[a-z-]+)` \|", page, re.MULTILINE))
    assert listed == {name for action in parser._actions for name in action.option_strings}
