"""CPU of the HTTP layer per request, without system calls: reader, protocol, response, router.

Run by hand: `python tests/bench/bench_http.py`. Prints nanoseconds per request, the best of
several rounds; on a busy machine only the ratios hold.
"""

import asyncio
import timeit

from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits, Request
from lean_selector.http.protocol import HttpProtocol
from lean_selector.http.reader import RequestReader
from lean_selector.http.response import date_header, encode_response
from lean_selector.http.routes_by_path import RouteTable

HEAD = (
    b"POST %b HTTP/1.1\r\nHost: 127.0.0.1:8092\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
    b"Connection: keep-alive\r\nUser-Agent: python-httpx/0.28.1\r\nContent-Length: %d\r\n"
    b"Content-Type: application/json\r\n%b\r\n"
)
TRACEPARENT = b"traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n"
PREFILL_PATH = b"/reservations/0b1c2d3e-1111-4222-8333-444455556666/prefill_complete"
REPLY = encode_response(200, b'{"status":"ok"}')


class NullTransport(asyncio.Transport):
    """Takes every write and forgets it."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass


def request(path: bytes, body: bytes, extra: bytes = b"") -> bytes:
    return HEAD % (path, len(body), extra) + body


def answer(request: Request) -> bytes:
    return REPLY


def measure(name: str, statement: str, per_run: int = 1, **names: object) -> None:
    rounds = 20_000 if per_run < 10 else 2_000
    best = min(timeit.repeat(statement, number=rounds, repeat=15, globals=names))
    print(f"{best / rounds / per_run * 1e9:8.0f} ns  {name}")


def main() -> None:
    date_header.set(1_700_000_000.0)
    small = request(b"/select", b'{"token_ids":[1]}')
    traced = request(b"/select", b'{"token_ids":[1]}', TRACEPARENT)
    prefill = request(PREFILL_PATH, b"{}")
    large = request(b"/select", b"[" + b"1," * 8_000 + b"1]")
    reader = RequestReader(Limits())
    measure("reader: small POST", "reader.feed(data)", reader=reader, data=small)
    measure(
        "reader: small POST, 50 in one read",
        "reader.feed(data)",
        50,
        reader=reader,
        data=small * 50,
    )
    measure("reader: POST on a reservation", "reader.feed(data)", reader=reader, data=prefill)
    measure("reader: headers not seen before", "reader.feed(data)", reader=reader, data=traced)
    measure("reader: 16 KB body in one read", "reader.feed(data)", reader=reader, data=large)

    protocol = HttpProtocol(answer, Connections(call_soon=lambda callback: None))
    protocol.connection_made(NullTransport())
    receive = "protocol.data_received(data)"
    measure("reader and protocol: small POST", receive, protocol=protocol, data=small)
    measure("reader and protocol: 50 in one read", receive, 50, protocol=protocol, data=small * 50)
    measure("reader and protocol: headers not seen before", receive, protocol=protocol, data=traced)

    body = b'{"worker_id":7,"dp_rank":0}' * 8
    encode = "encode(200, body)"
    measure("response: 200, 216 bytes of JSON", encode, encode=encode_response, body=body)
    measure("  of which the join", "b''.join((body, body, body))", body=body)
    table = RouteTable(
        [
            ("POST", "/select", 1),
            ("GET", "/workers", 2),
            ("POST", "/reservations/{id}/prefill_complete", 3),
        ]
    )
    measure("router: literal path", "table.match(b'POST', b'/select')", table=table)
    match = "table.match(b'POST', path)"
    measure("router: path with a parameter", match, table=table, path=PREFILL_PATH)


if __name__ == "__main__":
    main()
