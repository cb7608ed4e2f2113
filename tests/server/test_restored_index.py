"""The KV index is in no file: after a restart it comes from the engines, and from peers."""

import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tests.service.test_overlap_over_http import BLOCK_SIZE, stored
from tests.support.running_service import DEADLINE_S, RunningService, wait_until

# A peer that is far away: long enough for an engine to be asked first, if it were.
PEER_TAKES_S = 0.5


class Engine(threading.Thread):
    """One block in each batch. It can replay the batches from `oldest` on."""

    def __init__(self, batches: int) -> None:
        super().__init__(daemon=True)
        event = [msgspec.msgpack.encode([0.0, [stored("gpu", [n + 1])], 0]) for n in range(batches)]
        self._batches = event
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._pub, self._router = (self._context.socket(kind) for kind in (zmq.XPUB, zmq.ROUTER))
        self.endpoint, self.replay_endpoint = (
            f"tcp://127.0.0.1:{each.bind_to_random_port('tcp://127.0.0.1')}"
            for each in (self._pub, self._router)
        )
        self.oldest = 0
        self.asked_from: list[int] = []
        self._is_over = False
        self.start()

    def run(self) -> None:
        while not self._is_over:
            if not self._router.poll(50):
                continue
            identity, _, start = self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked_from.append(first)
            for number in range(max(first, self.oldest), len(self._batches)):
                frames = [identity, b"", number.to_bytes(8, "big"), self._batches[number]]
                self._router.send_multipart(frames)
            self._router.send_multipart([identity, b"", b"\xff" * 8, b""])

    def close(self) -> None:
        self._is_over = True
        self.join(DEADLINE_S)
        self._context.destroy(linger=0)

    def worker(self) -> dict[str, Any]:
        return {
            "worker_id": 1,
            "model_name": "m",
            "endpoint": "http://w1",
            "block_size": BLOCK_SIZE,
            "kv_events_endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
        }


@contextmanager
def engine_of(batches: int) -> Iterator[Engine]:
    engine = Engine(batches)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def far_away(service: RunningService) -> Iterator[str]:
    """The URL of a service whose answers take a while."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(PEER_TAKES_S)
            with urllib.request.urlopen(f"http://127.0.0.1:{service.port}{self.path}") as answer:
                body = answer.read()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def blocks(service: RunningService) -> int:
    """That the index has; none is told of while it recovers."""
    status, dump = service.get("/dump")
    if status == 503:
        return 0
    return sum(
        len(event["event"]["data"]["stored"]["blocks"])
        for partition in dump.values()
        for event in partition["events"]
    )


def is_live(service: RunningService) -> bool:
    return [each["state"] for each in service.get("/kv_sources")[1]] == ["live"]


def test_what_the_engine_has_forgotten_comes_from_a_peer_and_the_rest_behind_it(
    tmp_path: Path,
) -> None:
    with engine_of(5) as engine, RunningService() as peer, far_away(peer) as url:
        flags = ("--state-dir", str(tmp_path), "--indexer-peers", url)
        with RunningService(*flags) as service:
            for each in (peer, service):
                assert each.post("/workers", engine.worker())[0] == 201
                wait_until(lambda each=each: blocks(each) == 5, "all is indexed")  # type: ignore[misc]
            service.process.kill()
            service.stop()
            engine.oldest = 4
            asked = len(engine.asked_from)
            with service:
                wait_until(lambda: "recovering" not in service.get("/ready")[1], "it has recovered")
                wait_until(lambda: is_live(service), "and hears the engine")
                assert blocks(service) == 5
                assert engine.asked_from[asked:] == [4]
