"""The cases over HTTP, by stages that share their processes, and how their rounds are run."""

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from loadtest.duel.engines import Engines
from loadtest.duel.prompts import (
    Prompt,
    Prompts,
    lifecycle_requests,
    msgpack_select_request,
    select_request,
)
from loadtest.duel.results import (
    CONNECTIONS,
    RequestFile,
    Results,
    client_load,
    closed_load,
    latencies,
    open_load,
    say,
)
from loadtest.duel.targets import Pair, Service, Target

# -- the cases -------------------------------------------------------------------------------------
# A stage is a set of fresh processes, one per target, that hear the same engines and so have one
# index; its cases run on them in rounds, the targets taking turns, each given the same requests.

BLOCK_SIZE = 16  # tokens, where a stage does not say otherwise
OPEN_RATE = 1_000.0  # selections a second
_FEW = 0.2  # of the holdings, where it is not the index that is compared


class Plan(msgspec.Struct, frozen=True):
    """How much of everything: the default, or tiny for --quick."""

    targets: list[Target]
    trace: Path | None
    rounds: int = 3
    holdings: int = 500_000  # blocks of BLOCK_SIZE in the index, each engine's counted
    many_holdings: int = 1_000_000
    share: float = 1.0  # of the requests of a round
    most_workers: int = 4_096
    open_seconds: float = 2.1  # of each round, in which 1 000 requests a second are due
    churn_seconds: float = 6.0
    idle_seconds: float = 0.5  # in which a process has nothing to do


class Case(msgspec.Struct, frozen=True):
    """One row of the tables.

    blocks: length of the prompts, None for the trace's own. prompts: how many in a round.
    events: the engines store EVENTS_PER_S meanwhile. rate: requests a second, None for closed load.
    client: our own client sends, over `tcp` or `unix` (which only we serve); empty for wrk.
    asks: what else stands in the body of a select.
    """

    name: str
    kind: str  # select, lifecycle, msgpack
    blocks: int | None
    prompts: int
    events: bool = False
    rate: float | None = None
    client: str = ""
    asks: dict[str, object] = {}


class Stage(msgspec.Struct, frozen=True):
    """Cases that share their processes.

    one_core: every service runs on one and the same CPU, the client on the others. replicas: every
    service has a second of its kind as its peer. process: a row says what the processes take.
    options: environment of the services, in the names that all of them know. loaded: every worker
    has reservations, no two the same load. offloads: the engines keep what they store on their
    hosts too, and half of it only there. listens: to engines; if not, nothing is cached. share: of
    the holdings.
    """

    workers: int
    cases: list[Case]
    block_size: int = BLOCK_SIZE
    one_core: bool = False
    replicas: bool = False
    process: bool = False
    options: dict[str, str] = {}
    loaded: bool = False
    offloads: bool = False
    listens: bool = True
    share: float = 1.0

    @property
    def process_case(self) -> str:
        return f"process, {self.workers} workers"

    def names(self) -> list[str]:
        """Of everything that a run of this stage can tell."""
        return [case.name for case in self.cases] + [self.process_case] * self.process


def stages(plan: Plan) -> list[Stage]:
    """All stages over HTTP. The requests of a round are a tenth of a second of work or more."""

    def select(blocks: int | None, workers: int, prompts: int, size: int = BLOCK_SIZE) -> Case:
        what = f"{blocks} blocks" if blocks else f"trace prompts at {size}"
        return Case(f"select, {what}, {workers} workers", "select", blocks, prompts)

    traced = "trace prompts at 16"
    # The trace has 12 031 requests; the index takes the first 600 to 900, and no case may use one
    # twice: prompts x rounds of a stage stay below 11 000, at 5 rounds.
    short = [select(8, 16, 20_000), select(64, 16, 10_000), select(512, 16, 2_000)]
    long = [select(4_096, 16, 300), select(None, 16, 2_000)]
    mixed = [
        Case("lifecycle, 8 blocks, 16 workers", "lifecycle", 8, 8_000),
        Case(f"lifecycle, {traced}, 16 workers", "lifecycle", None, 730),
        Case(f"select while ingesting, {traced}, 16 workers", "select", None, 730, events=True),
        Case(f"select as msgpack, {traced}, 16 workers", "msgpack", None, 730),
    ]
    by_ours = "select by our client over"
    by_client = [
        Case(f"{by_ours} {words}, 8 blocks, 16 workers", "select", 8, 6_000, client=to)
        for to, words in (("tcp", "TCP"), ("unix", "a UNIX socket"))
    ]
    fixed_name = f"select at a fixed rate while ingesting, {traced}, 16 workers"
    open_prompts = round(OPEN_RATE * plan.open_seconds)
    fixed = Case(fixed_name, "select", None, open_prompts, events=True, rate=OPEN_RATE)
    one_core = Case("select on one core, 8 blocks, 16 workers", "select", 8, 20_000)
    synced = Case(f"lifecycle with a replica, {traced}, 16 workers", "lifecycle", None, 900)
    return [
        Stage(16, [*short, *long], process=True),
        Stage(16, [*mixed, *by_client]),
        Stage(16, [fixed]),
        Stage(16, [select(None, 16, 2_000, 64)], block_size=64),
        Stage(16, [one_core], one_core=True),
        Stage(16, [synced], replicas=True),
        Stage(128, [select(8, 128, 20_000), select(None, 128, 1_000)]),
        Stage(512, [select(8, 512, 10_000), select(None, 512, 1_000)], process=True),
        *_option_stages(),
        *(
            Stage(n, [_loaded(n, "no events")], loaded=True, listens=False, options=_DEAF)
            for n in (16, 4_096)
        ),
    ]


# Every option of a selection that makes it differ by worker: in the body, or for the whole process.
_PREFERRED = {"zone-1": 0.5, "zone-2": -0.5}
_ASKED: dict[str, dict[str, object]] = {
    "nothing": {},
    "temperature": {"router_config_override": {"router_temperature": 0.5}},
    "allowed workers": {"allowed_worker_ids": list(range(1, 513, 8))},
    "required taint": {"routing_constraints": {"required_taints": ["zone-1"]}},
    "preferred taints": {"routing_constraints": {"preferred_taints": _PREFERRED}},
}
_DEAF = {"DYN_USE_KV_EVENTS": "false"}
_SET: dict[str, dict[str, str]] = {
    "queue threshold": {"DYN_ROUTER_QUEUE_THRESHOLD": "16"},
    "credit decay": {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": "0.5"},
}


def with_option(option: str, workers: int = 512) -> str:
    """The name of the case of a select with an option, "nothing" being one."""
    return f"select with {option}, 8 blocks, {workers} loaded workers"


def _loaded(workers: int, option: str, asks: dict[str, object] | None = None) -> Case:
    return Case(with_option(option, workers), "select", 8, 10_000, asks=asks or {})


def _option_stages() -> list[Stage]:
    """Each option at 512 ranks, where no two have the same load; the first is without any."""
    asked = [_loaded(512, option, asks) for option, asks in _ASKED.items()]
    return [
        Stage(512, asked, loaded=True, share=_FEW),
        *(
            Stage(512, [_loaded(512, option)], options=options, loaded=True, share=_FEW)
            for option, options in _SET.items()
        ),
        Stage(512, [_loaded(512, "lower tiers")], loaded=True, offloads=True, share=_FEW),
    ]


# -- a stage, run ----------------------------------------------------------------------------------

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
    """One stage under way. Raises ServiceError."""

    def __init__(self, stage: Stage, plan: Plan, prompts: Prompts, results: Results) -> None:
        self._stage, self._plan, self._prompts, self._results = stage, plan, prompts, results
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
            targets = [msgspec.structs.replace(t, options=stage.options) for t in plan.targets]
            pairs = [
                stack.enter_context(Pair(target, stage.replicas, self._service_cpus))
                for target in targets
            ]
            services = [service for pair in pairs for service in pair.services]
            for service in services:
                service.wait()
            time.sleep(plan.idle_seconds)  # for what a start leaves to the background
            if stage.process and wanted(stage.process_case):
                self._account("process, after start", services)
            how: dict[str, Any] = {"offloads": stage.offloads, "listened": stage.listens}
            engines = stack.enter_context(Engines(self._prompts, self._workers, capacity, **how))
            for service in services:
                engines.register(service)
            engines.send(engines.fill(holdings))
            if stage.offloads:  # as much again: what the devices evict for it stays on the hosts
                engines.send(engines.churn(holdings))
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
            for number in range(plan.rounds):
                for case in cases:
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
            idle_ms_per_s = (service.cpu_ns() - cpu) / 1e6 / self._plan.idle_seconds
            taken = service.footprint()
            self._results.add(name, service.name, idle_cpu_ms_per_s=idle_ms_per_s, **taken)

    def _round(self, case: Case, number: int, pairs: Sequence[Pair], engines: Engines) -> None:
        say(f"{case.name}: round {number + 1}")
        prompts = self._next_prompts(case)
        only_ours = case.kind == "msgpack" or case.client == "unix"
        asked = [pair for pair in pairs if not only_ours or pair.main.target.is_ours]
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
        return [self._prompts.cut(first + i, case.blocks, self._known) for i in range(count)]

    def _measure(self, case: Case, pair: Pair, file: RequestFile, engines: Engines) -> None:
        service, name = pair.main, pair.main.name
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
        self._results.add(case.name, name, load.bad, **metrics)


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
