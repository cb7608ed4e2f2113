"""What fair shares do for a quiet client beside one that floods the queue, in virtual time.

    python -m loadtest.fairness

Generated conversations are dealt to two ids, of which one sends ten times as many, at about twice
what the engines can compute. Three queues are compared: without fair shares, with them, and an
ideal that serves the two ids in turn, request by request (each request counts the same)."""

import sys
from statistics import fmean

from lean_selector.core.selection.fair_shares import FairShares
from lean_selector.core.selection.shapes import Placement, SelectionRequest
from lean_selector.tools.batching_engine import SimulatedRequest
from lean_selector.tools.simulate import policy_of
from lean_selector.tools.simulation import SimulatedFleet, Simulation, deal, requests_of
from lean_selector.tools.trace import trace_lines
from lean_selector.tools.traffic import percentile

REQUESTS, LOAD, ENGINES, SEED = 3_000, 2.0, 4, 0
_charge = FairShares.charge


def _charge_a_turn(shares: FairShares, request: SelectionRequest, placement: Placement) -> None:
    shares._share(request.fairness_id).service += 1.0


def row_of(name: str, requests: list[SimulatedRequest]) -> str:
    cells = []
    for who in ("2", "1"):
        times = sorted(each.ttft_s for each in requests if each.fairness_id == who)
        cells += [f"{fmean(times):.1f} s", f"{percentile(times, 0.99):.1f} s"]
    rate = len(requests) / max(each.ended_at for each in requests)
    return f"| {name} | {' | '.join(cells)} | {rate:.2f} /s |"


def main() -> int:
    lines = list(trace_lines(None, REQUESTS))
    print("| queue | quiet: mean TTFT | p99 | busy: mean TTFT | p99 | throughput |")
    print("|---|---|---|---|---|---|")
    for policy in ("dynamo", "latency"):
        for name, fairness in (("off", "off"), ("on", "on"), ("in turn", "on")):
            charge = _charge_a_turn if name == "in turn" else _charge
            FairShares.charge = charge  # type: ignore[method-assign,assignment]
            requests = requests_of(lines, LOAD)
            deal(requests, [10, 1])
            settings = f"queue_threshold=2,queue_fairness={fairness}"
            played = Simulation(policy_of(f"{policy}:{settings}"), SimulatedFleet(ENGINES), SEED)
            played.run(requests)
            print(row_of(f"`{policy}`, {name}", requests), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
