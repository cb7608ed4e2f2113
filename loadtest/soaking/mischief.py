"""Clients and peers of the soak that do not behave: they hang up, are slow, and send nonsense."""

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

import zmq
import zmq.asyncio

from lean_selector.wire.replica_frames import TOPIC
from loadtest.http_client import Malformed, answer_at, http
from loadtest.soaking.fleet import MODEL, authorized

# -- clients ---------------------------------------------------------------------------------------

ACTS_PER_S = 20.0
ANSWER_S = 60.0
LINGER_S = 2.0
MOST_CHUNKS = 1 << 16
LARGE_BODY = 6 << 20
CHURNED = range(1_001, 1_009)  # workers of a model of their own, that come and go
_LOOKS = ("/health", "/ready", "/loads", "/metrics", "/workers", "/kv_sources", "/dump", "/nowhere")
_ODD_REQUESTS = (
    b"GARBAGE\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /select HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    b"POST /select HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n",
    b"POST /select HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
    b"GET /loads HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
)
_ODD_BODIES = (
    b"",
    b"{",
    b"[]",
    b'{"model_name":"soak","token_ids":[-1]}',
    b'{"model_name":"soak","token_ids":"x"}',
    b'{"model_name":"soak","token_ids":[' + b"[" * 5_000,
    b'{"model_name":"soak","token_ids":[]}',
    b"\xff\xfe\x00",
)


async def rest(stop: asyncio.Event, seconds: float) -> None:
    """That long, or until `stop` is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


class Mischief:
    """Acts against the service on `port`, drawn from a seed."""

    def __init__(self, port: int, seed: int, sources: list[str]) -> None:
        """`sources`: where the workers that come and go are said to publish their events."""
        self.acts: Counter[str] = Counter()
        self.wrong = list[str]()  # where an answer was promised: what came in its place
        self._port, self._sources = port, sources
        self._drawn = Random(f"mischief/{seed}")
        self._numbers = itertools.count()
        self._kinds: list[Callable[[], Awaitable[None]]] = [
            self._hang_up,
            self._leave_behind_a_request,
            self._never_free,
            self._never_free,
            self._be_slow,
            self._read_nothing,
            self._garbage,
            self._odd_body,
            self._look,
            self._look,
            self._change_workers,
            self._send_one_byte_chunks,
            self._send_wrong_credentials,
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set; those under way come to their end."""
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                group.create_task(self._act(self._drawn.choice(self._kinds)))
                await rest(stop, self._drawn.expovariate(ACTS_PER_S))
        for worker_id in CHURNED:
            await self._answered(authorized("DELETE", f"/workers/{worker_id}"), {200, 404})

    async def _act(self, act: Callable[[], Awaitable[None]]) -> None:
        self.acts[act.__name__.strip("_").replace("_", " ")] += 1
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(ANSWER_S):
                await act()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    def _selection(self) -> bytes:
        tokens = [self._drawn.randrange(1 << 20) for _ in range(self._drawn.randrange(1, 400))]
        name = f"never-freed-{next(self._numbers)}"
        body = {"reservation_id": name, "model_name": MODEL, "token_ids": tokens}
        return authorized("POST", "/select_and_reserve", json.dumps(body).encode())

    async def _answered(self, request: bytes, statuses: set[int]) -> None:
        """Ask, and be answered with one of these, whole. What else comes is noted."""
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await self._connection()
                with contextlib.closing(writer):
                    writer.write(request)
                    data = b""
                    while (found := answer_at(data, 0)) is None:
                        piece = await reader.read(1 << 18)
                        if not piece:
                            self.wrong.append(f"{request[:60]!r}: closed after {data[:200]!r}")
                            return
                        data += piece
            if found[0] not in statuses or found[2] != len(data):
                self.wrong.append(f"{request[:60]!r}: {data[:200]!r}")
        except (OSError, TimeoutError, Malformed) as error:
            self.wrong.append(f"{request[:60]!r}: {type(error).__name__} {error}")

    async def _hang_up(self) -> None:
        """In the middle of a request."""
        request = self._selection()
        _, writer = await self._connection()
        writer.write(request[: self._drawn.randrange(len(request))])
        await asyncio.sleep(self._drawn.uniform(0.0, 0.1))
        self._leave(writer)

    async def _leave_behind_a_request(self) -> None:
        """Without reading its answer: what it reserved is freed by nobody."""
        _, writer = await self._connection()
        writer.write(self._selection())
        await asyncio.sleep(self._drawn.uniform(0.0, 0.01))
        self._leave(writer)

    def _leave(self, writer: asyncio.StreamWriter) -> None:
        if self._drawn.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()

    async def _never_free(self) -> None:
        await self._answered(self._selection(), {200, 503})

    async def _be_slow(self) -> None:
        """A request in small pieces is answered like any other."""
        request = self._selection()
        reader, writer = await self._connection()
        with contextlib.closing(writer):
            step = 1 + len(request) // 20
            for at in range(0, len(request), step):
                writer.write(request[at : at + step])
                await asyncio.sleep(LINGER_S / 20)
            if not (await reader.readline()).startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 503 ")):
                self.wrong.append("a slow client got no answer")

    async def _read_nothing(self) -> None:
        """Long answers are asked for, many at a time, and stay unread."""
        _, writer = await self._connection()
        writer.write(authorized("GET", "/metrics") * 30)
        await asyncio.sleep(LINGER_S)
        self._leave(writer)

    async def _garbage(self) -> None:
        reader, writer = await self._connection()
        with contextlib.closing(writer):
            drawn = self._drawn
            odd = drawn.choice([*_ODD_REQUESTS, drawn.randbytes(drawn.randrange(1, 4_000))])
            writer.write(odd)
            async with asyncio.timeout(LINGER_S):
                while await reader.read(1 << 16):
                    pass

    async def _odd_body(self) -> None:
        path = self._drawn.choice(("/select", "/select_and_reserve", "/reservations", "/workers"))
        request = authorized("POST", path, self._drawn.choice(_ODD_BODIES))
        await self._answered(request, {400, 404, 413, 415, 422})

    async def _send_one_byte_chunks(self) -> None:
        """A body whose every byte is a chunk of its own is answered like any other."""
        head, _, body = self._selection().partition(b"\r\n\r\n")
        head = head.replace(b"content-length: %d" % len(body), b"transfer-encoding: chunked")
        body += b" " * self._drawn.randrange(MOST_CHUNKS)
        chunks = b"".join(b"1\r\n%c\r\n" % each for each in body)
        await self._answered(head + b"\r\n\r\n" + chunks + b"0\r\n\r\n", {200, 503})

    async def _send_wrong_credentials(self) -> None:
        """The head is refused, and the large body that it announces is not waited for."""
        request = http("POST", "/select", b" " * LARGE_BODY, token="wrong")
        await self._answered(request[: self._drawn.randrange(200, LARGE_BODY)], {401})

    async def _look(self) -> None:
        path = self._drawn.choice(_LOOKS)
        await self._answered(authorized("GET", path), {200, 404})

    async def _change_workers(self) -> None:
        """Workers whose events come from nowhere, or from where nonsense comes from."""
        worker_id = self._drawn.choice(CHURNED)
        if self._drawn.random() < 0.3:
            request = authorized("DELETE", f"/workers/{worker_id}")
            await self._answered(request, {200, 404})
            return
        body = {
            "worker_id": worker_id,
            "model_name": "come-and-go",
            "endpoint": f"http://127.0.0.1:{8_000 + worker_id}",
            "block_size": 16,
            "kv_events_endpoints": {"0": self._drawn.choice(self._sources)},
            "replay_endpoint": self._drawn.choice(self._sources),
        }
        await self._answered(authorized("POST", "/workers", json.dumps(body).encode()), {200, 201})


# -- peers and engines that speak nonsense, on real sockets ----------------------------------------

PERIOD_S = 0.05
_ZMTP = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
_BATCHES = (
    b"",
    b"\xc1",
    b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
    b"\x93\xcb" + bytes(8) + b"\x91\x94\xabBlockStored\x91\x01\xc0\x91\x01\x10\xc0",
    b"\x92\xcb" + bytes(8) + b"\x91\x91\xb0AllBlocksCleared\x00",
    b"\x81\xa2ts\x01",
)


class Rogues:
    """Runs on the loop that makes it; `sources` are endpoints of events that are none."""

    def __init__(self, peer_port: int, publishes_at: int, seed: int) -> None:
        """peer_port: where a replica is expected and a rogue is. publishes_at: the PUB port of the
        measured process."""
        self.sent: Counter[str] = Counter()
        self._publishes_at = publishes_at
        self._drawn = Random(f"rogues/{seed}")
        self._context = zmq.asyncio.Context()
        self._peer = self._context.socket(zmq.PUB)
        self._peer.bind(f"tcp://127.0.0.1:{peer_port}")
        self._engine = self._context.socket(zmq.PUB)
        self._engine.bind("tcp://127.0.0.1:*")
        self._server: asyncio.Server | None = None
        self.sources = [self._engine.get_string(zmq.LAST_ENDPOINT)]

    async def begin(self, named: bool) -> None:
        """Listen. `named`: the measured process knows names under `.soak`, so some source has one
        (nobody is there, and the look-up may hang)."""
        self._server = await asyncio.start_server(self._babble, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.sources += [f"tcp://127.0.0.1:{port}", "tcp://127.0.0.1:1"]
        self.sources += ["tcp://nobody.soak:1"] * named

    async def _babble(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sent["bytes to who connected to an engine"] += 1
        with contextlib.suppress(OSError), contextlib.closing(writer):
            greeting = _ZMTP if self._drawn.random() < 0.5 else b""
            writer.write(greeting + self._drawn.randbytes(self._drawn.randrange(1, 5_000)))
            await writer.drain()
            await asyncio.sleep(PERIOD_S)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set."""
        while not stop.is_set():
            await self._publish()
            if self._drawn.random() < 0.2:
                await self._attack()
            await rest(stop, PERIOD_S)

    async def _publish(self) -> None:
        drawn = self._drawn
        batch = drawn.choice([*_BATCHES, drawn.randbytes(drawn.randrange(1, 2_000))])
        number = drawn.randbytes(drawn.choice((8, 8, 8, 3)))
        frames = drawn.choice(([b"", number, batch], [b"kv", number, batch], [batch], [b""] * 9))
        await self._engine.send_multipart(frames)
        self.sent["batches of an engine"] += 1
        noise = drawn.randbytes(drawn.randrange(2_000))
        topic = drawn.choice((TOPIC, TOPIC + b".lean-heartbeat", b""))
        frames = drawn.choice(([topic, noise], [topic], [topic, b"", noise]))
        await self._peer.send_multipart(frames)
        self.sent["frames of a replica"] += 1

    async def _attack(self) -> None:
        """On the socket on which the measured process publishes."""
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self._publishes_at)
            with contextlib.closing(writer):
                writer.write(self._drawn.choice((b"", _ZMTP)) + self._drawn.randbytes(2_000))
                await writer.drain()
                self.sent["bytes to its replica port"] += 1

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._context.destroy(linger=0)
