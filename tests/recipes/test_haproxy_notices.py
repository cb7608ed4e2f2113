"""What HAProxy writes besides the lines of its log, and what that is taken for."""

import http.client
import json
import socket
from contextlib import ExitStack, closing
from pathlib import Path

from lean_selector.core.errors import NotFound
from lean_selector.gateway.access_logs import LogEnds
from tests.recipes.gateways import HaProxy, Places
from tests.recipes.test_recipes import CHAT, chat
from tests.support.openai_worker import OpenAiWorker

DEADLINE_S = 60.0


def no_worker(worker_id: int, dp_rank: int | None, outcome: str, now: float) -> None:
    raise NotFound("no worker")


def test_a_script_that_haproxy_gives_up_as_its_client_left_ends_what_it_named(
    tmp_path: Path,
) -> None:
    freed: list[str] = []
    ends = LogEnds(lambda reservation_id, now: freed.append(reservation_id), no_worker, lambda: 0)
    places = Places(tmp_path, "unix")
    with ExitStack() as stack:
        selector = stack.enter_context(socket.socket(socket.AF_UNIX))  # accepts, and says nothing
        selector.bind(places.selector_socket)
        selector.listen()
        lines = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        lines.bind(places.ends_socket)
        for each in (selector, lines):
            each.settimeout(DEADLINE_S)
        workers = [stack.enter_context(OpenAiWorker()) for _ in range(2)]
        gateway = HaProxy(tmp_path, places, [worker.port for worker in workers])
        stack.enter_context(gateway)
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=DEADLINE_S)
        with closing(connection):
            connection.request("POST", CHAT, json.dumps(chat("hello")))
            asked = stack.enter_context(selector.accept()[0])
            assert b"x-reservation-id" in asked.recv(65_536).lower()
        while not (freed and ends.results["other"]):
            ends.take(lines.recv(65_536))  # raises where nothing comes
        asked.sendall(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
    counted = {result: count for result, count in ends.results.items() if count}
    assert counted == {"freed": 1, "other": 1}
    assert len(freed) == 1
