"""What the index alone costs: ingest, removal, memory, and the pauses that it makes.

One target at a time, on fresh processes and fresh sockets, all given the same messages. Events come
over real PUB sockets, as arrays where no layout is named. Does not know how figures are shown.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from loadtest.duel.engines import EVENT_BLOCKS, LAYOUTS, Engines, Layout, Message
from loadtest.duel.prompts import Prompts
from loadtest.duel.results import RequestFile, Results, latencies, open_load
from loadtest.duel.stages import Plan
from loadtest.duel.targets import Service, Target
from loadtest.http_client import http

WORKERS = 16
FRESH = "index, ingest of whole prompts per event, fresh"
FRESH_MEMORY = "index, memory per block-holding, fresh, whole prompts per event"
CHURN = "index, ingest and eviction in churn, whole prompts per event"
CHURN_MEMORY = "index, memory per block-holding after churn"
PAUSE = "index, worst /health at 1 kHz while 1 000 000 holdings churn"
_CHURNED = [FRESH, FRESH_MEMORY, CHURN, CHURN_MEMORY]
# Blocks in a stored event, None for all of a prompt's, and how a row of a layout calls it.
SIZES: dict[int | None, str] = {None: "whole prompts", 8: "8 blocks", 1: "1 block"}
BATCH_EVENTS = 32  # stored events of a message: what one step of an engine tells
LAYOUT_SHARE = 0.3  # of the holdings


def of_layout(layout: Layout, size: int | None) -> str:
    """The case of stored events of a layout."""
    return f"index, {layout.title}, {SIZES[size]} an event"


def removal_of(layout: Layout) -> str:
    """The case in which one event removes one block."""
    return f"index, {layout.title}, removal"


_LAID_OUT = [
    name
    for layout in LAYOUTS
    for name in (*(of_layout(layout, size) for size in SIZES), removal_of(layout))
]
NAMES = [*_CHURNED, *_LAID_OUT, PAUSE]

CHURNED = 0.5  # of what is held, stored anew while as much is evicted
CHURN_PER_S = 50_000.0  # blocks stored a second, and as many evicted
PING_RATE = 1_000.0


def run(
    plan: Plan,
    prompts: Prompts,
    results: Results,
    wanted: Callable[[str], bool],
    say: Callable[[str], None],
) -> None:
    """All index cases that are wanted; where a target fails, the others go on."""
    targets = plan.targets
    if names := list(filter(wanted, _CHURNED)):
        for number in range(plan.index_rounds):
            for target in targets:
                say(f"index, whole prompts per event, of {target.name}: round {number + 1}")
                with results.keep(names):
                    _fill_and_churn(target, plan, prompts, results)
    for number in range(plan.index_rounds):
        for layout in LAYOUTS:
            for size in SIZES:
                cases = [of_layout(layout, size), *[removal_of(layout)] * (size is None)]
                if names := list(filter(wanted, cases)):
                    say(f"{cases[0]}: round {number + 1}")
                    for target in targets:
                        with results.keep(names):
                            _fill_laid_out(target, plan, prompts, results, layout, size)
    if wanted(PAUSE):
        for target in targets:
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
        service.wait()
        engines.register(service)
        yield service, engines


def _fill_and_churn(target: Target, plan: Plan, prompts: Prompts, results: Results) -> None:
    """As an engine tells it that computes a prompt in one step: its new blocks in one event."""
    capacity = round(plan.holdings * 1.02 / WORKERS) + EVENT_BLOCKS
    with _running(target, prompts, capacity, None) as (service, engines):
        messages = list(engines.fill(plan.holdings))
        rss = service.rss_bytes()
        for case, memory in ((FRESH, FRESH_MEMORY), (CHURN, CHURN_MEMORY)):
            if case == CHURN:
                messages = engines.churn(round(plan.holdings * CHURNED))
            cost = _cost_of(service, engines, messages)
            results.add(case, target.name, block_cpu_us=cost)
            taken = (service.rss_bytes() - rss) / engines.holdings
            results.add(memory, target.name, holding_bytes=taken)


def _fill_laid_out(
    target: Target,
    plan: Plan,
    prompts: Prompts,
    results: Results,
    layout: Layout,
    size: int | None,
) -> None:
    holdings = round(plan.holdings * LAYOUT_SHARE)
    how: dict[str, Any] = {"layout": layout, "batch_events": BATCH_EVENTS}
    with _running(target, prompts, holdings, size, **how) as (service, engines):
        messages = list(engines.fill(holdings))
        rss = service.rss_bytes()
        cost = _cost_of(service, engines, messages)
        taken = (service.rss_bytes() - rss) / engines.holdings
        case = of_layout(layout, size)
        results.add(case, target.name, block_cpu_us=cost, holding_bytes=taken)
        if size is None:
            gone = list(engines.empty(range(WORKERS)))
            results.add(
                removal_of(layout), target.name, block_cpu_us=_cost_of(service, engines, gone)
            )


def _cost_of(service: Service, engines: Engines, messages: Sequence[Message]) -> float:
    """CPU microseconds per block to take these messages."""
    before = service.cpu_ns()
    blocks = engines.send(messages)
    engines.settle(service)
    return (service.cpu_ns() - before) / 1e3 / blocks


# -- pauses ---------------------------------------------------------------------------------------


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
        results.add(PAUSE, target.name, **metrics)
        results.refused(PAUSE, target.name, calm.bad + load.bad)
