"""Runs the cases of one stage, and measures their rounds.

A stage is a set of fresh processes, one per target, that hear the same engines and so hold the same
index; its cases run on them in rounds, the targets taking turns, each given the same requests.
Which cases there are is `cases`'s; how figures are shown, `report`'s.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext

from loadtest.duel.cases import BLOCK_SIZE, Case, Plan, Stage
from loadtest.duel.engines import Engines
from loadtest.duel.load import CONNECTIONS, RequestFile, client_load, closed_load, open_load
from loadtest.duel.prompts import (
    Prompt,
    Prompts,
    lifecycle_requests,
    msgpack_select_request,
    select_request,
)
from loadtest.duel.replicas import Pair
from loadtest.duel.results import Results, latencies
from loadtest.duel.targets import Service

EVENTS_PER_S = 20_000.0  # blocks stored a second; about as many are evicted meanwhile
_SPARE = 1.05  # of the caches, so that round-robin fills them without evicting much
_CLOSED_S = 300e-6  # of closed load per request, at most, for as long as events must last
_LEAST_PROMPTS = 64  # two for each connection
_LEAST_CAPACITY = 8_192  # blocks; the longest prompts of the trace have 7 900 of 16 tokens


def _split(case: Case, lanes: list[list[bytes]]) -> tuple[list[list[bytes]], list[list[bytes]]]:
    """What is sent first, uncounted, and what is measured.

    The other targets have just had the machine: without the first fifth, a round of a few hundred
    requests would measure cold caches. Lifecycles cannot be cut, and an open load runs for longer.
    """
    if len(lanes) > 1 or case.rate is not None:
        return [[]], lanes
    (requests,) = lanes
    first = len(requests) // 5
    return [requests[:first]], [requests[first:]]


class StageRun:
    """One stage under way. Raises TargetError and LoadFailed."""

    def __init__(
        self,
        stage: Stage,
        plan: Plan,
        prompts: Prompts,
        results: Results,
        say: Callable[[str], None],
    ) -> None:
        self._stage, self._plan, self._prompts = stage, plan, prompts
        self._results, self._say = results, say
        self._workers = min(stage.workers, plan.most_workers)
        self._known = 0  # prompts of the trace that engines hold
        self._next_cut = 0  # number of the next prompt of a chosen length
        self._next_traced = 0  # and of the next prompt of the trace
        cpus = sorted(os.sched_getaffinity(0))
        self._service_cpus: Collection[int] = cpus[-1:] if stage.one_core else ()
        self._client_cpus: Collection[int] = cpus[:-1] if stage.one_core else ()

    def run(self, wanted: Callable[[str], bool]) -> None:
        """Start, fill, and run the cases whose names are wanted."""
        stage, plan = self._stage, self._plan
        cases = [case for case in stage.cases if wanted(case.name)]
        holdings = round(plan.holdings * stage.share) * BLOCK_SIZE // stage.block_size
        if stage.offloads:
            holdings //= 2
        capacity = max(_LEAST_CAPACITY, round(holdings * _SPARE / self._workers))
        with ExitStack() as stack:
            pairs = [
                stack.enter_context(
                    Pair(target.with_options(stage.options), stage.replicas, self._service_cpus)
                )
                for target in plan.targets
            ]
            services = [service for pair in pairs for service in pair.services]
            for service in services:
                service.wait()
            time.sleep(plan.idle_seconds)  # for what a start leaves to the background
            if stage.process and wanted(stage.process_case):
                self._account("process, after start", services)
            engines = stack.enter_context(
                Engines(
                    self._prompts,
                    self._workers,
                    capacity,
                    offloads=stage.offloads,
                    listened=stage.listens,
                )
            )
            for service in services:
                engines.register(service)
            engines.send(engines.fill(holdings))
            if stage.offloads:  # as much again: what the devices evict for it stays on the hosts
                engines.send(engines.churn(holdings))
            if stage.opening:
                engines.send(engines.share_opening())
            engines.settle(*services)
            for pair in pairs:
                pair.wait_until_linked()
            if stage.loaded:
                for pair in pairs:
                    engines.book(pair.main)
            self._next_traced = engines.used
            self._known = max(1, engines.used)
            if stage.process and wanted(stage.process_case):
                self._account(stage.process_case, services)
            for number in range(max(plan.rounds, plan.open_rounds)):
                for case in cases:
                    if number < plan.rounds_of(case):
                        self._round(case, number, pairs, engines)
        if repeats := self._prompts.repeats(self._next_traced):
            self._results.note(
                f"{repeats} prompts of the trace were used a second time with {stage.workers}"
                f" workers and blocks of {stage.block_size}: the trace is too short"
            )

    def _account(self, name: str, services: Sequence[Service]) -> None:
        before = [service.cpu_ns() for service in services]
        time.sleep(self._plan.idle_seconds)
        for service, cpu in zip(services, before, strict=True):
            taken = service.footprint()
            self._results.add(
                name,
                service.target.name,
                rss_mb=taken.rss / 1e6,
                pss_mb=taken.pss / 1e6,
                threads=taken.threads,
                descriptors=taken.descriptors,
                idle_cpu_ms_per_s=(service.cpu_ns() - cpu) / 1e6 / self._plan.idle_seconds,
            )

    def _round(self, case: Case, number: int, pairs: Sequence[Pair], engines: Engines) -> None:
        if case.name in self._results.skipped:
            return
        self._say(f"{case.name}: round {number + 1}")
        prompts = self._next_prompts(case)
        only_ours = case.kind == "msgpack" or case.client == "unix"
        asked = [pair for pair in pairs if not only_ours or pair.main.target.is_ours]
        if case.kind == "msgpack" and (
            reason := _refusal(asked[0].main, msgpack_select_request(prompts[0]))
        ):
            self._results.skipped[case.name] = reason
            return
        first = number % len(asked)  # the targets take turns in going first
        with ExitStack() as stack:
            files = dict[str, tuple[RequestFile, RequestFile]]()  # services differ by a name only
            for pair in asked[first:] + asked[:first]:
                name = pair.main.id_field if case.kind == "lifecycle" else ""
                if name not in files:
                    warming, measured = _split(case, _requests(case, prompts, number, name))
                    files[name] = (
                        stack.enter_context(RequestFile(*warming)),
                        stack.enter_context(RequestFile(*measured)),
                    )
                first_file, file = files[name]
                pair.main.empty_log()
                if first_file.count:
                    closed_load(pair.main.port, first_file, self._client_cpus)
                self._measure(case, pair, file, engines)

    def _next_prompts(self, case: Case) -> list[Prompt]:
        """Of one round."""
        count = max(_LEAST_PROMPTS, round(case.prompts * self._plan.share))
        if case.blocks is None:
            first = self._next_traced
            self._next_traced += count
            return [self._prompts.at(first + i) for i in range(count)]
        first = self._next_cut
        self._next_cut += count
        if self._stage.opening:
            return [self._prompts.behind_opening(first + i, case.blocks) for i in range(count)]
        return [self._prompts.cut(first + i, case.blocks, self._known) for i in range(count)]

    def _measure(self, case: Case, pair: Pair, file: RequestFile, engines: Engines) -> None:
        service, name = pair.main, pair.main.target.name
        seconds = file.count / case.rate if case.rate else file.count * _CLOSED_S
        events = engines.churn(round(EVENTS_PER_S * (seconds + 0.2))) if case.events else []
        before, peer_before = service.cpu_ns(), pair.peer_cpu_ns()
        with engines.paced(events, EVENTS_PER_S) if case.events else nullcontext():
            if case.client:
                address = service.uds if case.client == "unix" else str(service.port)
                load = client_load(address, file, self._client_cpus)
            elif case.rate is None:
                load = closed_load(service.port, file, self._client_cpus)
            else:
                load = open_load(service.port, file, case.rate)
        metrics = {"cpu_us": (service.cpu_ns() - before) / 1e3 / file.count}
        if case.rate is None:
            metrics |= {"rps": load.requests / load.seconds}
            metrics |= {"p50_us": load.p50_us, "p99_us": load.p99_us}
        else:
            metrics |= latencies(load.latencies_us)
            metrics["client_late_p999_us"] = latencies(load.late_us)["open_p999_us"]
        if pair.peer is not None:
            pair.wait_until_equal()
            metrics["peer_cpu_us"] = (pair.peer_cpu_ns() - peer_before) / 1e3 / file.count
        if case.events:
            engines.settle(service)
        self._results.add(case.name, name, **metrics)
        self._results.refused(case.name, name, load.bad)


def _requests(
    case: Case, prompts: Sequence[Prompt], number: int, id_field: str
) -> list[list[bytes]]:
    """One lane of requests that need nothing of each other, or one for each connection."""
    if case.kind == "lifecycle":
        return [
            lifecycle_requests(prompts[lane::CONNECTIONS], f"r{number}-{lane}", id_field)
            for lane in range(CONNECTIONS)
        ]
    if case.kind == "msgpack":
        return [[msgpack_select_request(prompt) for prompt in prompts]]
    return [[select_request(prompt, case.asks) for prompt in prompts]]


def _refusal(service: Service, request: bytes) -> str:
    """Why a service does not take this MessagePack body; empty when it does."""
    body = request.partition(b"\r\n\r\n")[2]
    headers = {"content-type": "application/msgpack"}
    status, answer = service.request("POST", "/select", body, headers)
    if status == 415:
        return "skipped: the service answers 415 to application/msgpack"
    return "" if status == 200 else f"skipped: {status} {answer.decode(errors='replace')[:200]}"
