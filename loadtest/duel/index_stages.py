"""What the index alone costs: ingest, removal, memory, match, and the pauses that it makes.

One target at a time, on fresh processes and fresh sockets, all given the same messages. Events come
over real PUB sockets in vLLM's layout. Does not know how figures are shown.
"""

import gc
import multiprocessing
import re
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from lean_selector.core.index.kv_index import KvIndex, Tier
from loadtest.duel.cases import Plan
from loadtest.duel.engines import EVENT_BLOCKS, Engines, Message
from loadtest.duel.load import RequestFile, closed_load, open_load
from loadtest.duel.prompts import Prompt, Prompts, select_request
from loadtest.duel.results import Results, latencies
from loadtest.duel.targets import Service, Target

WORKERS = 16
INGEST = "index, ingest of stored events"
REMOVE_ONE = "index, removal, one block an event"
REMOVE_MANY = "index, removal, 64 blocks an event"
MEMORY = "index, memory per block-holding"
MATCH_HTTP = "index, match of a held trace prompt, by difference over HTTP"
MATCH = "index, match of a held trace prompt, in process"
MATCH_SMALL = "index, the same at 10 000 holdings"
MATCH_LARGE = "index, the same at 1 000 000 holdings"
PAUSE = "index, worst /health at 1 kHz while 1 000 000 holdings churn"
NAMES = [
    INGEST,
    REMOVE_ONE,
    REMOVE_MANY,
    MEMORY,
    MATCH_HTTP,
    MATCH,
    MATCH_SMALL,
    MATCH_LARGE,
    PAUSE,
]

LAG = "lean_selector_loop_lag_seconds"
CHURN_PER_S = 50_000.0  # blocks stored a second, and as many evicted
PING_RATE = 1_000.0
SMALL_HOLDINGS = 10_000
MATCH_PROMPTS = 600  # held ones whose match is timed, of 815 blocks in the mean
MATCH_LOOPS = 5


def run(
    plan: Plan,
    prompts: Prompts,
    results: Results,
    wanted: Callable[[str], bool],
    say: Callable[[str], None],
) -> None:
    """All index cases that are wanted. Raises TargetError and LoadFailed."""
    # A log line per selection is no part of the index: the references' quiet variants will do.
    targets = [target for target in plan.targets if target.is_ours or target.log is not None]
    if any(map(wanted, (INGEST, REMOVE_ONE, REMOVE_MANY, MEMORY, MATCH_HTTP))):
        for number in range(plan.index_rounds):
            for target in targets:
                say(f"index of {target.name}: round {number + 1}")
                _fill_and_empty(target, plan, prompts, results)
    if any(map(wanted, (MATCH, MATCH_SMALL, MATCH_LARGE))):
        say("match in process")
        _match_in_process(plan, results)
    if wanted(PAUSE):
        for target in targets:
            say(f"{PAUSE}: {target.name}")
            _pauses(target, plan, prompts, results)


def _fill_and_empty(target: Target, plan: Plan, prompts: Prompts, results: Results) -> None:
    capacity = plan.holdings  # of each: nothing is evicted
    with Service(target) as service, Engines(prompts, WORKERS, capacity) as engines:
        service.wait()
        engines.register(service)
        messages = list(engines.fill(plan.holdings))
        rss = service.footprint().rss
        cost = _cost_of(service, engines, messages)
        results.add(INGEST, target.name, block_cpu_us=cost)
        held = sum(message.stored for message in messages)
        results.add(MEMORY, target.name, holding_bytes=(service.footprint().rss - rss) / held)
        _match_by_difference(service, plan, prompts, min(engines.used, MATCH_PROMPTS), results)
        # Half of the engines tell it one way, half the other.
        for case, of, size in (
            (REMOVE_ONE, range(0, WORKERS, 2), 1),
            (REMOVE_MANY, range(1, WORKERS, 2), EVENT_BLOCKS),
        ):
            part = list(engines.empty(of, size))
            results.add(case, target.name, block_cpu_us=_cost_of(service, engines, part))


def _cost_of(service: Service, engines: Engines, messages: Sequence[Message]) -> float:
    """CPU microseconds per block to take these messages."""
    before = service.cpu_ns()
    blocks = engines.send(messages)
    engines.settle(service)
    return (service.cpu_ns() - before) / 1e3 / blocks


def _match_by_difference(
    service: Service, plan: Plan, prompts: Prompts, count: int, results: Results
) -> None:
    """A prompt that is held, against one of the same length whose first block nobody holds."""
    count = max(32, round(count * min(1.0, plan.share * 4)))
    held = [prompts.at(number) for number in range(count)]
    new = [Prompt(p.line, p.isl_tokens, b"\xff" * 8 + p.local[8:], p.sequence) for p in held]
    costs = []
    for some in (held, new):
        with RequestFile([select_request(prompt) for prompt in some]) as file:
            before = service.cpu_ns()
            closed_load(service.port, file)
            costs.append((service.cpu_ns() - before) / 1e3 / count)
    results.add(MATCH_HTTP, service.target.name, match_us=costs[0] - costs[1])


def _match_in_process(plan: Plan, results: Results) -> None:
    """Our index without a service around it, in an interpreter of its own."""
    cases = {
        MATCH_SMALL: min(SMALL_HOLDINGS, plan.holdings),
        MATCH: plan.holdings,
        MATCH_LARGE: plan.many_holdings,
    }
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for case, holdings in cases.items():
            figure = pool.apply(match_us, (plan.trace, holdings))
            results.add(case, results.ours, match_us=figure)


def match_us(trace: Path | None, holdings: int) -> float:
    """CPU microseconds per match of prompts that are held, among so many block-holdings."""
    prompts = Prompts(trace, 16)
    index, names_held = KvIndex(16), [set[int]() for _ in range(WORKERS)]
    held, used = 0, 0
    while held < holdings:
        prompt, worker = prompts.at(used), used % WORKERS
        own = (worker + 1) * 0x9E3779B97F4A7C15 & (2**63 - 1)
        names = [name ^ own for name in struct.unpack(f"<{prompt.blocks}Q", prompt.sequence)]
        known = names_held[worker]
        first = next((at for at, name in enumerate(names) if name not in known), len(names))
        for at in range(first, len(names), EVENT_BLOCKS):
            to = min(at + EVENT_BLOCKS, len(names))
            parent = names[at - 1] if at else None
            local = prompt.local[8 * at : 8 * to]
            index.store(worker, 0, Tier.DEVICE, parent, names[at:to], local)
        known.update(names)
        held += len(names) - first
        used += 1
    # The same prompts whatever is held, so that only the size of the index differs. Copies, as a
    # request's hashes are new bytes each time.
    asked = [bytes(bytearray(prompts.at(number).local)) for number in range(MATCH_PROMPTS)]
    gc.disable()
    figures = []
    for _ in range(MATCH_LOOPS):
        before = time.thread_time_ns()
        for local in asked:
            index.match(local)
        figures.append((time.thread_time_ns() - before) / 1e3 / len(asked))
    return median(figures)


def _pauses(target: Target, plan: Plan, prompts: Prompts, results: Results) -> None:
    capacity = round(plan.many_holdings * 1.02 / WORKERS) + EVENT_BLOCKS
    with Service(target) as service, Engines(prompts, WORKERS, capacity) as engines:
        service.wait()
        engines.register(service)
        engines.send(engines.fill(plan.many_holdings))
        engines.settle(service)
        events = engines.churn(round(CHURN_PER_S * (plan.churn_seconds + 0.5)))
        with RequestFile([b"GET /health HTTP/1.1\r\nhost: versus\r\n\r\n"]) as file:
            count = round(PING_RATE * plan.churn_seconds)
            calm = open_load(service.port, file, PING_RATE, max(100, count // 4))
            before = _loop_lag(service)
            with engines.paced(events, CHURN_PER_S):
                load = open_load(service.port, file, PING_RATE, count)
            after = _loop_lag(service)
        metrics = latencies(load.latencies_us)
        metrics["calm_max_us"] = float(max(calm.latencies_us))
        metrics["client_late_max_us"] = float(max(load.late_us))
        if reached := [bound for bound, samples in after.items() if samples > before.get(bound, 0)]:
            metrics["loop_lag_us"] = max(reached) * 1e6
        results.add(PAUSE, target.name, **metrics)


def _loop_lag(service: Service) -> dict[float, int]:
    """Samples of the event loop's lag that were above each bound, in seconds, if it tells them."""
    status, text = service.request("GET", "/metrics")
    if status != 200:
        return {}
    below = {
        bound: int(float(samples))
        for bound, samples in re.findall(rf'^{LAG}_bucket{{le="(.*)"}} (.*)$', text.decode(), re.M)
    }
    total = below.get("+Inf", 0)
    return {float(bound): total - samples for bound, samples in below.items() if bound != "+Inf"}
