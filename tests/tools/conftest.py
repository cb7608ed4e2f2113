"""A scripted HTTP service, for what the real one does not do on demand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

Answer = tuple[int, bytes]


class ScriptedService:
    """Answers each "METHOD /path" from a table, 404 otherwise."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.raw: dict[str, bytes] = {}  # sent as it is instead, then the connection is closed
        self.silent: set[str] = set()  # never answered
        self.requests: list[tuple[str, bytes]] = []
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The URL at which it listens. Clients must have closed their connections at the end."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=20)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.lower().split("\r\n")
                length = next((int(x[16:]) for x in lines if x.startswith("content-length: ")), 0)
                body = await reader.readexactly(length)
                call = " ".join(head.split(" ")[:2])
                self.requests.append((call, body))
                if call in self.silent:
                    await reader.read()
                    break
                if call in self.raw:
                    writer.write(self.raw[call])
                    break
                status, text = self.answers.get(call, (404, b'{"error":"route not found"}'))
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(text)))
                writer.write(text)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
def scripted() -> ScriptedService:
    return ScriptedService()
