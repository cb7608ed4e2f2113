"""A scripted HTTP service, for what the real one does not do on demand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.outbound_server import response, serving

Answer = tuple[int, bytes]


class ScriptedService:
    """Answers each "METHOD /path" from a table, 404 otherwise."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[tuple[str, bytes]] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The URL at which it listens."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head, _, body = served.requests[-1].partition(b"\r\n\r\n")
            call = b" ".join(head.split(b" ", 2)[:2]).decode()
            self.requests.append((call, body))
            status, text = self.answers.get(call, (404, b'{"error":"route not found"}'))
            writer.write(response(text, f"{status} X", "connection: close\r\n"))

        async with serving(serve) as served:
            yield served.url


@pytest.fixture
def scripted() -> ScriptedService:
    return ScriptedService()
