"""Whether `lean_selector_saturation` makes an autoscaler come before requests are shed.

    python -m loadtest.autoscaling

Generated conversations at a rate that triples after 200 s are played in virtual time to 2 engines.
Requests are shed at 85 % of an engine's KV blocks, or at 40 000 waiting prompt tokens (five prompts
of the mean length). An autoscaler looks every 15 s, as Kubernetes'
does, and asks for (engines that serve) * saturation / target; an engine comes 60 s after it was
asked for. At most twice the engines are asked for at once, and none leaves."""

import math
import sys
from statistics import fmean

from lean_selector.core.errors import AllWorkersBusy
from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.core.selection.inspection import saturation
from lean_selector.tools.batching_engine import SimulatedRequest
from lean_selector.tools.simulate import policy_of
from lean_selector.tools.simulation import SimulatedFleet, Simulation, _Router, requests_of
from lean_selector.tools.trace import trace_lines
from lean_selector.tools.traffic import percentile

ENGINES, MOST, CAPACITY = 2, 16, 300
LATE_S, EVERY_S, RISES_AT_S, RATE = 60.0, 15.0, 200.0, 3.0
SHEDS_AT, PREFILL_TOKENS = 0.85, 40_000


class ScaledSimulation(Simulation):
    """A simulation whose engines become more."""

    def __init__(self, target: float | None, until_s: float) -> None:
        self._fleet = SimulatedFleet(ENGINES, CAPACITY)
        super().__init__(policy_of("dynamo"), self._fleet)
        self._target = target
        self._until_s = until_s
        self._asked = ENGINES
        self.shed: list[SimulatedRequest] = []
        (router,) = self._routers
        key = router.partition.model_name, router.partition.tenant_id
        router.selector.change_threshold(key, BusyThreshold(SHEDS_AT, PREFILL_TOKENS), 0.0)
        self._router = router
        if target is not None:
            self._do_at(EVERY_S, self._look)

    def _look(self) -> None:
        assert self._target is not None
        serving = len(self.engines)
        wanted = math.ceil(serving * saturation(self._router.partition) / self._target)
        for _ in range(min(wanted, 2 * serving, MOST) - self._asked):
            self._asked += 1
            self._do_at(self._now + LATE_S, self._come)
        if self._now < self._until_s:
            self._do_at(self._now + EVERY_S, self._look)

    def _come(self) -> None:
        worker_id = len(self.engines) + 1
        self.engines[worker_id] = self._fleet.engine(worker_id)
        self._router.selector.upsert_worker(self._fleet.spec(worker_id), self._now)

    def _arrive(self, request: SimulatedRequest, router: _Router) -> None:
        try:
            super()._arrive(request, router)
        except AllWorkersBusy:
            self.shed.append(request)


def rising(requests: list[SimulatedRequest]) -> list[SimulatedRequest]:
    for request in requests:
        late = request.arrived_at - RISES_AT_S
        if late > 0:
            request.arrived_at = RISES_AT_S + late / RATE
    return requests


def main() -> int:
    lines = list(trace_lines(None, 3_000))
    print("| target | shed | of these, later than 180 s after the rise | engines at the end "
          "| mean TTFT | p99 |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for target in (None, 1.2, 1.0, 0.7, 0.5):
        requests = rising(requests_of(lines, 0.5))
        played = ScaledSimulation(target, requests[-1].arrived_at)
        played.run(requests)
        shed = {id(each) for each in played.shed}
        times = sorted(each.ttft_s for each in requests if id(each) not in shed)
        late = sum(each.arrived_at > RISES_AT_S + 180.0 for each in played.shed)
        print(
            f"| {target or 'no autoscaler'} | {len(shed) / len(requests):.1%} "
            f"| {late / len(requests):.1%} | {len(played.engines)} "
            f"| {fmean(times):.2f} s | {percentile(times, 0.99):.2f} s |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
