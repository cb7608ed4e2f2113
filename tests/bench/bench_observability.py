"""What is paid for metrics and for shedding, in CPU; and the longest slice of a scrape.

Run by hand: `python tests/bench/bench_observability.py`. Each line compares two services in one
process, in turns: requests go through the protocol into the core, without sockets but where said.
Ratios hold on a busy machine, absolutes do not.
"""

import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import uvloop

from lean_selector import __version__
from lean_selector.core.index.kv_ingest import EventCounts
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.shapes import Booking, BusyThreshold
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import Placement, SelectionRequest, Source, WorkerSpec
from lean_selector.http.connections import Connections
from lean_selector.http.head import Request
from lean_selector.http.protocol import HttpProtocol
from lean_selector.http.response import PendingReply, date_header, encode_response
from lean_selector.http.routes_by_path import Match
from lean_selector.service.application import metrics_route
from lean_selector.service.exposition import LoopLag
from lean_selector.service.gate import Gate
from lean_selector.service.metrics import http_families, process_families
from lean_selector.service.replies import Answer
from lean_selector.service.selection import SelectionService
from lean_selector.service.selector_metrics import selection_families
from lean_selector.service.worker_handlers import ServiceState
from lean_selector.wire.selection_bodies import SourceCondition

ROUNDS = 40
REQUESTS = 400
BLOCKS = 8
HEAD = (
    b"POST %b HTTP/1.1\r\nHost: 127.0.0.1:8092\r\nContent-Length: %d\r\n"
    b"Content-Type: application/json\r\n\r\n"
)


class NullTransport(asyncio.Transport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass


class NoSources:
    """Engines that say nothing."""

    def __init__(self) -> None:
        self.listening: dict[tuple[int, int], Partition] = {}

    def subscribe(self, partition: Partition, worker_id: int, dp_rank: int, source: Source) -> None:
        self.listening[worker_id, dp_rank] = partition

    def unsubscribe(self, worker_id: int, dp_rank: int) -> None:
        del self.listening[worker_id, dp_rank]

    def statuses(self, model_name: str | None, tenant_id: str | None) -> list[object]:
        return []

    def conditions(self, worker_id: int, dp_ranks: Iterable[int]) -> list[SourceCondition]:
        return []

    def listeners(self, key: str) -> list[tuple[int, int]]:
        return []

    def askers(self, key: str) -> list[tuple[int, int]]:
        return []

    def each_status(self):  # type: ignore[no-untyped-def] # a bench: the protocol wants structs
        return ((partition, Status(*rank)) for rank, partition in sorted(self.listening.items()))

    def counts(self) -> EventCounts:
        return EventCounts()


class Status:
    """A source in good order."""

    def __init__(self, worker_id: int, dp_rank: int) -> None:
        self.worker_id, self.dp_rank = worker_id, dp_rank
        self.state, self.gaps, self.lag_batches, self.restarts = "live", 0, 0, 0
        self.last_message_age_s = 1.0


class BareGate(Gate):
    """The gate without its meters."""

    def __call__(self, request: Request) -> Answer:
        found = self._table.match(request.method, request.path)
        assert isinstance(found, Match)
        try:
            answer = found.value[0](request, found.param)
        except Exception as error:
            answer = self._failed(request, found.value[1], error, found.value[3])
        return answer


class BareSelector(Selector):
    """A selector that counts no tokens."""

    def _taken(
        self,
        partition: Partition,
        request: SelectionRequest,
        chosen: tuple[RankLoad, Placement],
        now: float,
    ) -> Placement:
        assert not request.books
        return chosen[1]


class Service:
    """A service of `workers` workers with some load on each."""

    def __init__(
        self,
        workers: int,
        *,
        ranks: int = 1,
        gate: type[Gate] = Gate,
        selector: type[Selector] = Selector,
        threshold: BusyThreshold | None = None,
    ) -> None:
        settings = RouterSettings(use_kv_events=True)
        self.sources = NoSources()
        self.selector = selector(settings, self.sources, random.Random(1))
        for worker_id in range(workers):
            self.selector.upsert_worker(
                WorkerSpec(
                    worker_id=worker_id,
                    endpoint="http://w",
                    block_size=16,
                    total_kv_blocks=1000,
                    data_parallel_size=ranks,
                    kv_events_endpoints=dict.fromkeys(range(ranks), "tcp://127.0.0.1:1"),
                ),
                0.0,
            )
        (self.partition,) = self.selector.catalog.partitions.values()
        draws = random.Random(2)
        for worker_id in range(workers):
            for rank in range(ranks):
                tokens = draws.randrange(1000)
                hashes = draws.randbytes(8 * draws.randrange(1, 100))
                booking = Booking(f"{worker_id}/{rank}", worker_id, rank, prefill_tokens=tokens)
                self.partition.slots.book(booking, hashes, 0.0)
        if threshold is not None:
            self.selector.change_threshold(("default", "default"), threshold, 0.0)
        service = SelectionService(
            self.selector,
            dump=lambda: encode_response(200, b"{}"),
            sources=self.sources,
            state=ServiceState(),
        )
        self.gate = gate(service.routes())
        self._protocol = HttpProtocol(self.gate, Connections(call_soon=lambda callback: None))
        self._protocol.connection_made(NullTransport())

    def run(self, requests: list[bytes]) -> float:
        """CPU seconds for these, one by one."""
        receive = self._protocol.data_received
        started = time.process_time()
        for request in requests:
            receive(request)
        return time.process_time() - started


def request(path: str, body: object | None = None, method: bytes = b"POST") -> bytes:
    text = b"" if body is None else json.dumps(body).encode()
    return (HEAD % (path.encode(), len(text))).replace(b"POST", method, 1) + text


def selections() -> list[bytes]:
    draws = random.Random(3)
    made = []
    for _ in range(REQUESTS):
        hashes = [draws.randrange(-(2**63), 2**63) for _ in range(BLOCKS)]
        body = {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": 16 * BLOCKS}
        made.append(request("/select", body))
    return made


def lifecycles() -> list[bytes]:
    draws = random.Random(4)
    made = []
    for number in range(REQUESTS // 3):
        hashes = [draws.randrange(-(2**63), 2**63) for _ in range(BLOCKS)]
        body = {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": 16 * BLOCKS}
        name = f"request-{number}"
        made += [
            request("/select_and_reserve", {**body, "reservation_id": name}),
            request(f"/reservations/{name}/prefill_complete"),
            request(f"/reservations/{name}", method=b"DELETE"),
        ]
    return made


def compare(name: str, base: Service, other: Service, requests: list[bytes]) -> None:
    base.run(requests)
    other.run(requests)
    ratios, times = [], []
    for turn in range(ROUNDS):
        pair = (base, other) if turn % 2 else (other, base)
        took = {id(each): each.run(requests) for each in pair}
        ratios.append(took[id(other)] / took[id(base)])
        times.append(took[id(other)] / len(requests))
    ratio = statistics.median(ratios)
    print(f"{100 * (ratio - 1):+6.1f} %  {min(times) * 1e6:6.1f} us  {name}")


def client(path: str, requests: list[bytes], go: Any) -> None:
    """Sends the requests one after the other whenever it is told to; a process of its own."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        while go.recv():
            for each in requests:
                connection.sendall(each)
                connection.recv(65536)
            go.send(True)


async def over_sockets(base: Service, other: Service, requests: list[bytes]) -> None:
    """The same comparison with everything that a request costs the service's thread."""
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as home:
        gos, servers = [], []
        for number, service in enumerate((base, other)):
            path = f"{home}/{number}"
            app, connections = service.gate, Connections(loop.call_soon)
            server = await loop.create_unix_server(
                lambda app=app, connections=connections: HttpProtocol(app, connections),  # type: ignore[misc] # bound now
                path,
            )
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=client, args=(path, requests, theirs), daemon=True
            )
            process.start()
            gos.append(ours)
            servers.append(server)  # one that nobody holds is closed
        ratios, times = [], []
        for turn in range(ROUNDS):
            took = [0.0, 0.0]
            for which in (0, 1) if turn % 2 else (1, 0):
                done = asyncio.Event()
                loop.add_reader(gos[which].fileno(), done.set)
                started = time.thread_time()
                gos[which].send(True)
                await done.wait()
                took[which] = time.thread_time() - started
                loop.remove_reader(gos[which].fileno())
                gos[which].recv()
            if turn:
                ratios.append(took[1] / took[0])
                times.append(took[1] / len(requests))
        for go in gos:
            go.send(False)
        ratio = statistics.median(ratios)
        print(f"{100 * (ratio - 1):+6.1f} %  {min(times) * 1e6:6.1f} us  16 workers, over a socket")


def scrape(workers: int, ranks: int) -> None:
    service = Service(workers, ranks=ranks)
    due: list[Callable[[], None]] = []
    lag = LoopLag(lambda delay, callback: None)
    families = [
        *selection_families(service.selector, service.sources, service.gate.meters, 503),
        *http_families(service.gate.meters),
        *process_families("selector", __version__, lag, lambda: 0, lambda: 0),
    ]
    _, _, _, ask = metrics_route(lambda: families, due.append)
    slices: list[list[float]] = []
    size = 0
    for _ in range(20):
        slices.append([])
        started = time.thread_time()
        reply = ask.run(None, None)  # type: ignore[arg-type] # it is not looked at
        slices[-1].append(time.thread_time() - started)
        while due:
            started = time.thread_time()
            due.pop(0)()
            slices[-1].append(time.thread_time() - started)
        assert isinstance(reply, PendingReply)
        assert reply.response is not None
        size = reply.response.count(b"\n")
    longest = statistics.median(max(each) for each in slices) * 1e3
    total = min(sum(each) for each in slices) * 1e3
    print(
        f"{workers * ranks:5} ranks: {size} lines in {total:.1f} ms, {len(slices[0])} slices, "
        f"the longest {longest:.2f} ms (median of 20 scrapes)"
    )


def main() -> None:
    date_header.set(1_700_000_000.0)
    reads, books = selections(), lifecycles()
    print("metrics against none, an 8-block select")
    for workers in (16, 128):
        bare = Service(workers, gate=BareGate, selector=BareSelector)
        compare(f"{workers} workers", bare, Service(workers), reads)
    bare = Service(16, gate=BareGate, selector=BareSelector)
    uvloop.run(over_sockets(bare, Service(16), reads))
    print("shedding against none, 128 workers, 8 blocks")
    none_busy = BusyThreshold(active_decode_blocks=0.9, active_prefill_tokens=100_000)
    half_busy = BusyThreshold(active_decode_blocks=0.9, active_prefill_tokens=500)
    for name, threshold in (("none busy", none_busy), ("half of them busy", half_busy)):
        shedding = Service(128, threshold=threshold)
        compare(f"select, {name}", Service(128), shedding, reads)
        compare(f"lifecycle, {name}", Service(128), shedding, books)
    all_busy = Service(128, threshold=BusyThreshold(active_decode_blocks=0.0))
    compare("a select that is shed, against one that is not", Service(128), all_busy, reads)
    print("a scrape")
    scrape(64, 8)
    scrape(512, 8)


if __name__ == "__main__":
    main()
