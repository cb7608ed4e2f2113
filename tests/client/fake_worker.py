"""An OpenAI-compatible worker: a real HTTP server in a thread, with the manners of vLLM.

How a request is treated, it says itself, in the field `fake`:
    status            answer with this status and no stream
    break_after       cut the connection after so many tokens
    error_after       report an error in the stream after so many tokens
    stall_after       say nothing more after so many tokens
    step_s            pause between two tokens
    never_ends        leave the response open after the last event
    cached            tokens of the prompt that were cached, in the usage
    without           names that the chunks and the end leave out: token_ids, usage, done
"""

import asyncio
import contextlib
import json
import threading
from typing import Any

START_S = 20.0


class FakeWorker:
    """Answers while entered. `requests` keeps the bodies, `headers` their headers."""

    def __init__(self, status: int | None = None, port: int = 0) -> None:
        """`port`: 0 is any that is free."""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.connections = 0
        self.hung_up = 0  # requests whose client went away before the end
        self.status = status  # of every answer, if given
        self.port = port

    def __enter__(self) -> "FakeWorker":
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_S)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._one_request(reader, writer):
                    pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _one_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")[:-2]
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests.append(body)
        self.headers.append(headers)
        fake = body.get("fake", {})
        status = self.status or fake.get("status")
        if lines[0] != "POST /v1/completions HTTP/1.1":
            status = 404
        if status:
            text = json.dumps({"error": {"message": "the fake refuses", "code": status}})
            await _write(
                writer,
                f"HTTP/1.1 {status} No\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode(),
            )
            return True
        # A client that goes away is noticed by reading: it sends nothing while it streams.
        gone = asyncio.create_task(reader.read(1))
        stream = asyncio.create_task(_stream(writer, body, fake))
        try:
            await asyncio.wait({gone, stream}, return_when=asyncio.FIRST_COMPLETED)
            if not stream.done() or isinstance(stream.exception(), ConnectionError):
                self.hung_up += 1
                return False
            # A connection whose next request has begun would have lost a byte: not kept.
            return stream.result() and not gone.done()
        finally:
            for task in (gone, stream):
                task.cancel()
            await asyncio.gather(gone, stream, return_exceptions=True)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _stream(writer: asyncio.StreamWriter, body: dict[str, Any], fake: Any) -> bool:
    """The whole answer; True when the connection may be used again."""
    without = fake.get("without", [])
    tokens = body.get("max_tokens", 4)
    await _write(
        writer,
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    )

    async def event(value: object) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        data = f"data: {text}\n\n".encode()
        await _write(writer, b"%x\r\n%b\r\n" % (len(data), data))

    for number in range(tokens + 1):
        if number == fake.get("break_after"):
            return False
        if number == fake.get("stall_after"):
            await asyncio.Event().wait()
        if number == fake.get("error_after"):
            await event({"error": {"message": "the fake fails", "code": 500}})
            break
        if number == tokens:
            break
        if step_s := fake.get("step_s"):
            await asyncio.sleep(step_s)
        last = number == tokens - 1
        choice = {
            "index": 0,
            "text": f" t{number}",
            "token_ids": [1000 + number],
            "finish_reason": "length" if last else None,
            "logprobs": None,
        }
        if "token_ids" in without or not body.get("return_token_ids"):
            del choice["token_ids"]
        await event({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})
    if "usage" not in without:
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        if "cached" in fake:
            usage["prompt_tokens_details"] = {"cached_tokens": fake["cached"]}
        await event({"choices": [], "usage": usage})
    if "done" not in without:
        await event("[DONE]")
    if fake.get("never_ends"):
        await asyncio.Event().wait()
    await _write(writer, b"0\r\n\r\n")
    return True
