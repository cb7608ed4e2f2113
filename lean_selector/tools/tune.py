"""`lean-selector tune LOG`: finds the best settings for the traffic of a decision log."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import msgspec

from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.tools.calibration import Engines
from lean_selector.tools.recording import Recording
from lean_selector.tools.replay import (
    HEAD,
    NONE,
    PARTS,
    Row,
    SettingChange,
    add_arguments,
    change_of,
    change_text,
    play,
    run,
    table_line,
)
from lean_selector.tools.simulate import Progress, settings_with


def _grid() -> Iterator[dict[str, object]]:
    for queue in (None, 4.0):
        for scale, credit in product((1.0, 3.0, 10.0), (0.5, 1.0)):
            terms = {"prefill_load_scale": scale, "overlap_score_credit": credit}
            yield {"policy": "dynamo", **terms, "queue_threshold": queue}
        yield {"policy": "latency", "queue_threshold": queue}


class Tuned(msgspec.Struct, frozen=True):
    """The recommended settings ({} if none), and how the best ones tried change the mean TTFT."""

    settings: dict[str, object]
    ttft_change: SettingChange


def main(argv: Sequence[str]) -> int:
    """Prints a row per combination of settings, and the best one. Return an exit status."""
    parser = argparse.ArgumentParser(
        prog="lean-selector tune",
        description=(
            "Replay the requests of a decision log with a small grid of settings, and print the "
            "best ones, their effect, and its confidence interval."
        ),
    )
    add_arguments(parser)
    return run(parser, argv, _tune)


def _tune(options: argparse.Namespace, recording: Recording, engines: Engines) -> Tuned:
    prompt_tokens = sum(line.input_length for line in recording.lines)
    progress = Progress(len(recording.lines))

    def played(name: str, settings: RouterSettings) -> Row:
        show = partial(progress.show, name)
        row, _ = play(recording, engines, name, settings, options.seed, show)
        progress.clear()
        print(table_line(row, prompt_tokens), flush=True)
        return row

    print("\n".join(HEAD))
    base = played("recorded settings", recording.settings)
    # Every second part of the log selects the best settings. Their effect is measured on the other
    # parts, because on the first ones the winner was also lucky.
    size = -(-len(recording.lines) // PARTS)
    ours = [at for at in range(len(recording.lines)) if at // size % 2 == 0]
    others = [at for at in range(len(recording.lines)) if at // size % 2]
    best, best_row = dict[str, object](), base
    for changes in _grid():
        if settings_with(recording.settings, changes) == recording.settings:
            continue
        row = played(_words(changes, _SHORT), settings_with(recording.settings, changes))
        if sum(row.ttft_s[at] for at in ours) < sum(best_row.ttft_s[at] for at in ours):
            best, best_row = changes, row
    change = change_of([best_row.ttft_s[at] for at in others], [base.ttft_s[at] for at in others])
    print()
    if best and change.is_sure and change.mean < 0.0:
        print(f"set {_words(best, {})}: mean TTFT {change_text(change)}")
        return Tuned(best, change)
    print("no significant difference: the recorded settings are as good as any in the grid")
    return Tuned({}, change)


def _words(settings: dict[str, object], names: dict[str, str]) -> str:
    texts = {
        name: NONE if value is None else f"{value:g}" if isinstance(value, float) else value
        for name, value in settings.items()
    }
    return " ".join(f"{names.get(name, name)}={text}" for name, text in texts.items())


_SHORT = {
    "policy": "policy",
    "prefill_load_scale": "scale",
    "overlap_score_credit": "credit",
    "queue_threshold": "queue",
}
