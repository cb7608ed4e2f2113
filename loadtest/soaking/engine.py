"""One engine of the soak, a program of its own: a bounded cache that tells every change of it.

    python -m loadtest.soaking.engine WORKER_ID EVENTS_PORT REPLAY_PORT [--rate N] [--seed N]

It serves the soak's prompts to itself, `--rate` of them a second, and publishes real KV events,
with a replay socket. It never answers HTTP: a selector only names it.
"""

import argparse
import asyncio
import itertools
from random import Random

from lean_selector.tools.simulated_engines import EngineSpeed, SimulatedEngine, make_request
from loadtest.soaking.fleet import BLOCK_SIZE, FRESH_TOKENS, families

CAPACITY_BLOCKS = 4_096
# An empty cache fills faster than it changes later, so that memory is soon what it stays.
FILLING_PROMPTS = 2_000
FILLING_FASTER = 4


async def run(worker_id: int, events: int, replay: int, rate: float, seed: int) -> None:
    """Until the process is killed."""
    engine = SimulatedEngine(
        worker_id,
        CAPACITY_BLOCKS,
        BLOCK_SIZE,
        EngineSpeed(),
        None,
        endpoint=f"tcp://127.0.0.1:{events}",
        replay_endpoint=f"tcp://127.0.0.1:{replay}",
    )
    drawn, prompts = Random(), families(seed)
    for served in itertools.count():
        prompt = drawn.choice(drawn.choice(prompts))
        output = [drawn.choice(FRESH_TOKENS) for _ in range(BLOCK_SIZE)]
        request = make_request("soak", prompt + output, len(prompt), 1, BLOCK_SIZE)
        running = await engine.prefill(request)
        await engine.decode(running, 0)
        engine.finish(running)
        await asyncio.sleep(
            drawn.expovariate(rate * (FILLING_FASTER if served < FILLING_PROMPTS else 1))
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("worker_id", type=int)
    parser.add_argument("events", type=int)
    parser.add_argument("replay", type=int)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(run(args.worker_id, args.events, args.replay, args.rate, args.seed))


if __name__ == "__main__":
    main()
