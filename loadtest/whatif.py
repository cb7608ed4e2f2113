"""Traffic in real time, faster than life, past a real service or a real nginx; the engines batch.

    python -m loadtest.whatif TRACE --log decisions.jsonl --flags "--policy dynamo"
    python -m loadtest.whatif TRACE --log decisions.jsonl --through nginx

prints what clients saw, in seconds of the trace, and leaves the service's decision log, of which
`lean-selector replay` predicts what another policy would have brought. Through nginx the service
stands beside it: it gets mirrored requests, KV events and the access log.
"""

import argparse
import asyncio
import contextlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lean_selector.core.hashing import local_hashes, sequence_hashes_bytes, u64s
from lean_selector.publisher import KvEventPublisher
from lean_selector.tools.batching_engine import BatchingEngine, IterationTimes, SimulatedRequest
from lean_selector.tools.service_process import HttpClient
from lean_selector.tools.simulation import BLOCK_SIZE, outcome, requests_of
from lean_selector.tools.trace import trace_lines
from loadtest.child_service import ChildService, free_port

HOST = "127.0.0.1"


def tokens_of(hash_id: int) -> range:
    first = hash_id * BLOCK_SIZE % 2**31
    return range(first, first + BLOCK_SIZE)


class Body(msgspec.Struct):
    prompt: list[int]
    max_tokens: int


class RealTimeEngine:
    """A batching engine on the loop's clock, `speed` times as fast, with KV events, and HTTP."""

    def __init__(self, worker_id: int, capacity: int, slowness: float, speed: float) -> None:
        self.model = BatchingEngine(worker_id, capacity, BLOCK_SIZE, IterationTimes(), slowness)
        self.worker_id = worker_id
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._first: dict[SimulatedRequest, asyncio.Future[None]] = {}
        self._ended: dict[SimulatedRequest, asyncio.Future[None]] = {}
        self.ids: dict[SimulatedRequest, Sequence[int]] = {}
        self.publisher = KvEventPublisher(
            worker_id=worker_id, kv_block_size=BLOCK_SIZE, endpoint=f"tcp://{HOST}:0"
        )
        self.port = free_port()

    def now(self) -> float:
        return self._loop.time() * self._speed

    def submit(
        self, request: SimulatedRequest, ids: Sequence[int]
    ) -> tuple[asyncio.Future[None], asyncio.Future[None]]:
        self.ids[request] = ids
        first = self._first[request] = self._loop.create_future()
        ended = self._ended[request] = self._loop.create_future()
        now = self.now()
        self.model.submit(request, now)
        if self.model.due is None:
            self.model.start(now)
        self._plan()
        return first, ended

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.model.due
        self._timer = None if due is None else self._loop.call_at(due / self._speed, self._turn)

    def _turn(self) -> None:
        due = self.model.due
        assert due is not None
        made = self.model.finish(due)
        with self.publisher.batch() as batch:
            batch.publish_removed(block_hashes=made.evicted)
            for request in made.first_tokens:
                at, end = request.hit, request.held
                ids = self.ids.pop(request)[at:end]
                batch.publish_stored(
                    token_ids=[token for each in ids for token in tokens_of(each)],
                    block_hashes=request.chain[at:end],
                    parent_hash=request.chain[at - 1] if at else None,
                )
        for request in made.first_tokens:
            self._first.pop(request).set_result(None)
        for request in made.ended:
            self._ended.pop(request).set_result(None)
        self.model.start(due)
        self._plan()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """POST /v1/completions: the head with the first token, the end with the last."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            await self._answer_all(reader, writer)
        writer.close()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = head.lower().split(b"\r\n")
            length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            body = msgspec.json.decode(await reader.readexactly(length), type=Body)
            ids = [each // BLOCK_SIZE for each in body.prompt[::BLOCK_SIZE]]
            request = request_of(self.now(), body, ids)
            first, ended = self.submit(request, ids)
            await first
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
            await ended
            writer.write(b"1\r\ny\r\n0\r\n\r\n")
            SERVED.append(request)
            await writer.drain()


SERVED: list[SimulatedRequest] = []
_LOCAL: dict[int, bytes] = {}


def request_of(now: float, body: Body, ids: Sequence[int]) -> SimulatedRequest:
    blocks = len(body.prompt) // BLOCK_SIZE
    local = b"".join(local_of(each) for each in ids[:blocks])
    chain = u64s(blocks).unpack(sequence_hashes_bytes(local))
    return SimulatedRequest(now, len(body.prompt), body.max_tokens, local, chain)


def local_of(hash_id: int) -> bytes:
    if hash_id not in _LOCAL:
        _LOCAL[hash_id] = local_hashes(list(tokens_of(hash_id)), BLOCK_SIZE)
    return _LOCAL[hash_id]


NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
  uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  client_max_body_size 16m; client_body_buffer_size 16m; proxy_read_timeout 600s;
  map $upstream_addr $worker {{ {workers} }}
  log_format ends 'lean-end reservation=$request_id worker=$worker ttft=$upstream_header_time '
                  'status=$status';
  upstream engines {{ least_conn; {servers} }}
  server {{
    listen {host}:{port};
    location / {{
      access_log syslog:server={host}:{log_port} ends;
      mirror /mirror; proxy_buffering off; proxy_http_version 1.1; proxy_pass http://engines;
    }}
    location = /mirror {{
      internal; access_log off;
      proxy_set_header X-Reservation-Id $request_id;
      proxy_pass http://{host}:{selector}/route$request_uri;
    }}
  }}
}}
"""


def started_nginx(folder: str, text: str) -> subprocess.Popen[bytes]:
    Path(folder, "nginx.conf").write_text(text)
    return subprocess.Popen(["nginx", "-p", folder, "-c", f"{folder}/nginx.conf"])


async def play(options: argparse.Namespace) -> None:
    lines = sorted(trace_lines(options.trace, options.requests), key=lambda line: line.timestamp)
    requests = requests_of(lines, options.load, spread=True)
    slowness = [float(each) for each in options.slowness.split(",")]
    engines = [
        RealTimeEngine(at + 1, options.capacity, slowness[at % len(slowness)], options.speed)
        for at in range(options.engines)
    ]
    by_nginx, log_port = options.through == "nginx", free_port()
    selector = free_port()
    command = [sys.executable, "-m", "lean_selector", "--port", str(selector)]
    command += ["--decision-log", str(options.log), *shlex.split(options.flags)]
    if by_nginx:
        command += ["--prompts", "tokenize", "--lifecycle-from", f"syslog:{HOST}:{log_port}"]
    with ChildService(command, selector) as child, tempfile.TemporaryDirectory() as folder:
        child.wait()
        client = HttpClient(f"http://{HOST}:{selector}")
        for engine in engines:
            body = {
                "worker_id": engine.worker_id,
                "model_name": "m",
                "endpoint": f"http://{HOST}:{engine.port}",
                "block_size": BLOCK_SIZE,
                "max_num_batched_tokens": 4_096,
                "total_kv_blocks": options.capacity,
                "kv_events_endpoints": {"0": engine.publisher.endpoint},
            }
            await client.call("POST", "/workers", body)
            if by_nginx:
                await asyncio.start_server(engine.answer, HOST, engine.port, limit=1 << 24)
        nginx = None
        front = client
        if by_nginx:
            port = free_port()
            text = NGINX.format(
                folder=folder,
                host=HOST,
                port=port,
                log_port=log_port,
                selector=selector,
                workers=" ".join(f"{HOST}:{e.port} {e.worker_id};" for e in engines),
                servers=" ".join(f"server {HOST}:{e.port};" for e in engines),
            )
            nginx = started_nginx(folder, text)
            front = HttpClient(f"http://{HOST}:{port}")
        try:
            await asyncio.sleep(2.0)
            began = asyncio.get_running_loop().time() + 1.0
            await asyncio.gather(*(
                one(number, request, line.hash_ids, options, engines, front, began, by_nginx)
                for number, (request, line) in enumerate(zip(requests, lines, strict=True))
            ))  # fmt: skip
            await asyncio.sleep(1.0)
        finally:
            if nginx is not None:
                nginx.terminate()
                nginx.wait()
        cpu_s = child.cpu_ns() / 1e9
    row = outcome(options.flags or options.through, SERVED, [e.model for e in engines], 2.0)
    late = f"; served {len(SERVED)}; the service took {cpu_s:.2f} s of CPU"
    print(msgspec.json.encode(row).decode() + late, flush=True)
    if options.json:
        options.json.write_bytes(msgspec.json.encode(row))


async def one(
    number: int,
    request: SimulatedRequest,
    ids: Sequence[int],
    options: argparse.Namespace,
    engines: list[RealTimeEngine],
    front: HttpClient,
    began: float,
    by_nginx: bool,
) -> None:
    """A client's request, from its arrival to its last token."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(began + request.arrived_at / options.speed - loop.time())
    tokens = None
    if by_nginx:
        tokens = [token for each in ids for token in tokens_of(each)][: request.isl_tokens]
        body = {"model": "m", "prompt": tokens, "max_tokens": request.output_tokens}
        await front.call("POST", "/v1/completions", {**body, "stream": True})
        return
    made = request_of(engines[0].now(), Body([0] * request.isl_tokens, request.output_tokens), ids)
    signed = [each - 2**64 if each >= 2**63 else each for each in made.chain]
    ask = {
        "model_name": "m",
        "reservation_id": f"r{number}",
        "block_hashes": list(memoryview(made.local_hashes).cast("q")),
        "sequence_hashes": signed,
        "isl_tokens": request.isl_tokens,
    }
    answer = msgspec.json.decode(await front.call("POST", "/select_and_reserve", ask))
    first, ended = engines[answer["worker_id"] - 1].submit(made, ids)
    await first
    await front.call("POST", f"/reservations/r{number}/prefill_complete")
    await ended
    for _ in range(made.output_tokens // BLOCK_SIZE):
        await front.call("POST", f"/reservations/r{number}/output_block", {})
    SERVED.append(made)
    await front.call("DELETE", f"/reservations/r{number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--through", choices=("selector", "nginx"), default="selector")
    parser.add_argument("--flags", default="", help="of the service")
    parser.add_argument("--requests", type=int, default=2_500)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=3_000)
    parser.add_argument("--slowness", default="1")
    parser.add_argument("--speed", type=float, default=6.0, help="seconds of the trace in a second")
    asyncio.run(play(parser.parse_args()))


if __name__ == "__main__":
    main()
