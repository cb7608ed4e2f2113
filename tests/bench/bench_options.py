"""What one option costs: this service with it and without it, in interleaved pairs of rounds.

    python -m tests.bench.bench_options tls|tokens|asking|thresholds|nothing [--rounds 20]

Both processes have the same workers and get the same requests, a hundred at a time in turns of some
milliseconds, so that whatever else the machine does hits both alike; on one CPU, which their client
does not use, where there are two; and each is the one that was started first in every second pair.
Of each pair the ratio counts, not the figures. `nothing` compares the service with itself, and so
tells the noise; `tokens` are requests with a token that is asked for, over requests without;
`asking` is the asking alone; `thresholds` a busy threshold that no worker is above.
"""

import argparse
import os
import secrets
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from math import comb
from pathlib import Path

from lean_selector.tools.service_process import HOST
from loadtest.child_service import cpu_ns
from loadtest.duel.prompts import MODEL_NAME, Prompt, Prompts, select_request
from loadtest.http_client import Connection, http
from tests.support.certificates import Authority, Files
from tests.support.running_service import RunningService
from tests.support.tls_service import TlsService

WORKERS = 16
REQUESTS = 4_000  # of a round, to each
SLICE = 100  # of them in a turn
CONNECTIONS = 8  # at once, as a gateway has them
CONFIDENCE = 0.95
FLAGS = ("--use-kv-events", "false", "--log-level", "warning")

Prompted = Callable[[int], Prompt]


class Option:
    """Flags of the second service, and what header lines the requests to each have more."""

    def __init__(self, name: str, folder: Path) -> None:
        self.flags: list[str] = []
        self.lines = [b"", b""]
        self.token: str | None = None  # of our own calls
        self.authority = Authority() if name == "tls" else None
        if self.authority is not None:
            self.files = Files(folder, self.authority, self.authority.issue(HOST))
        elif name == "thresholds":
            self.flags = ["--active-decode-blocks-threshold", "0.9"]
        elif name != "nothing":
            self.token, file = secrets.token_hex(32), folder / "tokens"
            file.write_text(f"read {self.token[::-1]}\nadmin {self.token}\n")
            self.flags = ["--auth-token-file", str(file)]
            line = b"authorization: Bearer %b\r\n" % self.token.encode()
            self.lines = [line if name == "asking" else b"", line]

    def service(self, which: int) -> RunningService:
        """Without the option, or with it; not started."""
        if not which:
            return RunningService(*FLAGS)
        if self.authority is not None:
            return TlsService(self.files, self.authority, *FLAGS)
        service = RunningService(*FLAGS, *self.flags)
        service.token = self.token
        return service

    def connection(self, service: RunningService) -> Connection:
        made = Connection(service.port)
        if isinstance(service, TlsService):
            made.socket = service.context.wrap_socket(made.socket, server_hostname=HOST)
        return made


def turn(number: int) -> tuple[int, int]:
    """Which goes first: every second time the other."""
    return (0, 1) if number % 2 else (1, 0)


def started(option: Option, stack: ExitStack, number: int, cpus: list[int]) -> list[RunningService]:
    """The service without the option, and with it, each with its workers."""
    pair = [option.service(which) for which in (0, 1)]
    for which in turn(number):
        service = stack.enter_context(pair[which])
        os.sched_setaffinity(service.process.pid, cpus)
        for worker_id in range(1, WORKERS + 1):
            service.add_worker(worker_id, model_name=MODEL_NAME)
    return pair


def measured(
    option: Option, pair: Sequence[RunningService], prompts: Sequence[Prompt], number: int
) -> tuple[float, float]:
    """CPU in us per request, without the option and with it."""
    plain = [select_request(prompt) for prompt in prompts]
    requests = [[with_line(each, line) for each in plain] for line in option.lines]
    taken = [0, 0]
    connections = [[option.connection(one) for _ in range(CONNECTIONS)] for one in pair]
    for which in turn(number):  # uncounted: a process that has just begun
        send(connections[which], requests[which])
    for at in range(0, len(plain), SLICE):
        for which in turn(number + at // SLICE):
            before = cpu_ns(pair[which].process.pid)
            send(connections[which], requests[which][at : at + SLICE])
            taken[which] += cpu_ns(pair[which].process.pid) - before
    for each in (*connections[0], *connections[1]):
        each.close()
    return taken[0] / 1e3 / len(plain), taken[1] / 1e3 / len(plain)


def send(connections: Sequence[Connection], requests: Sequence[bytes]) -> None:
    """One on each connection at a time, until all are answered."""
    for at in range(0, len(requests), len(connections)):
        some = list(zip(connections, requests[at : at + len(connections)], strict=False))
        for connection, request in some:
            connection.socket.sendall(request)
        for connection, _ in some:
            while (status := connection.receive()) is None:
                pass
            assert status == 200


def with_line(request: bytes, line: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    return b"%b\r\n%b\r\n%b" % (head, line, body)


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Where their median is with 95 %, whatever the distribution: between two of the values.

    All of them where there are too few for that.
    """
    count = len(ordered)
    below, rank = 0.0, 0
    while rank < count // 2 and (below + comb(count, rank) / 2**count) * 2 <= 1 - CONFIDENCE:
        below += comb(count, rank) / 2**count
        rank += 1
    return ordered[max(rank - 1, 0)], ordered[count - max(rank, 1)]


def per_connection(option: Option, service: RunningService) -> tuple[float, float]:
    """CPU in us of a connection with one request, and what one that is kept open holds, in KiB."""
    count = 300

    def pages() -> int:
        return int(Path(f"/proc/{service.process.pid}/statm").read_text().split()[1])

    health, before = http("GET", "/health"), cpu_ns(service.process.pid)
    for _ in range(count):
        with closing(option.connection(service)) as connection:
            connection.ask(health)
    spent, held = cpu_ns(service.process.pid) - before, pages()
    kept = [option.connection(service) for _ in range(count)]
    for connection in kept:
        connection.ask(health)
    held = (pages() - held) * 4
    for connection in kept:
        connection.close()
    return spent / 1e3 / count, held / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("option", choices=["nothing", "tokens", "asking", "thresholds", "tls"])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    prompts = Prompts(None, 16)
    bodies: dict[str, Prompted] = {  # of many lengths, by which header sections differ
        "select, 8 blocks": lambda number: prompts.cut(number, 8, 1),
        "select, 8 to 512 blocks": lambda number: prompts.cut(number, 8 + number % 505, 1),
    }
    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in bodies}
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[:-1] or cpus)
    with tempfile.TemporaryDirectory() as folder:
        option = Option(args.option, Path(folder))
        for number in range(args.rounds):
            # Fresh processes each time: of two alike one is often a percent faster, by its memory.
            with ExitStack() as stack:
                pair = started(option, stack, number, cpus[-1:])
                for kind, prompt in bodies.items():
                    some = [prompt(at) for at in range(number * REQUESTS, (number + 1) * REQUESTS)]
                    taken[kind].append(measured(option, pair, some, number))
                if option.authority is not None and number == args.rounds - 1:
                    for name, service in zip(("TCP", "TLS"), pair, strict=True):
                        spent, held = per_connection(option, service)
                        print(
                            f"a connection over {name}: {spent:.0f} us, {held:.1f} KiB while open"
                        )
    print(f"with {args.option} over without, {args.rounds} interleaved pairs:")
    for kind, costs in taken.items():
        ratios = sorted(after / before for before, after in costs)
        middle, (low, high) = statistics.median(ratios), interval(ratios)
        without = statistics.median(before for before, _ in costs)
        print(
            f"  {kind:26s} {100 * (middle - 1):+5.1f} %  "
            f"({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f})  of {without:.1f} us"
        )


if __name__ == "__main__":
    main()
