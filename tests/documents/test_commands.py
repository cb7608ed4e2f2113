"""The commands that documents print start, and name only flags that there are."""

import re
import sys
from subprocess import run

import pytest

from lean_selector.process.selector_config import SELECTOR_OPTIONS
from lean_selector.process.slot_tracker_config import SLOT_TRACKER_OPTIONS
from tests.documents.pages import OURS, blocks, commands
from tests.running_service import RunningService, free_port

MODULES = {"lean-selector": "lean_selector", "lean-slot-tracker": "lean_selector.slot_tracker"}
STARTS = sorted(
    {
        " ".join(command)
        for text in OURS.values()
        for language, content in blocks(text)
        if language == "sh"
        for command in commands(content)
        if command[0] in MODULES
    }
)
# Those of other programs, of `demo`, and of the load tests.
OTHER_FLAGS = {"--seconds", "--trace", "--load-format", "--explore", "--help", "--detail"}


def test_there_are_commands_to_start() -> None:
    assert len(STARTS) >= 5


@pytest.mark.parametrize("line", STARTS)
def test_every_printed_command_line_starts_a_service(line: str) -> None:
    """On ports of its own, for those printed may be taken."""
    program, *flags = line.split()
    kept = []
    for flag in flags:
        if flag == "9092":
            flag = str(free_port())
        kept.append(flag.replace("selector-b", "127.0.0.1"))
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
    options = (*SELECTOR_OPTIONS, *SLOT_TRACKER_OPTIONS)
    assert flag in {option.flag for option in options} | OTHER_FLAGS


@pytest.mark.parametrize("module", sorted(MODULES.values()))
def test_help_names_every_option(module: str) -> None:
    options = SELECTOR_OPTIONS if module == "lean_selector" else SLOT_TRACKER_OPTIONS
    said = run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60)
    assert [option.flag for option in options if option.flag not in said.stdout] == []
