"""What a request and a streamed chunk cost in a gateway: ours, nginx, vLLM's router and SGLang's.

    python -m loadtest.gateway_cost [--compiled PYTHON] [--router PATH] [--smg PATH]

One worker that answers at once, from memory, so that what is timed is the gateway: CPU seconds of
its processes, from /proc, over a number of requests. Answers with few chunks and with many tell
what a request costs and what each chunk does; then come prompts of 100 kB, and the memory that
1 000 open streams take beyond the start. All candidates take turns in one run, several times;
printed are medians and the spread. The machine should have nothing else to do.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil

from loadtest.child_service import ChildService, cpu_ns, free_port, plain_environment, rss_mb
from loadtest.http_client import http

FEW, MANY = 1, 201  # chunks of an answer
STEP_S = 0.003  # between two chunks, so that each is a read of its own
CLIENTS = 8
HELD = "held"  # a user whose answers stay open
PROMPT = "Tell me of the sea. " * 100  # 2 kB
PROMPT_TOKENS = 500  # of it
LONG = 50  # times as long
OPEN = 1_000  # streams at a time


# -- the worker: answers from memory ---------------------------------------------------------------


async def _answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As many chunks as a request's `max_tokens` asks for: the first with the head at once, the
    others as an engine does, one by one, each in a write of its own."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = re.search(rb"\r\ncontent-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            if b"\r\ntransfer-encoding: chunked" in head:
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    body += (await reader.readexactly(size + 2))[:-2]
                await reader.readuntil(b"\r\n")
            if head.startswith(b"get"):
                writer.write(_plain(head.split(b" ")[1].decode()))
                continue
            request = json.loads(body)
            first, *pieces = _answer(request["max_tokens"], bool(request.get("return_token_ids")))
            writer.write(first)
            if request.get("user") == HELD:
                await reader.read(1)
                return
            for piece in pieces:
                await asyncio.sleep(STEP_S)
                writer.write(piece)


def _plain(path: str) -> bytes:
    body = b"{}"
    if path == "/v1/models":  # by its owner the gateway knows vLLM, and learns from its answers
        body = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}'
    if path == "/metrics":
        body = b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100000"} 1.0\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    return head + b"%d\r\n\r\n%b" % (len(body), body)


@cache
def _answer(count: int, has_ids: bool) -> list[bytes]:
    """Its head with the first chunk, the other chunks, and its end."""
    choice: dict[str, Any] = {"index": 0, "delta": {"content": " token"}, "finish_reason": None}
    if has_ids:
        choice["token_ids"] = [4711]
    event = {"id": "cmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    event["choices"] = [choice]
    data = b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode()
    if has_ids:
        event["prompt_token_ids"] = list(range(1000, 1000 + PROMPT_TOKENS))
    begin = b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode()
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    first, chunk = (b"%x\r\n%b\r\n" % (len(each), each) for each in (begin, data))
    end = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    return [head + first, *[chunk] * (count - 1), end]


async def _serve(port: int) -> None:
    await (await asyncio.start_server(_answer_all, "127.0.0.1", port)).serve_forever()


# -- the client ------------------------------------------------------------------------------------


def request_for(chunks: int, times: int = 1, user: str = "") -> bytes:
    messages = [{"role": "user", "content": PROMPT * times}]
    body = {"model": "m", "messages": messages, "max_tokens": chunks, "stream": True, "user": user}
    return http("POST", "/v1/chat/completions", json.dumps(body).encode())


async def _ask(port: int, request: bytes, requests: int) -> None:
    """So many requests, one behind the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    for _ in range(requests):
        writer.write(request)
        answer = await reader.readuntil(b"\n\r\n0\r\n\r\n")  # a head may end in a 0, too
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        assert b"[DONE]" in answer
    writer.close()


async def load(port: int, request: bytes, requests: int) -> None:
    await asyncio.gather(*(_ask(port, request, requests // CLIENTS) for _ in range(CLIENTS)))


async def open_streams_mb(port: int, pid: int) -> float:
    """What the gateway takes more while so many streams are open."""
    request, writers = request_for(2, user=HELD), list[asyncio.StreamWriter]()
    before = sum(map(rss_mb, tree(pid)))
    taken = math.nan  # of one that refuses so many
    with contextlib.suppress(asyncio.IncompleteReadError):
        for _ in range(OPEN):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            writer.write(request)
            await reader.readuntil(b"}\n\n")
        taken = sum(map(rss_mb, tree(pid))) - before
    for writer in writers:
        writer.transport.abort()
    return taken


# -- the candidates --------------------------------------------------------------------------------


def tree(pid: int) -> list[int]:
    """A process and its children."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def _gateway(worker: int, mode: str, python: str, port: int) -> list[str]:
    # Not from the folder that we are in: that has the sources.
    command = [python, "-P", "-m", "lean_selector", "gateway", f"http://127.0.0.1:{worker}"]
    ports = ("--port", str(port), "--selector-port", str(free_port()))
    return [*command, *ports, "--worker-health-interval-secs", "none", "--prompts", mode]


def _nginx(worker: int, folder: str, port: int) -> list[str]:
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    assert program is not None, "nginx is missing: apt-get install nginx-light"
    config = Path(folder) / "nginx.conf"
    config.write_text(
        f"""daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
        events {{ worker_connections 4096; }}
        http {{
          access_log off; client_body_buffer_size 1m;
          client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
          fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
          upstream workers {{ server 127.0.0.1:{worker}; keepalive 64; }}
          server {{
            listen 127.0.0.1:{port}; keepalive_requests 1000000;
            location / {{
              proxy_pass http://workers; proxy_http_version 1.1; proxy_buffering off;
              proxy_set_header Connection "";
            }}
          }}
        }}"""
    )
    return [program, "-p", folder, "-c", str(config)]


def _router(worker: int, command: list[str], port: int) -> list[str]:
    """vLLM's, or SGLang's, which began as a copy of it."""
    ports = ("--port", str(port), "--prometheus-port", str(free_port()))
    where = ("--worker-urls", f"http://127.0.0.1:{worker}", "--host", "127.0.0.1", *ports)
    many = ("--max-concurrent-requests", str(2 * OPEN))
    return [*command, *where, "--policy", "round_robin", *many]


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[int]:
    """Its process, once it answers."""
    with ChildService(command, port, env=plain_environment()) as child:
        yield child.process.pid


@contextlib.contextmanager
def running_worker() -> Iterator[int]:
    """The port of a worker that answers from memory."""
    port = free_port()
    with running([sys.executable, "-m", "loadtest.gateway_cost", "--worker", str(port)], port):
        yield port


# -- the run ---------------------------------------------------------------------------------------


def cpu_us(port: int, pid: int, request: bytes, count: int) -> float:
    """CPU microseconds of a gateway's processes per request, of so many."""
    before = sum(map(cpu_ns, tree(pid)))
    asyncio.run(load(port, request, count))
    return (sum(map(cpu_ns, tree(pid))) - before) / 1e3 / (count // CLIENTS * CLIENTS)


def _measured(port: int, pid: int, requests: int) -> list[float]:
    """Of COLUMNS."""
    taken = asyncio.run(open_streams_mb(port, pid))
    asyncio.run(load(port, request_for(FEW), 64))
    few = cpu_us(port, pid, request_for(FEW), requests)
    many = cpu_us(port, pid, request_for(MANY), requests // 32)
    long = cpu_us(port, pid, request_for(FEW, LONG), requests // 8)
    return [few, (many - few) / (MANY - FEW), long, taken]


def print_table(columns: Sequence[str], figures: Mapping[str, list[list[float]]]) -> None:
    """Medians of the rounds, and their spread."""
    print(f"| | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for name, rows in figures.items():
        cells = [
            f"{statistics.median(column):.1f} ({min(column):.1f} to {max(column):.1f})"
            for column in zip(*rows, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |")


COLUMNS = ("us per request", "us per chunk", "us per request of 100 kB", "MB for 1 000 streams")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiled", help="a Python that has our compiled wheel")
    parser.add_argument("--router", help="vLLM's router: its program, vllm-router")
    parser.add_argument("--smg", help="SGLang's router: its program, smg")
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.requests < 32 * CLIENTS:  # else there is a series without a request
        parser.error(f"--requests must be at least {32 * CLIENTS}, not {options.requests}")
    if options.worker:
        import uvloop

        uvloop.run(_serve(options.worker))
        return
    with tempfile.TemporaryDirectory() as folder, running_worker() as worker:
        candidates: dict[str, Callable[[int], list[str]]] = {}
        for form, python in (("pure", sys.executable), ("compiled", options.compiled)):
            for mode in ("learn", "off") if python else ():
                name = f"gateway, {form}, --prompts {mode}"
                candidates[name] = partial(_gateway, worker, mode, python)
        candidates["nginx, round-robin"] = partial(_nginx, worker, folder)
        if options.router:
            candidates["vllm-router, round_robin"] = partial(_router, worker, [options.router])
        if options.smg:
            candidates["smg, round_robin"] = partial(_router, worker, [options.smg, "launch"])
        figures: dict[str, list[list[float]]] = {name: [] for name in candidates}
        for _ in range(options.rounds):
            for name, command in candidates.items():
                port = free_port()
                with running(command(port), port) as pid:
                    figures[name].append(_measured(port, pid, options.requests))
    print_table(COLUMNS, figures)


if __name__ == "__main__":
    main()
