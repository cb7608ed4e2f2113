"""What a selection costs in this process, by the options it uses, the fleet, and how loads differ.

    python -m tests.bench.bench_choice [workers ...]

Prints microseconds per selection, the least of many rounds, and in brackets how many times a plain
selection of the same fleet that is. `alike`: no rank has load. `apart`: every rank has another.
Eight blocks, half of them cached on every second worker; or, for one holder, 800 blocks that one
worker holds all of, against a plain selection of the same prompt.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from lean_selector.core.index.shapes import Tier
from lean_selector.core.load.shapes import Booking
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import SelectionRequest, WorkerSpec
from tests.support.gates import NoEngines

BLOCK_SIZE = 16
BLOCKS = list(range(1, 9))
LONG = list(range(1, 801))
ROUNDS, CALLS = 15, 60
TEMPERATURES = 0.5, 0.1, 0.01


def packed(values: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


class Fleet:
    """A selector with so many workers, a prompt that half of them hold, and its loads."""

    def __init__(self, workers: int, settings: RouterSettings, *, apart: bool) -> None:
        self.selector = Selector(settings, NoEngines(), random.Random(1))
        for number in range(workers):
            spec = WorkerSpec(
                worker_id=number,
                endpoint="http://w",
                block_size=BLOCK_SIZE,
                max_num_batched_tokens=100_000,
                taints=frozenset({f"zone-{number % 4}"}),
            )
            self.selector.upsert_worker(spec, 0.0)
        self.partition = self.selector.ready_partition("default", "default")
        for number in range(0, workers, 2):
            held = BLOCKS[:4]
            self.partition.index.store(number, 0, Tier.DEVICE, None, held, packed(held))
        loads = list(range(workers))
        random.Random(2).shuffle(loads)
        for number in range(workers if apart else 0):
            self.load(number, loads[number], None)

    def load(self, number: int, load: int, duration_s: float | None) -> None:
        hashes = packed([10_000 + 300 * number + block for block in range(load % 23)])
        booking = Booking(f"r{number}", number, 0, None, True, 7 * load + 1, duration_s, None)
        self.partition.slots.book(booking, hashes, 0.0)

    def lower(self, every: int, *, unlike: bool = False) -> "Fleet":
        """One worker in `every` has half of the prompt on its device and the other half on its host
        tier; engines call the blocks alike, or no two of them do."""
        index = self.partition.index
        for number in range(0, len(self.partition.workers), every):
            names = [1_000 * number * unlike + block for block in BLOCKS]
            index.clear(number, 0)
            index.store(number, 0, Tier.DEVICE, None, names[:4], packed(BLOCKS[:4]))
            index.store(number, 0, Tier.HOST_PINNED, names[3], names[4:], packed(BLOCKS[4:]))
        return self

    def give_to_one(self) -> None:
        """One worker has the whole of the long prompt."""
        hashes = packed(LONG)
        self.partition.index.store(1, 0, Tier.DEVICE, None, LONG, hashes)

    def request(self) -> SelectionRequest:
        hashes = packed(BLOCKS)
        prompt = Prompt(len(BLOCKS) * BLOCK_SIZE, hashes, 8, hashes[:8], hashes)
        return SelectionRequest(prompt, self.selector.terms)

    def cost(self, change: Callable[[SelectionRequest], None]) -> float:
        """Microseconds of one selection; `change` makes the request what it is to be."""
        best = float("inf")
        select, partition = self.selector.select, self.partition
        for _ in range(ROUNDS):
            requests = [self.request() for _ in range(CALLS)]
            for request in requests:
                change(request)
            start = time.perf_counter()
            for request in requests:
                select(partition, request, 1.0, lambda parked, outcome: None)
            best = min(best, (time.perf_counter() - start) / CALLS)
        return best * 1e6


def plain(request: SelectionRequest) -> None:
    """As it is."""


def long(request: SelectionRequest) -> None:
    """Of 800 blocks."""
    hashes = packed(LONG)
    request.prompt = Prompt(len(LONG) * BLOCK_SIZE, hashes, len(LONG), hashes[:8], hashes)


def half_allowed(workers: int) -> Callable[[SelectionRequest], None]:
    def change(request: SelectionRequest) -> None:
        request.allowed_worker_ids = frozenset(range(0, workers, 2))

    return change


def required(request: SelectionRequest) -> None:
    request.required_taints = frozenset({"zone-1"})


def preferred(request: SelectionRequest) -> None:
    request.preferred_taints = {"zone-1": 0.5, "zone-2": -0.5}


def scaled(request: SelectionRequest) -> None:
    request.terms = msgspec.structs.replace(request.terms, scale=0.5)


def measure(workers: int, *, apart: bool) -> None:
    def fleet(**settings: float) -> Fleet:
        router = RouterSettings(use_kv_events=False, **settings)  # type: ignore[arg-type]
        return Fleet(workers, router, apart=apart)

    base = fleet()
    alone = base.cost(plain)
    print(f"{workers} workers, loads {'apart' if apart else 'alike'}: plain {alone:.1f}")
    queue = fleet(queue_threshold=16.0)
    decay = fleet(overlap_score_credit_decay=0.5)
    rows: list[tuple[str, Fleet, Callable[[SelectionRequest], None]]] = [
        ("queue threshold", queue, plain),
        ("credit decay", decay, plain),
        ("half allowed", base, half_allowed(workers)),
        ("lower tier", fleet().lower(4), plain),
        ("lower tier on all", fleet().lower(1), plain),
        ("the same, unlike", fleet().lower(1, unlike=True), plain),
        ("required taint", base, required),
        ("preferred taints", base, preferred),
        ("another scale", base, scaled),
    ]
    rows += [(f"temperature {heat}", fleet(temperature=heat), plain) for heat in TEMPERATURES]
    for name, subject, change in rows:
        show(name, subject.cost(change), alone)
    base.give_to_one()
    alone = base.cost(long)
    print(f"  one holder, plain {alone:13.1f}")
    for heat in TEMPERATURES:
        subject = fleet(temperature=heat)
        subject.give_to_one()
        show(f"temperature {heat}", subject.cost(long), alone)


def show(name: str, cost: float, alone: float) -> None:
    print(f"  {name:20} {cost:8.1f} ({cost / alone:.2f})")


if __name__ == "__main__":
    for count in [int(word) for word in sys.argv[1:]] or [16, 512, 4_096]:
        measure(count, apart=False)
        measure(count, apart=True)
