"""`lean-selector replay LOG` shows how other settings would have served the traffic of a decision
log; `lean-selector tune LOG` finds the best settings for it. They simulate the traffic in virtual
time, on engines whose speed is estimated from the log."""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median

import msgspec

from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.tools.batching_engine import BatchingEngine, SimulatedRequest
from lean_selector.tools.calibration import Engines, calibrated, play_recorded
from lean_selector.tools.recording import Recording, found_tokens, read_log, ttft_s
from lean_selector.tools.service_process import ServiceError, within
from lean_selector.tools.simulate import Progress, settings_with, status_of
from lean_selector.tools.simulation import BLOCK_SIZE, Policy, Simulation
from lean_selector.tools.traffic import percentile

_PLAYS = 3
_DRAWS = 1_000
PARTS = 40  # of the log: the bootstrap draws parts, as nearby requests are not independent
_EACH_SIDE = 0.025  # share of the resamples on each side of an interval
NONE = "none"

# -- figures ---------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """One line of the table of results. Token counts are of prompt tokens."""

    name: str
    ttft_s: list[float]  # in order of arrival
    p50_s: float
    p99_s: float
    hit_tokens: float
    computed_tokens: float
    imbalance: float  # computed tokens of the busiest engine, relative to the average


class SettingChange(msgspec.Struct, frozen=True):
    """The relative change of a mean, with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


def change_of(ours: Sequence[float], others: Sequence[float]) -> SettingChange:
    """Return the relative change from the mean of `others` to that of `ours`. Both lists have one
    value per request. The interval is bootstrapped from up to 40 groups of successive requests."""
    size = -(-len(ours) // PARTS)
    pairs = [
        (sum(ours[at : at + size]), sum(others[at : at + size])) for at in range(0, len(ours), size)
    ]
    rng, draws = random.Random(0), list[float]()
    for _ in range(_DRAWS):
        drawn = rng.choices(pairs, k=len(pairs))
        draws.append(sum(each[0] for each in drawn) / max(1e-9, sum(each[1] for each in drawn)) - 1)
    draws.sort()
    mean = sum(ours) / max(1e-9, sum(others)) - 1
    return SettingChange(mean, percentile(draws, _EACH_SIDE), percentile(draws, 1 - _EACH_SIDE))


def _row(name: str, requests: Sequence[SimulatedRequest], engines: Sequence[BatchingEngine]) -> Row:
    work = [engine.computed_tokens for engine in engines]
    hits = sum(request.hit_tokens for request in requests)
    return _row_of(name, [request.ttft_s for request in requests], hits, work)


def _row_of(name: str, ttft_s: list[float], hits: int, work: Sequence[int]) -> Row:
    ordered, even = sorted(ttft_s), max(work) * len(work) / max(1, sum(work))
    p50_s, p99_s = percentile(ordered, 0.5), percentile(ordered, 0.99)
    return Row(name, ttft_s, p50_s, p99_s, hits, sum(work), even)


def _average(rows: Sequence[Row]) -> Row:
    return Row(
        rows[0].name,
        [fmean(each) for each in zip(*(row.ttft_s for row in rows), strict=True)],
        fmean(row.p50_s for row in rows),
        fmean(row.p99_s for row in rows),
        fmean(row.hit_tokens for row in rows),
        fmean(row.computed_tokens for row in rows),
        fmean(row.imbalance for row in rows),
    )


def observed(recording: Recording) -> Row:
    """Return the results that the log itself has: the traffic as it was served."""
    work = [0] * len(recording.workers)
    hits = 0
    for line in recording.lines:
        cached = min(found_tokens(line) or 0, line.input_length - 1)
        hits += cached
        work[recording.engine_of(line) - 1] += line.input_length - cached
    ttft = [each for line in recording.lines if (each := ttft_s(line)) is not None]
    return _row_of("observed", ttft, hits, work)


def infinite_cache_tokens(requests: Sequence[SimulatedRequest]) -> int:
    """Return how many prompt tokens must be computed with one unbounded cache for all engines."""
    seen, computed = set[int](), 0
    for request in requests:
        hit = next((n for n, each in enumerate(request.chain) if each not in seen), None)
        blocks = len(request.chain) if hit is None else hit
        computed += request.isl_tokens - min(blocks * BLOCK_SIZE, request.isl_tokens - 1)
        seen.update(request.chain)
    return computed


def play(
    recording: Recording,
    engines: Engines,
    name: str,
    settings: RouterSettings,
    seed: int = 0,
    on_request: Callable[[int], None] | None = None,
) -> tuple[Row, list[SimulatedRequest]]:
    """Simulates the log's requests with `settings`, several times, because ties are broken at
    random. Return the average results, and the requests of the last simulation."""
    rows, requests = list[Row](), list[SimulatedRequest]()
    for play_seed in range(seed, seed + _PLAYS):
        requests = recording.requests(engines.output_tokens)
        simulation = Simulation(Policy(name, settings), engines.fleet, play_seed)
        simulation.run(requests, on_request)
        rows.append(_row(name, requests, list(simulation.engines.values())))
    return _average(rows), requests


# -- the commands ----------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments that `replay` and `tune` share."""
    parser.add_argument("log", metavar="LOG", type=Path, nargs="+", help="files of a decision log")
    parser.add_argument("--model", help="the model, if the log has several")
    parser.add_argument(
        "--capacity",
        type=within(int, 1),
        help=(
            "capacity of each engine's cache, in blocks of 512 tokens; default: estimated from the "
            "hits"
        ),
    )
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=within(float, 0.001),
        help="prefill speed of an engine; default: estimated from the times to first token",
    )
    parser.add_argument(
        "--token-ms",
        type=within(float, 0.001),
        help="time between output tokens of a request; default: estimated from the reported output",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for ties; default: 0")
    parser.add_argument("--json", type=Path, help="write the figures to this file")


def run(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    report: Callable[[argparse.Namespace, Recording, Engines], object],
) -> int:
    """Reads the log named in `argv`, and estimates the speed and cache size of the engines from it.
    Calls `report` with the options, the log and the estimate. Return an exit status."""
    options = parser.parse_args(argv)

    def work() -> None:
        recording = read_log(options.log, options.model)
        options.settings = settings_of(recording.settings, getattr(options, "set", None) or ())
        token_s = None if options.token_ms is None else options.token_ms / 1e3
        engines = calibrated(recording, options.capacity, options.prefill_tokens_per_s, token_s)
        print("\n".join(_summary(recording, engines)), flush=True)
        figures = report(options, recording, engines)
        if options.json is not None:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")

    return status_of(parser.prog, work)


def settings_of(base: RouterSettings, given: Sequence[str]) -> RouterSettings:
    """Return `base`, changed by texts `NAME=VALUE`. Raises ServiceError if one is invalid."""
    fields: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ServiceError(f"--set {text}: expected SETTING=VALUE")
        fields[name] = None if value == NONE else value
    try:
        return settings_with(base, fields)
    except ValueError as error:
        raise ServiceError(f"--set: {error}") from None


def _summary(recording: Recording, engines: Engines) -> list[str]:
    lines, fleet = recording.lines, engines.fleet
    took_s = (lines[-1].timestamp - lines[0].timestamp) / 1e3
    chose = ", chosen by another balancer" if recording.is_shadow else ""
    slow = [each for each in fleet.slowness if each != 1.0]
    differ = f"; {len(slow)} are {min(slow):.2g} to {max(slow):.2g} times as slow" if slow else ""
    return [
        f"{len(lines)} requests to {len(recording.workers)} engines in {took_s:.0f} s{chose}",
        f"calibrated: {fleet.capacity_blocks} blocks of {BLOCK_SIZE} tokens an engine, "
        f"{1 / fleet.times.prompt_token_s:.0f} prompt tokens/s{differ}",
        *(f"note: {note}" for note in recording.notes),
        "",
    ]


_WIDTH = 38  # for names
HEAD = [
    f"| {'':<{_WIDTH}} |  mean TTFT |     p50 |     p99 |  hits | imbalance |",
    f"|{'-' * (_WIDTH + 2)}|-----------:|--------:|--------:|------:|----------:|",
]


def table_line(row: Row, prompt_tokens: int) -> str:
    return (
        f"| {row.name:<{_WIDTH}} | {fmean(row.ttft_s or [0.0]):8.3f} s | {row.p50_s:5.2f} s |"
        f" {row.p99_s:5.2f} s | {row.hit_tokens / prompt_tokens:5.1%} |"
        f" {row.imbalance:9.2f} |"
    )


def main(argv: Sequence[str]) -> int:
    """Prints the results. Return 0; 1 if the log or a setting is unusable; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="lean-selector replay",
        description=(
            "Replay the requests of a decision log in virtual time: with the recorded choices, "
            "which shows how well the model fits; with the recorded settings; and with others."
        ),
    )
    add_arguments(parser)
    parser.add_argument(
        "--set",
        metavar="SETTING=VALUE",
        action="append",
        help=(
            "another router setting, such as policy=latency or queue_threshold=none; may be "
            "repeated"
        ),
    )
    return run(parser, argv, _replay)


class Replayed(msgspec.Struct, frozen=True):
    """The results of a replay, for the file of `--json`."""

    rows: list[Row]
    ttft_change: SettingChange  # of the other settings relative to the recorded ones
    infinite_cache_tokens: int
    diverges_after: float  # as a share of the requests


def _replay(options: argparse.Namespace, recording: Recording, engines: Engines) -> Replayed:
    lines = recording.lines
    prompt_tokens = sum(line.input_length for line in lines)
    simulation, as_placed = play_recorded(recording, engines)
    modelled = _row("the same choices, modelled", as_placed, list(simulation.engines.values()))
    seen = observed(recording)
    print("\n".join([*HEAD, table_line(seen, prompt_tokens), table_line(modelled, prompt_tokens)]))
    rows, requests = [seen, modelled], as_placed
    progress = Progress(len(lines))
    given = " ".join(options.set or ())
    for name, settings in (("recorded settings", recording.settings), (given, options.settings)):
        if name:
            show = partial(progress.show, name)
            row, requests = play(recording, engines, name, settings, options.seed, show)
            progress.clear()
            rows.append(row)
            print(table_line(row, prompt_tokens), flush=True)
    best = infinite_cache_tokens(requests)
    # If another balancer chose, no request was placed under the settings: compare with its choices.
    base = modelled if recording.is_shadow else rows[2]
    pairs = zip(as_placed, requests, strict=True)
    differs = [one.hit_tokens != other.hit_tokens for one, other in pairs]
    diverges = differs.index(True) / len(lines) if True in differs else 1.0
    change = change_of(rows[-1].ttft_s, base.ttft_s)
    errors = [
        abs(request.ttft_s / first - 1.0)
        for request, line in zip(as_placed, lines, strict=True)
        if (first := ttft_s(line))
    ]
    text = ["", f"a cache without bounds, shared by all: {1 - best / prompt_tokens:.1%} hits"]
    if seen.ttft_s and errors:
        off = fmean(modelled.ttft_s) / fmean(seen.ttft_s) - 1.0
        typical = f"that of a request by {median(errors):.0%} (median)"
        text.append(f"model: mean TTFT off by {off:+.1%}, {typical}")
    text += [
        f"caches: the first request with other hits comes after {diverges:.1%} of the requests; "
        f"{sum(differs) / len(lines):.0%} have other hits",
        *_costs(base, rows[-1], best, engines.fleet.times.prompt_token_s),
    ]
    if rows[-1] is not base:
        text.append(f"mean TTFT of {rows[-1].name} against {base.name}: {change_text(change)}")
    print("\n".join(text))
    return Replayed(rows, change, best, diverges)


def _costs(base: Row, other: Row, best: int, prompt_token_s: float) -> list[str]:
    """Compares tokens and time of `base` with `other`, and with an unbounded cache (`best`)."""
    tokens = base.computed_tokens - other.computed_tokens
    waited_s = sum(base.ttft_s) - sum(other.ttft_s)
    more = base.computed_tokens - best
    return [
        f"{base.name} cost, against {other.name}: {tokens / 1e6:.2f} M prompt tokens, "
        f"{waited_s:.0f} s of waiting in all; against a cache without bounds: {more / 1e6:.2f} M "
        f"tokens, {more * prompt_token_s:.0f} s of computing",
    ]


def change_text(change: SettingChange) -> str:
    sure = "" if change.is_sure else ", not significant"
    return f"{change.mean:+.1%} ({change.low:+.1%} to {change.high:+.1%}){sure}"


# -- tune ------------------------------------------------------------------------------------------


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


def tune(argv: Sequence[str]) -> int:
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
