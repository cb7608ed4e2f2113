"""The whole path of KV events, of this service and another one in turn: CPU time of the process.

    python -m tests.bench.bench_kv_events TRACE.jsonl.gz --other "COMMAND --port {port}" \
        [--shape 8] [--blocks 100000] [--workers 16]

Sixteen PUB sockets send what sixteen engines that serve a request trace in turn would: BlockStored
events of at most `--shape` blocks (0: whole prompts), one per message, later BlockRemoved events of
as many (0: 64), the oldest prompt first and each from its end. Both services get the same messages
in slices, one after the other, so that what else the machine does meets both. The figures are CPU
time of all threads per block, so they include the sockets, and resident memory per block held. Run
by hand, never pass or fail.
"""

import argparse
import contextlib
import gzip
import json
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from loadtest.child_service import JSON, ChildService, free_port

BLOCK_SIZE = 16
EXPAND = 32  # 16-token blocks in a block of the trace
SLICES = 6
VOCABULARY = 128_000
BURST, BURST_S = 50, 0.005  # at most 10 000 messages a second, so that nobody drops any
IDLE_S = 0.3  # without CPU time: all is applied

encode = msgspec.msgpack.Encoder().encode
Message = tuple[int, bytes]  # worker, payload


class Engines:
    """What each worker holds of the trace, and the messages that tell of it."""

    def __init__(self, trace: Path, workers: int, shape: int) -> None:
        self._shape = shape
        self._workers = workers
        self._prompts = self._repeated(trace)
        self._held: list[set[tuple[int, int]]] = [set() for _ in range(workers)]
        self._chains: list[tuple[int, list[int]]] = []
        self._turn = 0
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.last: list[int] = []  # tokens of the last whole prompt

    @staticmethod
    def _repeated(trace: Path) -> Iterator[tuple[int, list[int]]]:
        with gzip.open(trace, "rt") as lines:
            requests = [json.loads(line)["hash_ids"] for line in lines if line.strip()]
        for shift in range(1_000_000):
            for hash_ids in requests:
                yield shift, hash_ids

    def stored(self, blocks: int) -> tuple[list[Message], int]:
        """Messages for at least so many new blocks."""
        messages: list[Message] = []
        count = 0
        while count < blocks:
            shift, hash_ids = next(self._prompts)
            worker = self._turn % self._workers
            self._turn += 1
            held = self._held[worker]
            names, tokens, start = [], list[int](), 0
            for hash_id in hash_ids:
                key = (shift, hash_id)
                rng = random.Random(f"{key}")
                tokens += rng.choices(range(VOCABULARY), k=BLOCK_SIZE * EXPAND)
                names += [rng.getrandbits(64) ^ worker << 59 for _ in range(EXPAND)]
                if key in held:
                    start = len(names)
                held.add(key)
            self.last = tokens
            shape = self._shape or len(names)
            for at in range(start, len(names), shape):
                end = min(len(names), at + shape)
                event = ["BlockStored", names[at:end], names[at - 1] if at else None]
                event += [tokens[at * BLOCK_SIZE : end * BLOCK_SIZE], BLOCK_SIZE, None, "GPU", None]
                messages.append((worker, encode([0.5, [event], 0])))
            count += len(names) - start
            self._chains.append((worker, names[start:]))
        return messages, count

    def removed(self, blocks: int) -> tuple[list[Message], int]:
        messages: list[Message] = []
        count, shape = 0, self._shape or 64
        while count < blocks and self._chains:
            worker, names = self._chains.pop(0)
            names.reverse()
            for at in range(0, len(names), shape):
                event = ["BlockRemoved", names[at : at + shape], "GPU"]
                messages.append((worker, encode([0.5, [event], 0])))
            count += len(names)
        return messages, count


class Service:
    """One of the two, with sixteen engines of its own."""

    def __init__(self, name: str, command: str, workers: int) -> None:
        self.name = name
        self.port = free_port()
        environment = {**os.environ, "DYN_LOG": "warn"}
        words = shlex.split(command.format(port=self.port))
        self._child = ChildService(words, self.port, env=environment)
        self.process = self._child.process
        self.seconds: dict[str, list[float]] = {}
        self.sockets: list[zmq.Socket[bytes]] = []
        self._sequence = [0] * workers
        self._wait_until_up()
        for worker in range(workers):
            publisher: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
            publisher.sndhwm = 0
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            self.sockets.append(publisher)
            body = {
                "worker_id": worker + 1,
                "model_name": "m",
                "endpoint": "http://worker:8000",
                "block_size": BLOCK_SIZE,
                "max_num_batched_tokens": 8192,
                "kv_events_endpoints": {"0": f"tcp://127.0.0.1:{port}"},
            }
            status, answer = self.ask("POST", "/workers", body)
            assert status == 201, answer
            publisher.recv()  # the subscription
        self._wait_until_idle()
        self.first_resident = self.resident()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        status, text = self._child.request(method, path, data, JSON)
        with contextlib.suppress(ValueError):
            return status, json.loads(text)
        return status, text

    def _wait_until_up(self) -> None:
        for _ in range(200):
            if self._child.is_healthy():
                return
            time.sleep(0.05)
        raise SystemExit(f"{self.name} does not start")

    def cpu(self) -> float:
        """Seconds of CPU time, all threads."""
        total = 0
        for stat in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(stat.read_text().split()[0])
        return total / 1e9

    def resident(self) -> int:
        statm = Path(f"/proc/{self.process.pid}/statm").read_text()
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def _wait_until_idle(self) -> float:
        seen = self.cpu()
        while True:
            time.sleep(IDLE_S)
            now = self.cpu()
            if now - seen < 0.01 * IDLE_S:
                return now
            seen = now

    def feed(self, what: str, messages: list[Message], blocks: int) -> None:
        """Send all and wait until they are applied; notes the CPU time per block."""
        before = self.cpu()
        for count, (worker, payload) in enumerate(messages):
            if count % BURST == 0:
                time.sleep(BURST_S)
            sequence = self._sequence[worker].to_bytes(8, "big")
            self._sequence[worker] += 1
            self.sockets[worker].send_multipart((b"", sequence, payload))
        spent = self._wait_until_idle() - before
        self.seconds.setdefault(what, []).append(spent / blocks)

    def hits(self, tokens: list[int]) -> int:
        """Blocks of a prompt that some worker holds, as proof that events arrived."""
        body = {"model_name": "m", "token_ids": tokens}
        status, answer = self.ask("POST", "/overlap_scores", body)
        assert status == 200, answer
        return max((row["device_blocks"] for row in answer["workers"]), default=0)

    def stop(self) -> None:
        for publisher in self.sockets:
            publisher.close(0)
        self._child.stop(signal.SIGTERM, 20.0)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def run(options: argparse.Namespace) -> None:
    ours = f"{sys.executable} -m lean_selector --port {{port}}"
    commands = {"ours": options.ours or ours, **({"other": options.other} if options.other else {})}
    engines = Engines(options.trace, options.workers, options.shape)
    services = []
    try:
        services += [Service(name, text, options.workers) for name, text in commands.items()]
        held = 0
        for what, make in (("ingest", engines.stored), ("removal", engines.removed)):
            for _ in range(SLICES):
                messages, blocks = make(options.blocks // SLICES)
                held += blocks if what == "ingest" else 0
                for service in services:
                    service.feed(what, messages, blocks)
            if what == "ingest":
                memory = [(s.resident() - s.first_resident) / held for s in services]
                hits = [service.hits(engines.last) for service in services]
            figures = [median(service.seconds[what]) * 1e6 for service in services]
            texts = [f"{s.name} {f:7.3f} us/block" for s, f in zip(services, figures, strict=True)]
            ratio = f"ratio {figures[0] / figures[-1]:5.2f}"
            print(f"{what:8} {options.shape:4} blocks an event: ", *texts, ratio, flush=True)
        print(f"memory at {held} blocks: ", *(f"{one:6.1f} bytes/block" for one in memory))
        print(f"of the last prompt, {len(engines.last) // BLOCK_SIZE} blocks, are held: ", *hits)
        left = [service.hits(engines.last) for service in services]
        print("after the removal: ", *left)
    finally:
        for service in services:
            service.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", default=os.environ.get("KV_TRACE"), type=Path)
    parser.add_argument("--ours", help="command with {port}; default: this installation")
    parser.add_argument("--other", help="command with {port} of the service to compare with")
    parser.add_argument("--shape", type=int, default=8, help="blocks an event; 0: whole prompts")
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=16)
    options = parser.parse_args()
    if options.trace is None:
        parser.error("a trace is needed, as an argument or in KV_TRACE")
    run(options)
