"""Measures this service beside the reference: the same fleet, the same index, the same requests.

    python loadtest/versus.py [--trace FILE] [--reference 1.3.1] [--cases REGEX] [--quick]

See loadtest/README.md for what is measured and how. The work is done in `loadtest/duel/`; here are
the options, the order of things, the limits of this process, and the way out: every child is
stopped, whatever signal ends it.
"""

import argparse
import datetime
import os
import platform
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

if __name__ == "__main__":
    # Run as a file, Python looks for modules beside it; those here are named from the root.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from lean_selector.tools.service_process import ServiceError
from loadtest.duel import index, report
from loadtest.duel.prompts import Prompts
from loadtest.duel.results import FAILURES, STARTED, Results
from loadtest.duel.stages import Plan, StageRun, stages
from loadtest.duel.targets import forms, machine, reference

TRACE_VARIABLE = "LEAN_SELECTOR_TRACE"
DEFAULT_REFERENCE = "1.3.1"
# 512 engines and three services: the listeners and the accepted connections are ours, and one of
# the references opens ten descriptors per engine.
DESCRIPTORS = 16_384
QUICK = {
    "rounds": 1,
    "holdings": 4_000,
    "many_holdings": 8_000,
    "share": 0.004,
    "most_workers": 16,
    "open_seconds": 0.2,
    "churn_seconds": 0.3,
    "idle_seconds": 0.05,
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="versus.py", description="Measure this service beside the reference."
    )
    parser.add_argument("--cases", type=re.compile, default="", metavar="REGEX", help="only these")
    parser.add_argument("--quick", action="store_true", help="tiny rounds: shows that it works")
    parser.add_argument(
        "--trace",
        type=Path,
        default=os.environ.get(TRACE_VARIABLE) or None,
        help=f"Mooncake format, gzip or not; default: ${TRACE_VARIABLE}, else made up",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--rounds", type=int, help="of each case; default: 3")
    parser.add_argument(
        "--reference",
        action="append",
        metavar="VERSION|COMMAND",
        help=f"installed if need be, or a command line with {{port}}; default: {DEFAULT_REFERENCE}",
    )
    parser.add_argument("--compiled", metavar="PYTHON", help="it has our compiled wheel")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    return parser.parse_args(argv)


def measure(args: argparse.Namespace) -> tuple[Results, dict[str, str]]:
    """Run everything that was asked for; what fails ends its own part alone. Raises ServiceError,
    OSError and ValueError when nothing at all could be measured."""
    own = forms(args.compiled)
    others = [reference(text) for text in args.reference or [DEFAULT_REFERENCE]]
    results = Results([target.name for target in own], [target.name for target in others])
    plan = Plan([*own, *others], args.trace)
    if args.quick:
        plan = msgspec.structs.replace(plan, **QUICK)
        results.note("--quick: tiny rounds, small fleets; the figures mean nothing")
    if args.rounds:
        plan = msgspec.structs.replace(plan, rounds=args.rounds)

    def wanted(name: str) -> bool:
        return args.cases.search(name) is not None

    by_size: dict[int, Prompts] = {}
    for stage in stages(plan):
        if names := list(filter(wanted, stage.names())):
            prompts = by_size.setdefault(stage.block_size, Prompts(plan.trace, stage.block_size))
            with results.keep(names):
                StageRun(stage, plan, prompts, results).run(wanted)
    if any(map(wanted, index.NAMES)):
        prompts = by_size.setdefault(16, Prompts(plan.trace, 16))
        index.run(plan, prompts, results, wanted)
    if results.failures and not results.rounds:
        raise ServiceError(results.failures[0])
    results.note("no body was sent twice to one process, unless a line here says so")
    return results, _about(args, plan)


def _about(args: argparse.Namespace, plan: Plan) -> dict[str, str]:
    client = "wrk" if shutil.which("wrk") else "our own client (wrk is not installed)"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "python": platform.python_version(),
        "targets": ", ".join(target.name for target in plan.targets),
        "trace": args.trace.name if args.trace else "made up, in the shape of a chat trace",
        "closed load": client,
        "rounds": f"{plan.rounds}; medians; the targets take turns within each",
        "took": f"{time.monotonic() - STARTED:.0f} s",
    }


def main(argv: Sequence[str]) -> int:
    """0 when all was measured, whatever the figures are; 1 with a line for each thing that failed,
    beside the figures of all others."""
    args = parse(argv)
    if args.list:
        names = [name for stage in stages(Plan([], None)) for name in stage.names()]
        print("\n".join([*names, *index.NAMES]))
        return 0

    # As Ctrl-C does: the way out passes every `finally`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _raise_descriptors()
    try:
        results, about = measure(args)
    except FAILURES as error:
        print(f"versus: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("versus: interrupted", file=sys.stderr)
        return 1
    print(report.lines(results, about))
    if args.json:
        args.json.write_bytes(report.as_json(results, about))
    for failure in results.failures:
        print(f"versus: {failure}", file=sys.stderr)
    return 1 if results.failures else 0


def _raise_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
