"""What a request and a streamed chunk cost in a gateway: ours, nginx's round-robin, vLLM's router.

    python -m loadtest.gateway_cost [--router PATH]

One worker that answers at once, from memory, so that what is timed is the gateway: CPU seconds of
its processes, from /proc, over a number of requests. Answers with few chunks and with many tell
what a request costs and what each chunk does. All candidates take turns in one run, several times;
printed are medians and the spread. The machine should have nothing else to do.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from loadtest.child_service import ChildService, cpu_ns, free_port, plain_environment
from loadtest.http_client import http

FEW, MANY = 1, 201  # chunks of an answer
STEP_S = 0.003  # between two chunks, so that each is a read of its own
CLIENTS = 8
PROMPT = "Tell me of the sea. " * 100  # 2 kB
PROMPT_TOKENS = 500  # of it


# -- the worker: answers from memory --------------------------------------------------------------


async def _answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As many chunks as a request's `max_tokens` asks for: the first with the head at once, the
    others as an engine does, one by one, each in a write of its own."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = re.search(rb"\r\ncontent-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            if head.startswith(b"get"):
                writer.write(_plain(head.split(b" ")[1].decode()))
                continue
            request = json.loads(body)
            first, *pieces = _answer(request["max_tokens"], bool(request.get("return_token_ids")))
            writer.write(first)
            for piece in pieces:
                await asyncio.sleep(STEP_S)
                writer.write(piece)


def _plain(path: str) -> bytes:
    body = b"{}"
    if path == "/v1/models":  # by its owner the gateway knows vLLM, and learns from its answers
        body = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}'
    if path == "/metrics":
        body = b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100000"} 1.0\n'
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


@functools.cache
def _answer(count: int, has_ids: bool) -> list[bytes]:
    """Its head with the first chunk, the other chunks, and its end."""
    choice: dict[str, Any] = {"index": 0, "delta": {"content": " token"}, "finish_reason": None}
    if has_ids:
        choice["token_ids"] = [4711]
    event = {
        "id": "cmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
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


# -- the client -----------------------------------------------------------------------------------


async def _ask(port: int, chunks: int, requests: int) -> None:
    """So many requests, one behind the other on one connection."""
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": "m", "messages": messages, "max_tokens": chunks, "stream": True}
    request = http("POST", "/v1/chat/completions", json.dumps(body).encode())
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    for _ in range(requests):
        writer.write(request)
        answer = await reader.readuntil(b"\n\r\n0\r\n\r\n")  # a head may end in a 0, too
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        assert b"[DONE]" in answer
    writer.close()


async def _load(port: int, chunks: int, requests: int) -> None:
    await asyncio.gather(*(_ask(port, chunks, requests // CLIENTS) for _ in range(CLIENTS)))


# -- the candidates -------------------------------------------------------------------------------


def _cpu_ns(pid: int) -> int:
    """Of a process and its children, user and system."""
    return sum(map(cpu_ns, [pid, *_children(pid)]))


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found += [int(child), *_children(int(child))]
    return found


def _gateway(port: int, worker: int, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "lean_selector", "gateway", f"http://127.0.0.1:{worker}"]
    ports = ("--port", str(port), "--selector-port", str(free_port()))
    return [*command, *ports, "--worker-health-interval-secs", "none", *flags]


def _nginx(port: int, worker: int, folder: str) -> list[str]:
    program = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
    assert program is not None, "nginx is missing: apt-get install nginx-light"
    config = Path(folder) / "nginx.conf"
    config.write_text(
        f"""daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
        events {{ worker_connections 512; }}
        http {{
          access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
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


def _router(port: int, worker: int, program: str) -> list[str]:
    command = [program, "--worker-urls", f"http://127.0.0.1:{worker}", "--policy", "round_robin"]
    ports = ("--port", str(port), "--prometheus-port", str(free_port()))
    return [*command, "--host", "127.0.0.1", *ports]


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[int]:
    """Its process, once it answers."""
    with ChildService(command, port, env=plain_environment()) as child:
        child.wait()
        yield child.process.pid


# -- the run --------------------------------------------------------------------------------------


def _measured(port: int, pid: int, requests: int) -> tuple[float, float]:
    """Microseconds of CPU for a request with one chunk, and for each further chunk."""
    asyncio.run(_load(port, FEW, 64))
    costs = []
    for chunks, count in ((FEW, requests), (MANY, requests // 32)):
        before = _cpu_ns(pid)
        asyncio.run(_load(port, chunks, count))
        costs.append((_cpu_ns(pid) - before) / 1e3 / (count // CLIENTS * CLIENTS))
    return costs[0], (costs[1] - costs[0]) / (MANY - FEW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--router", help="vLLM's router: its program, vllm-router")
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        import uvloop

        uvloop.run(_serve(options.worker))
        return
    worker = free_port()
    serving = [sys.executable, "-m", "loadtest.gateway_cost", "--worker", str(worker)]
    with tempfile.TemporaryDirectory() as folder, _running(serving, worker):
        candidates: dict[str, Callable[[int], list[str]]] = {
            "gateway, --prompts learn": lambda port: _gateway(port, worker),
            "gateway, --prompts off": lambda port: _gateway(port, worker, "--prompts", "off"),
            "nginx, round-robin": lambda port: _nginx(port, worker, folder),
        }
        if options.router:
            candidates["vllm-router, round_robin"] = lambda port: _router(
                port, worker, options.router
            )
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
        for _ in range(options.rounds):
            for name, command in candidates.items():
                port = free_port()
                with _running(command(port), port) as pid:
                    figures[name].append(_measured(port, pid, options.requests))
    out = sys.stdout.write
    out("| | us per request | us per chunk |\n|---|---|---|\n")
    for name, rows in figures.items():
        cells = [
            f"{statistics.median(column):.1f} ({min(column):.1f} to {max(column):.1f})"
            for column in zip(*rows, strict=True)
        ]
        out(f"| {name} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main()
