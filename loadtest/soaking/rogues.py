"""Peers and engines that speak nonsense, on real sockets: whoever connects, or is connected to.

A TCP listener that is no ZMQ at all, a PUB socket whose batches are no batches, a PUB socket whose
frames are no replica's; and connections of ours to the measured process' own PUB socket.
"""

import asyncio
import contextlib
from collections import Counter
from random import Random

import zmq
import zmq.asyncio

from lean_selector.wire.replica_frames import TOPIC
from loadtest.soaking.mischief import rest

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
        self.sources.append(f"tcp://127.0.0.1:{port}")
        self.sources.append("tcp://127.0.0.1:1")
        if named:
            self.sources.append("tcp://nobody.soak:1")

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
        await self._peer.send_multipart(
            drawn.choice(([topic, noise], [topic], [topic, b"", noise]))
        )
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
