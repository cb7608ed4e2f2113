"""Plays a script of calls on a SelectionService; writes what came of each as a line of JSON.

Run by an interpreter that has the class: `play.py MODULE SEED OPERATIONS`. Imports nothing else:
one of the interpreters is the reference's. Every booking is pinned, since ties are drawn.
"""

import asyncio
import importlib
import inspect
import json
import random
import sys
from typing import Any

FIRST = 2**63 + 5
SECOND = 7
# The reference answers a registration before its load rows are there, and before it takes in what
# does not show in them: looked at so often, at most so many times.
SETTLES_S, LOOKS = 0.15, 200
WORKER = {
    "worker_id": FIRST,
    "model_name": "default",
    "routing_group": "default",
    "endpoint": "ray://replica",
    "block_size": 4,
    "max_num_batched_tokens": 8192,
    "data_parallel_start_rank": 0,
    "data_parallel_size": 1,
    "kv_events_endpoints": {0: "tcp://127.0.0.1:9"},
}

Step = tuple[str, tuple[Any, ...], dict[str, Any]]


def call(method: str, *arguments: Any, **named: Any) -> Step:
    return method, arguments, named


def drawn(rng: random.Random, count: int) -> list[Step]:
    """So many operations, at random, on two workers."""
    steps = [call("upsert_worker", {**WORKER, "worker_id": each}) for each in (FIRST, SECOND)]
    for _ in range(count):
        # An id that was selected is not select_and_reserved: what the reference then keeps of the
        # first is a defect of its own.
        kept, booked = f"kept-{rng.randrange(10)}", f"booked-{rng.randrange(10)}"
        name = rng.choice((kept, booked))
        tokens = [rng.randrange(3) for _ in range(rng.randrange(30))]
        rank = {"worker_id": rng.choice((FIRST, SECOND)), "dp_rank": 0}
        ask: dict[str, Any] = {"token_ids": tokens, "pinned_worker": rank}
        if rng.random() < 0.5:
            ask["expected_output_tokens"] = rng.choice((None, 1, 100))
        explicit: dict[str, Any] = {"selection_id": name, **rank, "token_ids": tokens}
        if rng.random() < 0.5:
            explicit["effective_prefill_tokens"] = rng.randrange(40)
        decay = rng.choice((None, 0.0, 0.5, 1.0))
        steps.append(
            rng.choice(
                (
                    call("select_and_reserve", {**ask, "selection_id": booked}),
                    call("select", {**ask, "selection_id": kept}),
                    call("create_reservation", {"selection_id": kept}),
                    call("create_reservation", explicit),
                    call("prefill_complete", name),
                    call("add_output_block", name, decay_fraction=decay),
                    call("free_reservation", name),
                    call("loads"),
                    call("potential_loads", {"token_ids": tokens}),
                )
            )
        )
    return steps


async def outcome(service: Any, step: Step) -> Any:
    method, arguments, named = step
    try:
        answer = getattr(service, method)(*arguments, **named)
        waits = inspect.isawaitable(answer)
        said = await answer if waits else answer
    except Exception as error:
        status = getattr(error, "status_code", None)
        if status is None:  # of these the kind counts, not the parser's words
            kinds = (ValueError, TypeError, OverflowError)
            return {"raised": next((k.__name__ for k in kinds if isinstance(error, k)), "other")}
        return {"refused": [status, error.kind, str(error)]}  # type: ignore[attr-defined]
    return {"waits": waits, "said": said, "order": order(said)}


def order(value: Any) -> Any:
    """The order of keys, which JSON's own comparison forgets."""
    if isinstance(value, dict):
        return [[repr(key), order(part)] for key, part in value.items()]
    return [order(part) for part in value] if isinstance(value, list) else None


async def settled(service: Any) -> None:
    """Until it has loads of all workers that it calls schedulable. A reference that is shut down
    keeps those that it had."""
    for _ in range(LOOKS):
        await asyncio.sleep(SETTLES_S)
        workers, loads = [await outcome(service, call(name)) for name in ("list_workers", "loads")]
        if "said" not in workers or "said" not in loads:
            return
        ready = {
            each["worker_id"] for each in workers["said"] if each["lifecycle"] == "schedulable"
        }
        if ready <= {row["worker_id"] for each in loads["said"] for row in each["loads"]}:
            return
    raise AssertionError(f"{loads}, of {workers}")


async def play(service: Any, steps: list[Step]) -> None:
    for step in steps:
        came = await outcome(service, step)
        sys.stdout.write(json.dumps([step[0], came], default=repr) + "\n")
        if step[0] in ("upsert_worker", "delete_worker", "patch_worker"):
            await settled(service)


async def main(module: str, seed: str, count: str) -> None:
    service = importlib.import_module(module).SelectionService(indexer_threads=1)
    await play(service, drawn(random.Random(int(seed)), int(count)))
    service.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
