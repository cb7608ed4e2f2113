"""One selector against several on one trace: what more of them cost in hits, balance and truth.

    python -m loadtest.scale --trace mooncake_conversation.jsonl.gz --selectors 1,2,4

Every selector is a process of its own. Three ways to have more than one:

- synced: all serve all workers and hear each other (replica sync); requests go to them in turn
- apart: the same without replica sync, to show what it is good for
- partitioned: each serves some of the models, with workers of their own; a request goes where its
  model is

The trace is an open loop, at --speed times its own, through simulated engines that publish real KV
events to all selectors that serve them. Hit rate and balance are those of the engines. What a
selector believes is compared with what runs: ten times a second each is asked for its loads, and
the engines are counted before and after; more than either is phantom load, less is missed.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from lean_selector.tools.service_process import (
    HOST,
    HttpClient,
    answering_service,
    check_port,
)
from lean_selector.tools.simulated_engines import (
    EngineModel,
    EngineRequest,
    EngineSpeed,
    SimulatedEngine,
    hit_rate,
    imbalance,
)
from lean_selector.tools.traffic import Player, as_recorded, run_policy
from loadtest.trace import play_at_its_times, read_trace, run

SYNCED, APART, PARTITIONED = "synced", "apart", "partitioned"
SAMPLE_S = 0.1
CONNECTED_S = 20.0  # the longest that peers and sources may take to connect
SETTLED_S = 10.0  # the longest that the last ends may take to reach everybody
# Where conversations of the trace part: they all begin with the same block of 512 tokens.
PARTING_TOKEN = 512


class Row(msgspec.Struct, frozen=True):
    """What became of one run."""

    mode: str
    selectors: int
    models: int
    finished: int
    errors: int
    hit_rate: float
    imbalance: float  # prefill tokens computed by the busiest engine over the average
    ttft_p50_s: float  # of the same choices at the times of the trace, in virtual time
    ttft_p99_s: float
    phantom: float  # requests believed and not running, over those that run: mean of the samples
    missed: float  # requests that run and are not believed, likewise
    samples: int
    left: int  # load that selectors still believe in when all is over
    late_s: float  # the most that a request came behind its time


def spread(lines: Iterable[tuple[float, EngineRequest]]) -> Iterator[tuple[float, EngineRequest]]:
    """The requests of one moment one after another, until the next moment that has some."""
    group: list[EngineRequest] = []
    at = 0.0
    for arrival_s, request in lines:
        if arrival_s > at:
            step = (arrival_s - at) / max(1, len(group))
            yield from ((at + turn * step, each) for turn, each in enumerate(group))
            group, at = [], arrival_s
        group.append(request)
    yield from ((at, each) for each in group)


class Fleet:
    """Selectors, the engines of each model, and a player for each pair of them that belongs."""

    def __init__(self, options: argparse.Namespace, mode: str, count: int) -> None:
        self.mode, self.count = mode, count
        self._options = options
        self.models = options.models if mode == PARTITIONED else 1
        speed = EngineSpeed().times(options.speed)
        self.engines = [
            SimulatedEngine(
                worker_id, options.capacity_blocks, options.block_size, speed, asyncio.sleep
            )
            for worker_id in range(1, options.workers + 1)
        ]
        self.clients: list[HttpClient] = []
        self.players: dict[tuple[int, int], Player] = {}  # by selector and model

    def engines_of(self, model: int) -> list[SimulatedEngine]:
        return self.engines[model :: self.models]

    def serves(self, selector: int, model: int) -> bool:
        return self.mode != PARTITIONED or model % self.count == selector

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Fleet"]:
        """All selectors started, all workers registered, everybody connected to everybody."""
        async with AsyncExitStack() as stack:
            for engine in self.engines:
                stack.callback(engine.close)
            ports = [check_port(0) for _ in range(self.count)]
            sync = [f"tcp://{HOST}:{check_port(0)}" for _ in range(self.count)]
            for number, port in enumerate(ports):
                flags = []
                if self.mode == SYNCED and self.count > 1:
                    peers = ",".join(sync[:number] + sync[number + 1 :])
                    flags = ["--replica-sync-bind", sync[number], "--replica-sync-peers", peers]
                started = answering_service(port, None, *flags)
                client, _ = await stack.enter_async_context(started)
                self.clients.append(client)
            for selector, client in enumerate(self.clients):
                for model in range(self.models):
                    if self.serves(selector, model):
                        engines = {each.worker_id: each for each in self.engines_of(model)}
                        player = Player(client, engines, lambda: False, f"model-{model}")
                        await player.register_workers()
                        self.players[selector, model] = player
            async with asyncio.timeout(CONNECTED_S):
                for client in self.clients:
                    while not await self._is_connected(client):  # noqa: ASYNC110  it is asked, not told
                        await asyncio.sleep(0.05)
            yield self

    async def _is_connected(self, client: HttpClient) -> bool:
        sources = msgspec.json.decode(await client.call("GET", "/kv_sources"))
        plane = msgspec.json.decode(await client.call("GET", "/replica_sync/peers?detail=true"))
        return all(each["connection"] == "connected" for each in sources) and all(
            each["state"] == "connected" for each in plane.get("peers", [])
        )

    def player_for(self, turn: int, request: EngineRequest) -> Player:
        at = min(PARTING_TOKEN // self._options.block_size, request.prompt_blocks - 1)
        model = request.block_hashes[at] % self.models if at >= 0 else 0
        selector = model % self.count if self.mode == PARTITIONED else turn % self.count
        return self.players[selector, model]

    def active(self) -> dict[int, int]:
        return {engine.worker_id: engine.active for engine in self.engines}


class Truth:
    """What selectors believe beside what runs."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.phantom = self.missed = self.running = self.samples = 0

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            for player in self._fleet.players.values():
                await self._sample(player)

    async def _sample(self, player: Player) -> None:
        before = self._fleet.active()
        parts = await player.loads()
        after = self._fleet.active()
        for row in (row for part in parts for row in part.loads):
            least, most = sorted((before[row.worker_id], after[row.worker_id]))
            self.phantom += max(0, row.active_requests - most)
            self.missed += max(0, least - row.active_requests)
            self.running += most
        self.samples += 1


async def measure(options: argparse.Namespace, mode: str, count: int) -> Row:
    """One run. Raises ServiceError."""
    fleet = Fleet(options, mode, count)
    lines = read_trace(options.trace, options.block_size, options.requests)
    async with fleet.running():
        truth = Truth(fleet)
        watching = asyncio.create_task(truth.watch())
        try:
            late_s = await play_at_its_times(
                spread(lines) if options.spread else lines,
                options.speed,
                lambda turn, arrival_s, request: fleet.player_for(turn, request).play(
                    request, arrival_s
                ),
            )
        finally:
            watching.cancel()
        left = await _left(fleet)
    players = list(fleet.players.values())
    for player in players:
        for error in player.errors:
            print(f"{mode} {count}: {error}", file=sys.stderr)
    recorded = [item for player in players for item in player.recorded]
    recorded.sort(key=lambda item: item.arrival_s)
    sizes = options.capacity_blocks, options.block_size
    virtual = run_policy(
        mode,
        as_recorded([engine.worker_id for engine in fleet.engines]),
        recorded,
        [EngineModel(*sizes, EngineSpeed()) for _ in fleet.engines],
    )
    running = max(1, truth.running)
    return Row(
        mode=mode,
        selectors=count,
        models=fleet.models,
        finished=sum(player.finished for player in players),
        errors=sum(player.error_count for player in players),
        hit_rate=hit_rate(fleet.engines),
        imbalance=imbalance(fleet.engines),
        ttft_p50_s=virtual.ttft_p50_s,
        ttft_p99_s=virtual.ttft_p99_s,
        phantom=truth.phantom / running,
        missed=truth.missed / running,
        samples=truth.samples,
        left=left,
        late_s=late_s,
    )


async def _left(fleet: Fleet) -> int:
    """What selectors believe when nothing runs; asked again while the last news travel."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLED_S
    while True:
        left = sum([await player.load_left() for player in fleet.players.values()])
        if not left or loop.time() > deadline:
            return left
        await asyncio.sleep(0.1)


HEADER = (
    "| selectors | | hit rate | imbalance | first token p50 | p99"
    " | phantom | missed | left | late |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def markdown(row: Row) -> str:
    models = f", {row.models} models" if row.models > 1 else ""
    return (
        f"| {row.selectors} | {row.mode}{models} | {row.hit_rate:.1%} | {row.imbalance:.2f}"
        f" | {row.ttft_p50_s:.2f} s | {row.ttft_p99_s:.2f} s"
        f" | {row.phantom:.1%} | {row.missed:.1%} | {row.left} | {row.late_s:.2f} s |"
    )


def runs(counts: Sequence[int], modes: Sequence[str]) -> list[tuple[str, int]]:
    """What is measured, in order. One selector alone is neither synced nor apart."""
    return [
        (mode, count)
        for mode in modes
        for count in counts
        if count > 1 or mode == PARTITIONED or mode == next(m for m in modes if m != PARTITIONED)
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with 2 when it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines, gzip or not")
    parser.add_argument("--selectors", default="1,2,4", help="how many; default: 1,2,4")
    parser.add_argument("--modes", default=f"{SYNCED},{APART},{PARTITIONED}")
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--speed", type=float, default=5.0, help="times the trace's own")
    parser.add_argument(
        "--spread",
        action="store_true",
        help="requests that the trace has at one moment come one after another until the next",
    )
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--models", type=int, default=4, help="of the partitioned runs")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--capacity-blocks", type=int, default=100_000, help="of each engine")
    parser.add_argument("--json", type=Path, help="keep every figure here")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """0 when every request of every run was played without error and no load is left, else 1."""
    options = parse(argv)
    counts = [int(text) for text in options.selectors.split(",")]
    rows: list[Row] = []
    print(HEADER, flush=True)
    for mode, count in runs(counts, options.modes.split(",")):
        row = run("scale", measure(options, mode, count))
        if row is None:
            return 1
        rows.append(row)
        print(markdown(row), flush=True)
        if options.json is not None:
            kept = [msgspec.to_builtins(each) for each in rows]
            options.json.write_text(json.dumps(kept, indent=1))
    return int(any(row.errors or row.left for row in rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
