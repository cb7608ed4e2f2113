"""What the index alone costs: ingest, removal, memory, and the pauses that it makes.

One target at a time, on fresh processes and fresh sockets, all given the same messages. Events come
over real PUB sockets, as arrays where no layout is named. Does not know how figures are shown.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from loadtest.duel.engines import ARRAYS, EVENT_BLOCKS, LAYOUTS, Engines, Layout, Message
from loadtest.duel.prompts import Prompts
from loadtest.duel.results import RequestFile, Results, latencies, open_load, say
from loadtest.duel.stages import Plan
from loadtest.duel.targets import Service, Target
from loadtest.http_client import http

WORKERS = 16
FRESH = "index, ingest of whole prompts per event, fresh"
CHURN = "index, ingest and eviction in churn, whole prompts per event"
PAUSE = "index, worst /health at 1 kHz while 1 000 000 holdings churn"
# Blocks in a stored event, None for all of a prompt's, and how a row of a layout calls it.
SIZES: dict[int | None, str] = {None: "whole prompts", 8: "8 blocks", 1: "1 block"}
CHURNED = 0.5  # of what is held, stored anew while as much is evicted
CHURN_PER_S = 50_000.0  # blocks stored a second, and as many evicted
PING_RATE = 1_000.0


class Filling(msgspec.Struct, frozen=True):
    """What fresh processes are told: first what fills them, then, if there is a second case, what
    changes them: full caches evict as they store, or all is removed, block by block."""

    cases: list[str]
    layout: Layout = ARRAYS
    size: int | None = None
    share: float = 1.0  # of the holdings
    batch_events: int = 1  # stored events of a message


def _laid_out(layout: Layout, size: int | None) -> Filling:
    """As one step of an engine tells it that has many prompts under way."""
    cases = [f"index, {layout.title}, {SIZES[size]} an event"]
    cases += [f"index, {layout.title}, removal"] * (size is None)
    return Filling(cases, layout, size, 0.3, 32)


# The first as an engine tells it that computes a prompt in one step: its new blocks in one event.
FILLINGS = [
    Filling([FRESH, CHURN]),
    *(_laid_out(layout, size) for layout in LAYOUTS for size in SIZES),
]
NAMES = [*(case for filling in FILLINGS for case in filling.cases), PAUSE]


def run(plan: Plan, prompts: Prompts, results: Results, wanted: Callable[[str], bool]) -> None:
    """All index cases that are wanted; where a target fails, the others go on."""
    for number in range(plan.rounds):
        for filling in FILLINGS:
            if names := list(filter(wanted, filling.cases)):
                say(f"{names[0]}: round {number + 1}")
                for target in plan.targets:
                    with results.keep(names):
                        _fill(target, plan, prompts, results, filling)
    if wanted(PAUSE):
        for target in plan.targets:
            say(f"{PAUSE}: {target.name}")
            with results.keep([PAUSE]):
                _pauses(target, plan, prompts, results)


@contextmanager
def _running(
    target: Target,
    prompts: Prompts,
    capacity: int,
    event_blocks: int | None = EVENT_BLOCKS,
    **how: Any,
) -> Iterator[tuple[Service, Engines]]:
    engines = Engines(prompts, WORKERS, capacity, event_blocks, **how)
    with Service(target) as service, engines:
        engines.register(service)
        yield service, engines


def _fill(target: Target, plan: Plan, prompts: Prompts, results: Results, filling: Filling) -> None:
    holdings = round(plan.holdings * filling.share)
    # Full caches where they shall evict, and elsewhere such as never do.
    churns = CHURN in filling.cases
    capacity = round(holdings * 1.02 / WORKERS) + EVENT_BLOCKS if churns else holdings
    how: dict[str, Any] = {"layout": filling.layout, "batch_events": filling.batch_events}
    with _running(target, prompts, capacity, filling.size, **how) as (service, engines):
        messages, rss_mb = list(engines.fill(holdings)), service.rss_mb()
        for case in filling.cases:
            if case == CHURN:
                messages = engines.churn(round(holdings * CHURNED))
            elif case != filling.cases[0]:
                messages = list(engines.empty(range(WORKERS)))
            results.add(case, target.name, block_cpu_us=_cost_of(service, engines, messages))
            if churns or case == filling.cases[0]:
                taken = 1e6 * (service.rss_mb() - rss_mb) / engines.holdings
                results.add(case, target.name, holding_bytes=taken)


def _cost_of(service: Service, engines: Engines, messages: Sequence[Message]) -> float:
    """CPU microseconds per block to take these messages."""
    before = service.cpu_ns()
    blocks = engines.send(messages)
    engines.settle(service)
    return (service.cpu_ns() - before) / 1e3 / blocks


# -- pauses ----------------------------------------------------------------------------------------


def _pauses(target: Target, plan: Plan, prompts: Prompts, results: Results) -> None:
    capacity = round(plan.many_holdings * 1.02 / WORKERS) + EVENT_BLOCKS
    with _running(target, prompts, capacity) as (service, engines):
        engines.send(engines.fill(plan.many_holdings))
        engines.settle(service)
        events = engines.churn(round(CHURN_PER_S * (plan.churn_seconds + 0.5)))
        with RequestFile([http("GET", "/health")]) as file:
            count = round(PING_RATE * plan.churn_seconds)
            calm = open_load(service.port, file, PING_RATE, max(100, count // 4))
            with engines.paced(events, CHURN_PER_S):
                load = open_load(service.port, file, PING_RATE, count)
        metrics = latencies(load.latencies_us)
        metrics["calm_max_us"] = float(max(calm.latencies_us))
        metrics["client_late_max_us"] = float(max(load.late_us))
        results.add(PAUSE, target.name, calm.bad + load.bad, **metrics)
