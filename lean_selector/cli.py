"""The command lines: `lean-selector` (also `python -m lean_selector`) and `lean-slot-tracker`."""

import os
import sys
from collections.abc import Sequence

from lean_selector import __version__
from lean_selector.process.options import OneLineParser, add_options
from lean_selector.process.selector_config import SELECTOR_OPTIONS, selector_config


def hold_standard_streams() -> None:
    """Opens what of stdin, stdout and stderr was closed at the start, on nothing.

    Otherwise the first socket gets such a number: what is logged is written into it, and libuv ends
    the process with an abort when it is closed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as it runs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the selection service, or with `demo` the demonstration; returns the exit status."""
    hold_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["demo"]:
        from lean_selector.demo.command import main as demo

        return demo(arguments[1:])
    parser = OneLineParser(
        prog="lean-selector",
        description="Answers which worker should serve a prompt, and keeps the books of what runs "
        "where. `lean-selector demo` shows it at work.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lean-selector {__version__}")
    add_options(parser, SELECTOR_OPTIONS)
    config = selector_config(parser, parser.parse_args(arguments), os.environ)

    from lean_selector.process.selector import StartError, run_selector

    try:
        run_selector(config)
    except StartError as error:
        sys.stderr.write(f"lean-selector: error: {error}\n")
        return 1
    return 0


def slot_tracker_main(argv: Sequence[str] | None = None) -> int:
    """Runs the slot tracker; returns the exit status."""
    hold_standard_streams()
    from lean_selector.process.slot_tracker_config import SLOT_TRACKER_OPTIONS, slot_tracker_config

    parser = OneLineParser(
        prog="lean-slot-tracker",
        description="Keeps the books of active requests, by worker rank: an independent service "
        "for routers that choose for themselves.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lean-slot-tracker {__version__}")
    add_options(parser, SLOT_TRACKER_OPTIONS)
    config = slot_tracker_config(parser, parser.parse_args(argv), os.environ)

    from lean_selector.process.selector import StartError
    from lean_selector.process.slot_tracker import run_slot_tracker

    try:
        run_slot_tracker(config)
    except StartError as error:
        sys.stderr.write(f"lean-slot-tracker: error: {error}\n")
        return 1
    return 0
