"""Where is `--policy latency` worse than something simpler? A trace in virtual time, over a grid.

    python -m loadtest.policy_sweep TRACE [--requests N] [--seeds N]

Every load, capacity and number of engines is served by round-robin, least-loaded, LMetric, Dynamo's
cost at several prefill scales, and `latency`. Loads are per 8 engines: twice the engines get twice
the requests a second. A row is a cell of the grid; at the end stand those in which the mean time to
first token is more than 3 % above the best of the others.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean

from lean_selector.tools.simulate import policy_of
from lean_selector.tools.simulation import SimulatedFleet, Simulation, requests_of
from lean_selector.tools.trace import trace_lines
from lean_selector.wire.decision_lines import DecisionLine

LOADS = (0.2, 1.0, 2.4)
CAPACITIES = (500, 3_000, 10_000)
ENGINES = (2, 8, 32)
SCALES = (1, 3, 10)
OTHERS = (
    "round-robin",
    "least-loaded",
    "lmetric",
    *(f"dynamo:prefill_load_scale={scale}" for scale in SCALES),
)
TOLERANCE = 1.03


def mean_ttft_s(
    lines: list[DecisionLine], policy: str, load: float, capacity: int, engines: int, seeds: int
) -> float:
    """Over all requests, and over as many runs as there are seeds."""
    means = []
    for seed in range(seeds):
        requests = requests_of(lines, load * engines / 8)
        Simulation(policy_of(policy), SimulatedFleet(engines, capacity), seed).run(requests)
        means.append(fmean(request.ttft_s for request in requests))
    return fmean(means)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    lines = list(trace_lines(options.trace, options.requests))
    print("| engines | blocks | load | latency | best of the others | ratio | dynamo |")
    print("|--------:|-------:|-----:|--------:|:-------------------|------:|-------:|")
    ratios, worse = [], []
    for engines in ENGINES:
        for capacity in CAPACITIES:
            for load in LOADS:
                cell = (load, capacity, engines, options.seeds)
                found = {each: mean_ttft_s(lines, each, *cell) for each in OTHERS}
                own = mean_ttft_s(lines, "latency", *cell)
                best = min(found, key=found.__getitem__)
                ratios.append(own / found[best])
                row = (
                    f"| {engines} | {capacity} | {load:g} | {own:.3f} s"
                    f" | {best} {found[best]:.3f} s | {ratios[-1]:.3f} | {found[OTHERS[3]]:.3f} s |"
                )
                print(row, flush=True)
                if ratios[-1] > TOLERANCE:
                    worse.append(row)
    print(
        f"\n{len(ratios)} cells; ratio {fmean(ratios):.3f} in the mean, {max(ratios):.3f} at most"
    )
    print("\n".join([f"worse by more than 3 % in {len(worse)}:", *worse]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
