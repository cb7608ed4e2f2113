"""What encryption adds to KV events: CPU per applied batch of a selector, with keys and without.

    python -m tests.bench.bench_curve_events [--batches N] [--rounds N]

One engine publishes batches of eight blocks of 16 tokens, to two selectors in turn. CPU is that of
all threads, from the kernel; the engine's is that of this process. Run by hand, never pass or fail.
"""

import argparse
import statistics
import tempfile
import time

from lean_selector.events.curve_keys import new_pair
from lean_selector.publisher import KvEventPublisher
from lean_selector.tools.keys import write_pair
from tests.bench.bench_replica_cost import cpu_s
from tests.support.running_service import RunningService, wait_until

BLOCKS, BLOCK_SIZE = 8, 16
PROMPTS = 500  # each of so many batches, then others take their place
BURST, BURST_S = 100, 0.01


class Side:
    """A selector and its engine."""

    def __init__(self, service: RunningService, engine: KvEventPublisher) -> None:
        self._service, self._engine = service, engine
        body = {
            "worker_id": 1,
            "endpoint": "http://127.0.0.1:9",
            "block_size": BLOCK_SIZE,
            "total_kv_blocks": PROMPTS * BLOCKS,
            "kv_events_endpoint": engine.endpoint,
        }
        assert service.post("/workers", body)[0] == 201
        wait_until(lambda: self._source()["connection"] == "connected", "it listens")

    def _source(self) -> dict[str, object]:
        row = self._service.get("/kv_sources")[1][0]
        assert isinstance(row, dict)
        return row

    def cost(self, batches: int) -> tuple[float, float]:
        """CPU us per batch: of the selector, and of the engine."""
        pid, own = self._service.process.pid, time.process_time()
        before = cpu_s(pid)
        for number in range(batches):
            first = self._engine.sequence * BLOCKS
            self._engine.publish_stored(
                token_ids=range(first, first + BLOCKS * BLOCK_SIZE),
                block_hashes=range(first, first + BLOCKS),
            )
            if number % BURST == 0:
                time.sleep(BURST_S)
        last = self._engine.sequence - 1
        own = time.process_time() - own
        wait_until(lambda: self._source()["last_seq"] == last, "all is in")
        return (cpu_s(pid) - before) / batches * 1e6, own / batches * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_pair(f"{folder}/engine", new_pair())
        flags = ("--kv-events-curve-server-keys-file", f"{folder}/engine.key")
        with (
            RunningService("--log-level", "error") as plain,
            RunningService("--log-level", "error", *flags) as encrypted,
            KvEventPublisher(kv_block_size=BLOCK_SIZE, endpoint="tcp://127.0.0.1:*") as open_engine,
            KvEventPublisher(
                kv_block_size=BLOCK_SIZE,
                endpoint="tcp://127.0.0.1:*",
                curve_secret_key_file=f"{folder}/engine.key_secret",
            ) as closed_engine,
        ):
            sides = Side(plain, open_engine), Side(encrypted, closed_engine)
            rounds = [[side.cost(args.batches) for side in sides] for _ in range(args.rounds + 1)]
    for what, at in (("selector", 0), ("engine", 1)):
        without, with_keys = (
            statistics.median(each[side][at] for each in rounds[1:]) for side in (0, 1)
        )
        print(f"{what}: {without:.1f} us a batch, {with_keys:.1f} us encrypted")


if __name__ == "__main__":
    main()
