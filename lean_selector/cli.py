"""The command lines: `lean-selector` (also `python -m lean_selector`) and `lean-slot-tracker`."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

from lean_selector import __version__
from lean_selector.app.flags import OneLineParser, add_flags, load
from lean_selector.build_info import form

if TYPE_CHECKING:
    from lean_selector.app.service_flags import ServiceConfig

# The module and function of each command; imported when the command is used.
TOOLS: Final = {
    **{name: (name, "main") for name in ("demo", "top", "simulate", "replay", "check")},
    "tune": ("replay", "tune"),
    "deploy": ("recipes", "main"),
}
COMMANDS: Final = ("gateway", *TOOLS)


def hold_standard_streams() -> None:
    """Opens stdin, stdout and stderr on the null device if they were closed at start.

    If descriptors 0 to 2 were free, the first sockets would get these numbers. Log lines would be
    written into a socket, and libuv would abort the process when that socket is closed."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as it runs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the selection service, or the command that `argv` names. Return the exit status."""
    hold_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in TOOLS:
        module, name = TOOLS[arguments[0]]
        tool = getattr(import_module(f"lean_selector.tools.{module}"), name)
        return int(tool(arguments[1:]))
    if arguments[:1] == ["gateway"]:
        return _gateway(arguments[1:])
    if arguments and not arguments[0].startswith("-"):
        return _no_command(arguments[0])
    from lean_selector.app.picker_flags import SelectorServiceConfig

    return _served(
        "lean-selector",
        "Chooses the worker for a prompt, and tracks in-flight load per worker. Other "
        "commands: `lean-selector gateway` forwards requests to workers, too; `demo` shows it at "
        "work, `top` shows a running one, `simulate` compares policies on a trace, `replay` "
        "and `tune` settings on the decisions of a service, `check` finds what is wrong, "
        "`deploy` prints files to run it with.",
        SelectorServiceConfig,
        "lean_selector.app.selector_process",
        arguments,
    )


def _no_command(word: str) -> int:
    from difflib import get_close_matches

    close = get_close_matches(word, COMMANDS, 1)
    hint = f": is `{close[0]}` meant?" if close else f"; there are {', '.join(COMMANDS)}"
    sys.stderr.write(f"lean-selector: error: there is no command `{word}`{hint}\n")
    return 2


def _gateway(arguments: Sequence[str]) -> int:
    from lean_selector.app.gateway_flags import GatewayConfig

    return _served(
        "lean-selector gateway",
        "An OpenAI-compatible proxy in front of workers: sends each request to the one that is "
        "expected to produce the first token earliest, given the workers' caches and load.",
        GatewayConfig,
        "lean_selector.app.gateway_process",
        arguments,
    )


def slot_tracker_main(argv: Sequence[str] | None = None) -> int:
    """Runs the slot tracker, which tracks active requests by rank. Return the exit status."""
    hold_standard_streams()
    from lean_selector.app.service_flags import TrackerConfig

    return _served(
        "lean-slot-tracker",
        "Tracks active requests by worker rank: an independent service for routers that choose "
        "for themselves.",
        TrackerConfig,
        "lean_selector.app.slot_tracker_process",
        argv,
    )


def _served(
    name: str,
    description: str,
    configured: "type[ServiceConfig]",
    module: str,
    argv: Sequence[str] | None,
) -> int:
    """Parses the flags of a service, and runs `serve` of `module`. Return the exit status. The
    module is imported after the flags are parsed, so that `--help` and invalid flags are answered
    at once."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(prog=name, description=description, allow_abbrev=False)
    version = f"{name} {__version__} ({form()})" if "--version" in arguments else ""
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("--help-all", action="help", help="show all flags")
    add_flags(parser, configured, briefly="--help-all" not in arguments)
    config = load(parser, configured, arguments, os.environ)

    from lean_selector.app.host import StartError, run

    try:
        run(config, import_module(module).serve)
    except StartError as error:
        sys.stderr.write(f"{name}: error: {error}\n")
        return 1
    return 0
