"""An OpenAI-compatible worker that publishes real KV events, in a process of its own.

Speaks as vLLM does: /v1/models, /v1/completions and /v1/chat/completions, streamed and not,
/v1/messages and /v1/responses with their /render, /v1/embeddings, /tokenize, /metrics and
/kv_event_sources to be found by, `return_token_ids`, and a usage that says how many tokens of the
prompt were cached. The cache is that of the demo's engines. A token is a byte of the rendered
prompt, so whoever has the text can tell the tokens.

    with OpenAiWorker() as worker: ... worker.url ... worker.kill() ... worker.start()

In a request, the field `fake` asks for odd manners:
    status         answer with this status and OpenAI's error
    breaks         cut the connection before the head
    stall_after    say nothing more after so many tokens
    loses_events   publish nothing of this request
    dies_after     end the process after the answer
    lacks_params   answer a prefill leg as if there were no connector
    prefill, decode
                   such manners of a prefill leg, or of a decode leg
    a port         such manners of the worker at this port

With `transfers` it does with `kv_transfer_params` what `kv_transfer` says.
"""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import count
from types import SimpleNamespace
from typing import Any, Self

from lean_selector.tools.simulated_engines import (
    EngineSpeed,
    HeldChain,
    RunningRequest,
    SimulatedEngine,
    make_request,
)
from loadtest.child_service import free_port
from tests.support.kv_transfer import Refused, Transfers

MODEL = "m"
BLOCK_SIZE = 16
DEFAULT_MAX_TOKENS = 16
PREFILL_TOKENS_PER_S = 20_000_000.0  # a prompt of megabytes is no pause
OPTIONS: dict[str, Any] = {
    **{"blocks": 2_000, "tokens_per_s": 2_000.0, "version": None},
    **{"replays": True, "fails": None, "certificate": None},
    **{"host": "127.0.0.1", "transfers": False, "lease_s": 30.0},
}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
COMPLETIONS = ("/v1/completions", "/v1/chat/completions", MESSAGES, RESPONSES)
POOLED = ("/v1/embeddings", "/v1/rerank", "/v1/score")
ASKED_FIRST = ("/v1/models", "/metrics", "/kv_event_sources", "/health", "/fake/seen")


def rendered(messages: list[dict[str, Any]]) -> str:
    """The chat template."""
    turns = "".join(f"<|{each['role']}|>{_text_of(each['content'])}\n" for each in messages)
    return turns + "<|assistant|>"


def prompt_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a chat, of Anthropic's API or of /v1/responses."""
    system = body.get("system") or body.get("instructions")
    items = body.get("messages") or body["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [*([{"role": "system", "content": system}] if system else []), *items]


def tokens_of(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


def said(prompt_tokens: int, count: int) -> str:
    """What is answered, `count` tokens: it depends on the prompt alone."""
    return "".join(f"w{prompt_tokens % 97}.{number} " for number in range(count))[:count]


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "<image>") for part in content)
    return str(content)


# -- the parent's side -----------------------------------------------------------------------------


class OpenAiWorker:
    """Up while entered, except while it is killed; on the same ports when it is started again."""

    def __init__(self, model: str = MODEL, **options: Any) -> None:
        """`options`: instead of those in OPTIONS. `fails`: the status of all answers but
        ASKED_FIRST. `certificate`: PEM of a chain and its key, for HTTPS."""
        assert options.keys() <= OPTIONS.keys()
        self.port, self.events_port, self.replay_port = free_port(), free_port(), free_port()
        ports = {
            "port": self.port,
            "events_port": self.events_port,
            "replay_port": self.replay_port,
        }
        self._options = {"model": model, **OPTIONS, **options, **ports}
        self.model, self.block_size = model, BLOCK_SIZE
        self._scheme = "https" if self._options["certificate"] else "http"
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        host = self._options["host"]
        return f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def registration(self, worker_id: int) -> dict[str, object]:
        """The body of POST /workers, for selectors that do not find it by its URL."""
        return {
            "worker_id": worker_id,
            "model_name": self.model,
            "endpoint": self.url,
            "block_size": self.block_size,
            "kv_events_endpoint": f"tcp://127.0.0.1:{self.events_port}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
        }

    def start(self) -> None:
        options = json.dumps(self._options)
        command = [sys.executable, "-m", "tests.support.openai_worker", options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(number)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def seen(self) -> dict[str, Any]:
        """What it was asked so far: `requests` (their first lines, headers and bodies),
        `connections`, completions that were `hung_up` on, `active` requests, `hit_blocks`,
        `prompt_blocks` and `published_batches`; `legs` on which it prefilled, their `pulls`,
        the `leases` that no worker has fetched, and `poisoned` transfers."""
        connection = http.client.HTTPConnection(self._options["host"], self.port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", "/fake/seen")
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


# -- the worker's side -----------------------------------------------------------------------------


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    """A body in chunks, perhaps with trailers."""
    pieces = []
    while size := int((await reader.readline()).partition(b";")[0], 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
    while await reader.readline() not in (b"\r\n", b""):
        pass
    return b"".join(pieces)


class _Worker:
    def __init__(self, options: SimpleNamespace) -> None:
        self.options = options
        self.engine = SimulatedEngine(
            1,
            options.blocks,
            BLOCK_SIZE,
            EngineSpeed(PREFILL_TOKENS_PER_S, options.tokens_per_s),
            asyncio.sleep,
            f"tcp://127.0.0.1:{options.events_port}",
            f"tcp://127.0.0.1:{options.replay_port}",
        )
        self.transfers = Transfers(options.port, options.lease_s)
        self.requests: list[dict[str, Any]] = []
        self.connections = 0
        self.hung_up = 0
        self.count = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while await self._one_request(reader, writer):
                    pass
        finally:
            writer.close()

    async def _one_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])
        }
        if headers.get("transfer-encoding") == "chunked":
            raw = await _chunks(reader)
        else:
            raw = await reader.readexactly(int(headers.get("content-length", "0")))
        method, target, _ = head[0].split(" ", 2)
        path = target.partition("?")[0]
        if not path.startswith("/fake/"):
            seen = {"line": head[0], "headers": headers, "body": raw.decode(errors="replace")}
            self.requests.append(seen)
            del self.requests[:-2_000]
        # A client that goes away is noticed by reading: it sends nothing before its answer.
        gone = asyncio.create_task(reader.read(1))
        answer = asyncio.create_task(self._answer(method, path, headers, raw, writer))
        try:
            await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
            # On a busy machine, a write may meet the closed connection before `gone` does.
            if not answer.done() or isinstance(answer.exception(), ConnectionError):
                self.hung_up += path in COMPLETIONS  # not a probe that gave up on a busy machine
                return False
            return answer.result() and not gone.done()
        finally:
            for task in (gone, answer):
                task.cancel()
            await asyncio.gather(gone, answer, return_exceptions=True)

    async def _answer(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        raw: bytes,
        writer: asyncio.StreamWriter,
    ) -> bool:
        try:
            if self.options.fails is not None and path not in ASKED_FIRST:
                raise Refused(self.options.fails, "the fake always refuses")
            if method == "POST" and path in COMPLETIONS:
                body = self._body(raw)
                return await _KINDS.get(path, _Completion)(self, path, body, headers, writer).run()
            status, content_type, text = self._plain(method, path, raw)
        except Refused as error:
            told = {"message": str(error), "type": "BadRequestError", "code": error.status}
            status, content_type, text = error.status, "application/json", _json({"error": told})
        if method == "HEAD":
            await _write(writer, _head(status, content_type, len(text)))
        else:
            await _write(writer, _head(status, content_type, len(text)) + text)
        return True

    def _body(self, raw: bytes) -> dict[str, Any]:
        try:
            body = json.loads(raw)
        except ValueError as error:
            raise Refused(400, f"invalid JSON: {error}") from None
        if body.get("model", self.options.model) != self.options.model:
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        assert isinstance(body, dict)
        return body

    def _plain(self, method: str, path: str, raw: bytes) -> tuple[int, str, bytes]:
        """Status, content type and body of what is answered at once."""
        options = self.options
        if path == "/v1/models":
            row = {"id": options.model, "object": "model", "owned_by": "vllm", "parent": None}
            return 200, "application/json", _json({"object": "list", "data": [row]})
        if path == "/metrics":
            text = (
                f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",engine="0",'
                f'num_gpu_blocks="{options.blocks}"}} 1.0\n'
            )
            return 200, "text/plain", text.encode()
        if path == "/version" and options.version is not None:
            return 200, "application/json", _json({"version": options.version})
        if path == "/kv_event_sources":
            source = {
                "data_parallel_rank": 0,
                "endpoint": f"tcp://*:{options.events_port}",
            }
            if options.replays:
                source["replay_endpoint"] = f"tcp://*:{options.replay_port}"
            return 200, "application/json", _json([source])
        if path == "/tokenize" and method == "POST":
            body = self._body(raw)
            text = rendered(body["messages"]) if "messages" in body else body["prompt"]
            tokens = tokens_of(text)
            answer = {"count": len(tokens), "max_model_len": 100_000, "tokens": tokens}
            return 200, "application/json", _json(answer)
        if path in (f"{MESSAGES}/render", f"{RESPONSES}/render"):
            tokens = tokens_of(rendered(prompt_of(self._body(raw))))
            return 200, "application/json", _json({"request_id": "r", "token_ids": tokens})
        if path in POOLED:
            self._body(raw)
            data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
            used = {"prompt_tokens": len(raw) // 4, "completion_tokens": 0, "total_tokens": 9}
            answer = {"object": "list", "model": options.model, "data": data, "usage": used}
            return 200, "application/json", _json(answer)
        if path == "/health":
            return 200, "text/plain", b""
        if path == "/echo":
            return 200, "application/octet-stream", raw
        if path == "/fake/pull":
            return 200, "text/plain", self.transfers.pull(json.loads(raw)).encode()
        if path == "/fake/seen":
            engine = self.engine
            seen = {
                "requests": self.requests,
                "connections": self.connections,
                "hung_up": self.hung_up,
                "published_batches": engine._publisher.sequence,
                "active": engine.active,
                "hit_blocks": engine.hit_blocks,
                "prompt_blocks": engine.prompt_blocks,
                **self.transfers.seen(),
            }
            return 200, "application/json", _json(seen)
        return 404, "application/json", _json({"detail": "Not Found"})


class _Completion:
    """One answer of /v1/completions or /v1/chat/completions."""

    def __init__(
        self,
        worker: _Worker,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        writer: asyncio.StreamWriter,
    ) -> None:
        self.worker, self.body, self.writer = worker, body, writer
        self.is_chat = path != "/v1/completions"
        self.transfer: Any = body.get("kv_transfer_params") if worker.options.transfers else None
        told = self.transfer if isinstance(self.transfer, dict) else {}
        self.prefills = bool(told.get("do_remote_decode"))
        leg = "prefill" if self.prefills else "decode" if told.get("do_remote_prefill") else ""
        fake = body.get("fake", {})
        fake |= fake.get(str(worker.options.port), {})
        self.fake: dict[str, Any] = fake | fake.get(leg, {})
        self.lacks_blocks = False  # they could not be fetched
        self.transfer_told: dict[str, Any] | None = None  # `kv_transfer_params` of the answer
        if self.is_chat:
            self.prompt = tokens_of(rendered(prompt_of(body)))
        else:
            prompt = body["prompt"]
            if isinstance(prompt, list) and isinstance(prompt[0], str):
                prompt = prompt[0]  # of several, the first is answered
            self.prompt = tokens_of(prompt) if isinstance(prompt, str) else list(prompt)
        if not self.prompt:
            raise Refused(400, "the prompt is empty")
        self.wants_ids = bool(body.get("return_token_ids"))
        self.request_id = headers.get("x-request-id", "none")
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        count = next((body[name] for name in names if body.get(name)), DEFAULT_MAX_TOKENS)
        self.output = tokens_of(said(len(self.prompt), count))
        self.cached = 0

    async def run(self) -> bool:
        if "status" in self.fake:
            raise Refused(self.fake["status"], "the fake refuses")
        if self.fake.get("breaks"):
            return False
        size, transfers = BLOCK_SIZE, self.worker.transfers
        is_right = None
        if not self.prefills:
            try:
                is_right = await transfers.fetch(self.transfer, len(self.prompt) // size)
            except Refused as error:
                if error.status != 500 or not self.body.get("stream"):
                    raise
                self.lacks_blocks = True  # as vLLM: the stream begins
        if is_right is False:
            self.output = tokens_of("wrong" * len(self.output))[: len(self.output)]
        transfers.reuse()
        tokens = self.prompt + self.output
        self.worker.count += 1
        request = make_request(
            f"r{self.worker.count}",
            tokens,
            len(self.prompt),
            len(tokens) // size - len(self.prompt) // size,
            size,
        )
        engine, now = self.worker.engine, asyncio.get_running_loop().time()
        running, placed = engine.admit(request, now)
        try:
            if is_right is None:
                await asyncio.sleep(running.prefill_done_at - now)
            self._publish(running, placed)  # as vLLM: once it is computed, or received
            self.cached = running.hit_blocks * size
            if self.cached == len(self.prompt):
                self.cached -= size  # the last token is always computed
            if is_right is not None:  # as vLLM: of the prefill worker's cache, not of its own
                self.cached = self.transfer.get("remote_prefill_cached_tokens", len(self.prompt))
            if self.body.get("stream"):
                return await self._stream(running)
            async for _ in self._tokens(running):
                pass
            if self.prefills and not self.fake.get("lacks_params"):
                blocks = len(self.prompt) // size
                self.transfer_told = transfers.hold(blocks, len(self.prompt), self.cached)
            return await self._whole()
        finally:
            engine.finish(running)

    def _publish(self, running: RunningRequest, placed: HeldChain) -> None:
        """As vLLM: of what is reused nothing, or events like those of new blocks."""
        mode = (self.body.get("vllm_xargs") or {}).get("kv_cache_report_mode")
        if mode == "full":
            self._batch(running, 0, HeldChain(0, placed.hit, []))
        self._batch(running, 0, placed)

    def _batch(self, running: RunningRequest, first: int, placed: HeldChain) -> None:
        engine = self.worker.engine
        if not self.fake.get("loses_events"):
            engine._publish(running.request, first, placed)

    async def _tokens(self, running: RunningRequest) -> AsyncIterator[int]:
        engine, size = self.worker.engine, BLOCK_SIZE
        pause_s = 1.0 / engine.speed.decode_tokens_per_s
        at = len(self.prompt)
        if self.lacks_blocks:
            raise Refused(500, "KV transfer failed")
        for number, token in enumerate(self.output):
            if number == self.fake.get("stall_after"):
                await asyncio.Event().wait()
            await asyncio.sleep(pause_s)
            yield token
            if (at + number + 1) % size == 0:
                index = (at + number + 1) // size - 1 - running.request.prompt_blocks
                placed = engine.decode_block(running, index)
                if placed is not None:
                    self._batch(running, running.request.prompt_blocks + index, placed)

    # -- the words ---------------------------------------------------------------------------------

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self.prompt),
            "total_tokens": len(self.prompt) + len(self.output),
            "completion_tokens": len(self.output),
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def _frame(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = ("chat.completion" if self.is_chat else "text_completion") + (
            ".chunk" if self.is_chat and self.body.get("stream") else ""
        )
        options = self.worker.options
        head = {"id": f"cmpl-{self.request_id}", "object": kind, "model": options.model}
        return _json(
            {**head, "system_fingerprint": f"port-{options.port}", "choices": choices, **more}
        )

    @property
    def _prompt_ids(self) -> list[int] | None:
        return self.prompt if self.wants_ids else None

    def _text(self) -> str:
        return bytes(token - 1 for token in self.output).decode()

    def _whole_frame(self) -> bytes:
        text = self._text()
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        more: dict[str, Any] = {"usage": self._usage()}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        # As vLLM: null where nobody asked for them.
        choice["token_ids"] = self.output if self.wants_ids else None
        (more if self.is_chat else choice)["prompt_token_ids"] = self._prompt_ids
        return self._frame([choice], **more)

    async def _whole(self) -> bool:
        answer = self._whole_frame()
        if self.transfer_told is not None:
            answer = _json({**json.loads(answer), "kv_transfer_params": self.transfer_told})
        await _write(self.writer, _head(200, "application/json", len(answer)) + answer)
        if self.fake.get("dies_after"):
            self.writer.close()
            await self.writer.wait_closed()
            os._exit(1)
        return True

    async def _stream(self, running: RunningRequest) -> bool:
        head = (
            b"HTTP/1.1 200 OK\r\nserver: fake\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        await _write(self.writer, head)

        async def event(text: bytes, name: str | None = None) -> None:
            named = b"" if name is None else b"event: %b\n" % name.encode()
            data = b"%bdata: %b\n\n" % (named, text)
            await _write(self.writer, b"%x\r\n%b\r\n" % (len(data), data))

        try:
            await self._events(running, event)
        except Refused as error:
            failed = {"message": str(error), "type": "api_error", "code": 500}
            if isinstance(self, _Response):
                return False  # as vLLM: the stream breaks off
            if isinstance(self, _Message):
                await event(_json({"type": "error", "error": failed}), "error")
            else:
                await event(_json({"error": failed}))
                await event(b"[DONE]")
        await _write(self.writer, b"0\r\n\r\n")
        return True

    async def _events(self, running: RunningRequest, event: Any) -> None:
        ids: dict[str, Any] = {"prompt_token_ids": self._prompt_ids}
        if self.is_chat:
            delta = {"role": "assistant", "content": ""}
            first = {"index": 0, "delta": delta, "finish_reason": None}
            await event(self._frame([first], **ids))
            ids = {}
        number = 0
        async for token in self._tokens(running):
            number += 1
            text = bytes([token - 1]).decode()
            choice: dict[str, Any] = {"index": 0}
            choice.update({"delta": {"content": text}} if self.is_chat else {"text": text})
            choice["finish_reason"] = "length" if number == len(self.output) else None
            choice["token_ids"] = [token] if self.wants_ids else None
            await event(self._frame([{**choice, **ids}]))
            ids = {}
        if (self.body.get("stream_options") or {}).get("include_usage"):
            await event(self._frame([], usage=self._usage()))
        await event(b"[DONE]")


class _Message(_Completion):
    """One answer of Anthropic's API."""

    def _used(self) -> dict[str, Any]:
        return {
            "input_tokens": len(self.prompt) - self.cached,
            "output_tokens": len(self.output),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
        }

    def _message(self, **more: Any) -> dict[str, Any]:
        said = {"id": f"msg_{self.request_id}", "type": "message", "role": "assistant"}
        return {**said, "model": self.worker.options.model, "stop_sequence": None, **more}

    def _whole_frame(self) -> bytes:
        content = [{"type": "text", "text": self._text()}]
        return _json(self._message(content=content, stop_reason="max_tokens", usage=self._used()))

    async def _events(self, running: RunningRequest, event: Any) -> None:
        async def send(name: str, **fields: Any) -> None:
            await event(_json({"type": name, **fields}), name)

        begun = self._message(
            content=[], stop_reason=None, usage={**self._used(), "output_tokens": 0}
        )
        await send("message_start", message=begun)
        if not self.lacks_blocks:
            await send("content_block_start", index=0, content_block={"type": "text", "text": ""})
        async for token in self._tokens(running):
            delta = {"type": "text_delta", "text": bytes([token - 1]).decode()}
            await send("content_block_delta", index=0, delta=delta)
        await send("content_block_stop", index=0)
        stop = {"stop_reason": "max_tokens", "stop_sequence": None}
        await send("message_delta", delta=stop, usage=self._used())
        await send("message_stop")


class _Response(_Completion):
    """One answer of /v1/responses."""

    def _response(self, status: str) -> dict[str, Any]:
        done = status == "completed"
        part = {"type": "output_text", "text": self._text(), "annotations": []}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": status}
        used = {
            "input_tokens": len(self.prompt),
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": len(self.output),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(self.prompt) + len(self.output),
        }
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": 1,
            "model": self.worker.options.model,
            "status": status,
            "output": [{**item, "content": [part]}] if done else [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": used if done else None,
        }

    def _whole_frame(self) -> bytes:
        return _json(self._response("completed"))

    async def _events(self, running: RunningRequest, event: Any) -> None:
        number = count()

        async def send(name: str, **fields: Any) -> None:
            name = f"response.{name}"
            await event(_json({"type": name, "sequence_number": next(number), **fields}), name)

        await send("created", response=self._response("in_progress"))
        item = {"type": "message", "id": "msg_1", "role": "assistant", "content": []}
        place = {"output_index": 0, "item_id": "msg_1", "content_index": 0}
        part = {"type": "output_text", "text": "", "annotations": []}
        await send("output_item.added", item={**item, "status": "in_progress"}, **place)
        await send("content_part.added", part=part, **place)
        async for token in self._tokens(running):
            await send("output_text.delta", delta=bytes([token - 1]).decode(), logprobs=[], **place)
        await send("output_text.done", text=self._text(), logprobs=[], **place)
        await send("completed", response=self._response("completed"))


_KINDS = {MESSAGES: _Message, RESPONSES: _Response}


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _head(status: int, content_type: str, length: int) -> bytes:
    return (
        f"HTTP/1.1 {status} Fake\r\nserver: fake\r\ncontent-type: {content_type}\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _serve(options: SimpleNamespace) -> None:
    context = None
    if options.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.certificate)
    worker = _Worker(options)
    server = await asyncio.start_server(
        worker.accept, options.host, options.port, ssl=context, backlog=1024
    )
    sys.stdout.write("up\n")
    sys.stdout.flush()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    server.close()
    worker.engine.close()


if __name__ == "__main__":
    asyncio.run(_serve(SimpleNamespace(**json.loads(sys.argv[1]))))
