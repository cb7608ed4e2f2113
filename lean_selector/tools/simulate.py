"""`lean-selector simulate TRACE`: compares routing policies on a trace, in virtual time."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.tools.batching_engine import SimulatedRequest
from lean_selector.tools.service_process import ServiceError, within
from lean_selector.tools.simulation import (
    RULES,
    Outcome,
    Policy,
    SimulatedFleet,
    Simulation,
    deal,
    outcome,
    requests_of,
)
from lean_selector.tools.trace import trace_lines

_OWN = ("dynamo", "latency")  # policies of the router, as its settings name them
_DEFAULT = (
    "round-robin",
    "least-loaded",
    "lmetric",
    "dynamo",
    "dynamo:prefill_load_scale=10",
    "latency",
)
_PROGRESS_S = 0.5  # between two drawings of the progress


def policy_of(text: str) -> Policy:
    """Parses a policy: `NAME` or `NAME:setting=value,...`. Raises ArgumentTypeError."""
    name, _, given = text.partition(":")
    if name in RULES:
        if given:
            raise argparse.ArgumentTypeError(f"{name} has no settings")
        return Policy(text, rule=RULES[name])
    if name not in _OWN:
        known = ", ".join([*RULES, *_OWN])
        raise argparse.ArgumentTypeError(f"there is no policy `{name}`; there are {known}")
    settings = (setting.partition("=") for setting in given.split(",") if setting)
    fields = {"policy": name, **{field: value for field, _, value in settings}}
    try:
        return Policy(text, settings_with(RouterSettings(), fields))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def settings_with(base: RouterSettings, given: Mapping[str, object]) -> RouterSettings:
    """Return `base` with the settings in `given`, whose values may be text. Raises ValueError."""
    for field in given:
        if field not in RouterSettings.__struct_fields__:
            known = ", ".join(RouterSettings.__struct_fields__)
            raise ValueError(f"there is no setting `{field}`; there are {known}")
    read = msgspec.convert(given, RouterSettings, strict=False)
    changes = {field: getattr(read, field) for field in given}
    for field, value in changes.items():
        if isinstance(value, float) and not 0.0 <= value < float("inf"):
            raise ValueError(f"{field} must be finite and 0 or more, got {value}")
    return msgspec.structs.replace(base, **changes)


_factor = within(float, 0.001)


def _factors(text: str) -> list[float]:
    return [_factor(each) for each in text.split(",")]


def _sync_ms(text: str) -> float | None:
    return None if text == "none" else within(float, 0.0)(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        metavar="TRACE",
        type=Path,
        nargs="?",
        help="trace in the Mooncake format, optionally gzipped; default: generated conversations",
    )
    parser.add_argument(
        "--policy",
        metavar="NAME[:SETTING=VALUE,...]",
        type=policy_of,
        action="append",
        help=f"a row; give it again for more. {', '.join([*_OWN, *RULES])}; settings are "
        f"those of the router, as queue_threshold=2. Default: {' '.join(_DEFAULT)}",
    )
    parser.add_argument(
        "--requests", type=within(int, 1), help="only the first N requests of the trace"
    )
    parser.add_argument(
        "--load", type=_factor, default=1.0, help="factor on the arrival rate; default: 1"
    )
    parser.add_argument("--engines", type=within(int, 1), default=8, help="default: 8")
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            type=within(int, 1),
            default=0,
            help=f"number of engines that only {role}, in place of --engines",
        )
    parser.add_argument(
        "--transfer-ms",
        type=within(float, 0.0),
        default=5.0,
        help="time to transfer the blocks of 1000 tokens from one engine to another; default: 5",
    )
    parser.add_argument(
        "--capacity",
        type=within(int, 1),
        default=3_000,
        help="capacity of each engine's cache, in blocks of 512 tokens; default: 3000",
    )
    parser.add_argument(
        "--slowness",
        type=_factors,
        default=[1.0],
        help="slowness of engines, assigned in turn: 1,2.5 slows down half of them",
    )
    parser.add_argument(
        "--selectors",
        type=within(int, 1),
        default=1,
        help="number of selectors, which share all engines and get requests in turn; default: 1",
    )
    parser.add_argument(
        "--sync-ms",
        type=_sync_ms,
        default=1.0,
        help="delay until selectors know each other's reservations; none: never; default: 1",
    )
    parser.add_argument(
        "--spread",
        action="store_true",
        help="spread requests with the same arrival time until the next arrival time",
    )
    parser.add_argument(
        "--within", type=_factor, default=2.0, help="limit for the time to first token; default: 2"
    )
    parser.add_argument(
        "--ids",
        metavar="RATE,RATE,...",
        type=_factors,
        default=[],
        help="fairness ids among whom the requests are dealt out, by their rates; adds a row for "
        "each",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for ties; default: 0")
    parser.add_argument("--json", type=Path, help="write the figures to this file")


def main(argv: Sequence[str]) -> int:
    """Prints a table of policies. Return 0; 1 if the trace is unreadable; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="lean-selector simulate",
        description="Serve a trace in virtual time with each policy in turn: the selector's own "
        "core, or a simple rule, in front of engines with chunked prefill and a cache.",
    )
    add_arguments(parser)
    options = parser.parse_args(argv)
    return status_of(parser.prog, lambda: compare(options))


def status_of(prog: str, work: Callable[[], None]) -> int:
    """Runs `work`. Return 0; 1 after a ServiceError or OSError (printed); 130 after Ctrl-C."""
    try:
        work()
    except (ServiceError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    return 0


class Progress:
    """Shows progress on stderr, in a line that is updated; nothing if stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._is_terminal = sys.stderr.isatty()
        self._next = time.monotonic() + _PROGRESS_S

    def show(self, policy: str, done: int) -> None:
        if self._is_terminal and time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS_S
            text = f"\r{policy}: {done} of {self._total} requests\x1b[K"
            print(text, end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def compare(options: argparse.Namespace) -> None:
    """Prints each policy's results as soon as they are known. Raises ServiceError and OSError."""
    lines = list(trace_lines(options.trace, options.requests))
    if not lines:
        raise ServiceError("the trace has no request")
    sync_s = None if options.sync_ms is None else options.sync_ms / 1e3
    apart = options.prefill + options.decode
    fleet = SimulatedFleet(
        apart or options.engines,
        options.capacity,
        options.slowness,
        options.selectors,
        sync_s,
        prefill=options.prefill,
        decode=options.decode,
        transfer_s=options.transfer_ms / 1e3,
    )
    policies = options.policy or [policy_of(text) for text in (_OWN if apart else _DEFAULT)]
    if apart and not (options.prefill and options.decode):
        raise ServiceError("--prefill and --decode need each other")
    for policy in policies:
        if apart and policy.rule is not None:
            raise ServiceError(f"{policy.name} chooses no pairs: leave out --prefill and --decode")
    progress, outcomes = Progress(len(lines)), list[Outcome]()
    width = max(len(policy.name) for policy in policies) + 5 * bool(options.ids)
    print("\n".join(header(options, width, len(lines))), flush=True)
    for policy in policies:
        requests = requests_of(lines, options.load, options.spread)
        if options.ids:
            deal(requests, options.ids)
        simulation = Simulation(policy, fleet, options.seed)
        simulation.run(requests, partial(progress.show, policy.name))
        progress.clear()
        for name, some in [(policy.name, requests), *_by_id(policy.name, requests)]:
            row = outcome(name, some, simulation.prefilling, options.within)
            outcomes.append(row)
            print(line_of(row, width), flush=True)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)) + b"\n")


def _by_id(
    policy: str, requests: Sequence[SimulatedRequest]
) -> Iterator[tuple[str, list[SimulatedRequest]]]:
    for name in sorted({request.fairness_id for request in requests} - {""}):
        yield f"{policy} id {name}", [each for each in requests if each.fairness_id == name]


def header(options: argparse.Namespace, width: int, requests: int) -> list[str]:
    """Return a description of the simulation, and the header of a Markdown table."""
    name = "made up" if options.trace is None else os.path.basename(options.trace)
    more = (
        ""
        if options.slowness == [1.0]
        else f", slowness {','.join(map('{:g}'.format, options.slowness))}"
    )
    if options.selectors > 1:
        sync = "no sync" if options.sync_ms is None else f"synced within {options.sync_ms:g} ms"
        more += f"; {options.selectors} selectors, {sync}"
    within, engines = f"within {options.within:g} s", f"{options.engines} engines"
    if options.prefill:
        engines = f"{options.prefill} prefill and {options.decode} decode engines"
        more += f"; {options.transfer_ms:g} ms to transfer 1000 tokens"
    return [
        f"{name}: {requests} requests at load {options.load:g}; {engines} of "
        f"{options.capacity} blocks{more}",
        "",
        f"| {'policy':<{width}} | mean TTFT |     p50 |     p99 |  hits | {within:>12} | ITL p99"
        " | imbalance |",
        f"|{'-' * (width + 2)}|----------:|--------:|--------:|------:|-------------:|--------:"
        "|----------:|",
    ]


def line_of(row: Outcome, width: int) -> str:
    return (
        f"| {row.policy:<{width}} | {row.ttft_mean_s:7.2f} s | {row.ttft_p50_s:5.2f} s"
        f" | {row.ttft_p99_s:5.2f} s | {row.hit_rate:5.1%} | {row.within_share:12.1%}"
        f" | {row.token_gap_p99_s * 1e3:4.0f} ms | {row.imbalance:9.2f} |"
    )
