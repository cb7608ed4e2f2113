"""An engine's publisher of KV events with a replay buffer, which loses what a test has it lose."""

import asyncio
import itertools
import struct
from collections import Counter, deque
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from tests.support.on_loop import DEADLINE_S
from tests.support.running_service import free_port

BLOCK_SIZE = 2
END = b"\xff" * 8
SERVED, SILENT = "served", "silent"  # replays are; whoever asks for them gets no answer


class Engine:
    """`copies` is what it holds; a batch of `store` is one event."""

    engines = itertools.count()  # what each begins with, as with the time

    def __init__(self, replays: str = "") -> None:
        self.began_at = 1_000_000.0 * next(self.engines)
        self.context = zmq.asyncio.Context()
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.replay_endpoint = f"tcp://127.0.0.1:{free_port()}" if replays else None
        self.serves = replays == SERVED
        self.seq = 0
        self.copies: Counter[int] = Counter()
        self.buffer: deque[tuple[int, bytes]] = deque()
        self.requests: list[int] = []
        self.with_topic = True  # newer vLLM and TRT-LLM; False: SGLang and older vLLM
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # XPUB is PUB, and shows who subscribes.
        self.pub = self.context.socket(zmq.XPUB)
        self.pub.setsockopt(zmq.LINGER, 0)
        self.pub.setsockopt(zmq.SNDHWM, 100_000)
        self.pub.bind(self.endpoint)
        if self.serves:
            self.serve_replays()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.serving is not None:
            self.serving.cancel()
            await asyncio.gather(self.serving, return_exceptions=True)
        self.context.destroy(linger=0)

    @property
    def blocks(self) -> set[int]:
        return {block for block, copies in self.copies.items() if copies > 0}

    @property
    def asked(self) -> list[int]:
        """Where replays were asked from, each once: one that is slow is asked for again."""
        return [start for start, _ in itertools.groupby(self.requests)]

    def router(self) -> zmq.asyncio.Socket:
        """Where replays are asked for."""
        assert self.replay_endpoint is not None
        router = self.context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(self.replay_endpoint)
        self._kept = router  # open also where nobody reads it
        return router

    def serve_replays(self) -> None:
        self.serving = asyncio.get_running_loop().create_task(self._serve(self.router()))

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        shape = [b"", b""] if self.with_topic else [b""]
        while True:
            identity, empty, start = await router.recv_multipart()
            assert empty == b""
            first = struct.unpack(">Q", start)[0]
            self.requests.append(first)
            await self.may_answer.wait()
            for seq, payload in [each for each in self.buffer if each[0] >= first]:
                await router.send_multipart([identity, *shape, struct.pack(">Q", seq), payload])
            await router.send_multipart([identity, *shape, END, b""])

    async def subscribed(self) -> None:
        message = await asyncio.wait_for(self.pub.recv(), DEADLINE_S)
        assert message == b"\x01"

    async def publish(self, *events: object, lost: bool = False) -> None:
        """One batch."""
        payload = msgspec.msgpack.encode([self.began_at + self.seq, events, None])
        self.buffer.append((self.seq, payload))
        self.seq += 1
        if not lost:
            await self.pub.send_multipart([b"", struct.pack(">Q", self.seq - 1), payload])

    async def store_at_once(self, *blocks: int, then: tuple[object, ...] = ()) -> None:
        """One batch of so many events, and others behind them."""
        self.copies.update(blocks)
        await self.publish(*(_stored(block) for block in blocks), *then)

    async def store(self, *blocks: int, lost: bool = False) -> None:
        for block in blocks:
            self.copies[block] += 1
            await self.publish([*_stored(block), None, "GPU", None, None], lost=lost)

    async def remove(self, block: int, lost: bool = False) -> None:
        self.copies[block] -= 1
        await self.publish(["BlockRemoved", [block], "GPU"], lost=lost)

    async def clear(self) -> None:
        self.copies.clear()
        await self.publish(["AllBlocksCleared"])


def _stored(block: int) -> list[object]:
    return ["BlockStored", [block], None, [block] * BLOCK_SIZE, BLOCK_SIZE]
