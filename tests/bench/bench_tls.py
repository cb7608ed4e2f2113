"""What TLS costs the server: CPU per request on a kept connection, per connection, and memory.

    python -m tests.bench.bench_tls

Two services, with and without TLS, take turns of 1 000 selects of 8 blocks each on one connection.
Prints the median of 20 turns, and the middle half of the differences.
"""

import json
import socket
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.certificates import HOST, Authority, Files
from tests.support.running_service import RunningService
from tests.support.tls_service import TlsService

TURNS, REQUESTS, CONNECTIONS = 20, 1_000, 300
FLAGS = ("--use-kv-events", "false", "--log-level", "warning")
WORKER = {"worker_id": 1, "model_name": "m", "endpoint": "http://w:1", "block_size": 16}
BLOCKS = {"block_hashes": list(range(1, 9)), "sequence_hashes": list(range(11, 19))}
BODY = json.dumps({"model_name": "m", **BLOCKS, "isl_tokens": 128}).encode()
HEAD = b"POST /select HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SELECT = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY

Connect = Callable[[], socket.socket]


def cpu_us(service: RunningService) -> float:
    schedstat = Path(f"/proc/{service.process.pid}/schedstat").read_text()
    return int(schedstat.split()[0]) / 1e3


def memory_kib(service: RunningService) -> int:
    return int(Path(f"/proc/{service.process.pid}/statm").read_text().split()[1]) * 4


def ask(connection: socket.socket, requests: int) -> None:
    for _ in range(requests):
        connection.sendall(SELECT)
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200"), answer


def per_request(service: RunningService, connection: socket.socket) -> float:
    before = cpu_us(service)
    ask(connection, REQUESTS)
    return (cpu_us(service) - before) / REQUESTS


def per_connection(service: RunningService, connect: Connect) -> tuple[float, float]:
    """CPU of one with one request, and what one that is kept open holds, in KiB."""
    before = cpu_us(service)
    for _ in range(CONNECTIONS):
        with connect() as connection:
            ask(connection, 1)
    spent = (cpu_us(service) - before) / CONNECTIONS
    held = memory_kib(service)
    kept = [connect() for _ in range(CONNECTIONS)]
    for connection in kept:
        ask(connection, 1)
    held = memory_kib(service) - held
    for connection in kept:
        connection.close()
    return spent, held / CONNECTIONS


def main() -> None:
    authority = Authority()
    files = Files(Path(tempfile.mkdtemp()), authority, authority.issue(HOST))
    context = authority.client()
    with RunningService(*FLAGS) as plain, TlsService(files, authority, *FLAGS) as secure:

        def over_tcp() -> socket.socket:
            return socket.create_connection((HOST, plain.port))

        def over_tls() -> socket.socket:
            bare = socket.create_connection((HOST, secure.port))
            return context.wrap_socket(bare, server_hostname=HOST)

        for service in (plain, secure):
            assert service.post("/workers", WORKER)[0] == 201
        with over_tcp() as one, over_tls() as other:
            ask(one, REQUESTS)
            ask(other, REQUESTS)
            turns = [(per_request(plain, one), per_request(secure, other)) for _ in range(TURNS)]
        costs = [after - before for before, after in turns]
        low, middle, high = statistics.quantiles(costs, n=4)
        print(f"a select without TLS:     {statistics.median(a for a, _ in turns):7.1f} us")
        print(f"more with TLS:            {middle:7.1f} us ({low:.1f} to {high:.1f})")
        for name, service, connect in (
            ("TCP", plain, over_tcp),
            ("TLS", secure, over_tls),
        ):
            spent, held = per_connection(service, connect)
            print(f"a connection over {name}: {spent:9.0f} us, {held:.1f} KiB while it is open")


if __name__ == "__main__":
    main()
