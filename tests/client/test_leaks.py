"""No reservation is left behind, whatever happens to calls, workers and the service."""

import asyncio
import collections
import gc
import random
from typing import Any

import pytest

from lean_selector.client import Backoff, ClientError, KvRouter, Timeouts, TokenStream
from tests.client.fleet import MODEL, Fleet
from tests.support.running_service import free_port

CALLS = 60
CONCURRENT = 16
DEADLINE_S = 60.0
# How the call of a cancelled task ends depends on the moment; about a fifth are cancelled.
CANCELLED = 0.2
FAKES: list[dict[str, Any]] = [
    *({}, {}, {}, {"step_s": 0.002}, {"status": 500}, {"break_after": 2}, {"error_after": 1}),
    {"without": ["token_ids", "usage", "done"]},
]


async def one_call(router: KvRouter, rng: random.Random) -> None:
    """A generation that its user reads in one of the ways that users have."""
    manner = rng.choice(["all", "all", "all", "some", "none", "reserve"])
    tokens = [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
    if manner == "reserve":
        async with router.reserve(tokens) as placement:
            await asyncio.sleep(0)
            await placement.prefill_complete()
        return
    stream: TokenStream = await router.generate(
        tokens, MODEL, {"max_tokens": rng.randrange(1, 12)}, extra_args={"fake": rng.choice(FAKES)}
    )
    if manner == "some":
        async for _ in stream:
            if rng.random() < 0.5:
                break
    elif manner == "all":
        async for _ in stream:
            pass


async def storm(fleet: Fleet) -> collections.Counter[str]:
    """Many calls, a fifth of them cancelled at a random moment; how they ended, by name. The
    service begins anew in their midst."""
    rng = random.Random(7)
    ends: collections.Counter[str] = collections.Counter()
    todo = iter(range(CALLS))

    async def work(router: KvRouter) -> None:
        for number in todo:
            call = asyncio.create_task(one_call(router, rng))
            if number == CALLS // 2:
                await asyncio.to_thread(fleet.restart)
            if rng.random() < CANCELLED:
                await asyncio.sleep(rng.random() * 0.03)
                call.cancel()
            try:
                await call
                ends["completed"] += 1
            except asyncio.CancelledError:
                ends["cancelled"] += 1
            except ClientError as error:
                ends[type(error).__name__] += 1

    backoff = Backoff(max_retries=8, first_s=0.05)
    timeouts = Timeouts(service_s=DEADLINE_S, queue_s=DEADLINE_S)
    async with KvRouter(fleet.endpoint, 4, backoff=backoff, timeouts=timeouts) as router:
        await asyncio.gather(*(work(router) for _ in range(CONCURRENT)))
    return ends


# A connection that is cancelled at the moment when it is made is left to the collector by anyio.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_storm_of_calls_around_a_restart_of_the_service_leaves_no_load() -> None:
    with Fleet(3) as fleet:
        fleet.register(9, f"http://127.0.0.1:{free_port()}")  # nobody is there
        ends = asyncio.run(storm(fleet))
        assert fleet.total() == (0, 0, 0), ends
    gc.collect()
    assert sum(ends.values()) == CALLS
    for end in ("completed", "cancelled", "WorkerStreamBroken", "WorkerRefused"):
        assert ends[end] > 0, ends
