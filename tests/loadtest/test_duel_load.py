"""What drives the services in the comparison, and the ports that it gives them."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from loadtest.child_service import KEPT, PORTS, ROOT, free_port
from loadtest.duel.results import RequestFile, closed_load, open_load
from loadtest.http_client import http
from tests.support.running_service import RunningService

HEALTH = http("GET", "/health")
OK = b'HTTP/1.1 200 OK\r\ndate: x\r\ncontent-length:   15\r\n\r\n{"status":"ok"}'
TAKES = f"""
from loadtest.child_service import free_port
print(*(free_port() for _ in range({KEPT})), flush=True)
input()  # and keeps them
"""


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService() as running:
        yield running


@pytest.fixture(params=["wrk", "our own"])
def sender(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program by which a closed load is sent."""
    if request.param == "our own":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif shutil.which("wrk") is None:
        pytest.skip("wrk is not installed")


@pytest.mark.usefixtures("sender")
def test_each_lane_has_a_connection_of_its_own_and_keeps_its_order(service: RunningService) -> None:
    lanes = []
    for number in range(1, 9):  # a worker that is registered and deleted can be deleted only then
        worker = {"worker_id": number, "model_name": "m", "endpoint": "http://e", "block_size": 16}
        registered = http("POST", "/workers", json.dumps(worker).encode())
        lanes.append([registered, http("DELETE", f"/workers/{number}")] * (5 * number))
    with RequestFile(*lanes) as file:
        for _ in range(2):
            load = closed_load(service.port, file)
            assert (load.requests, load.bad) == (360, 0)
    with RequestFile([HEALTH, http("DELETE", "/reservations/of-nobody")]) as file:
        assert closed_load(service.port, file).bad == 1


@contextmanager
def accepting(serve: Callable[[list[socket.socket]], None]) -> Iterator[int]:
    """A port whose 64 connections are served together, once all are there."""

    def accept() -> None:
        serve([listener.accept()[0] for _ in range(64)])

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


def test_a_request_that_had_to_wait_for_a_stalled_service_counts_from_when_it_was_due() -> None:
    stall_s = 0.3

    def serve(connections: list[socket.socket]) -> None:
        """None is answered before the stall is over."""
        time.sleep(stall_s)
        for connection in connections:
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    def echo(connection: socket.socket) -> None:
        with connection:
            while connection.recv(4_096):
                connection.sendall(OK)

    with accepting(serve) as port, RequestFile([HEALTH]) as file:
        load = open_load(port, file, 1_000.0, 200)
    assert load.seconds >= 199 / 1_000
    assert len(load.latencies_us) == len(load.late_us) == 200
    # 200 requests due in 0.2 s meet 64 connections that answer after 0.3 s. Those that found none
    # free were sent only then, and are charged with the time that they waited all the same.
    assert load.requests == 200
    assert min(load.latencies_us) >= (stall_s - 0.2) * 1e6 * 0.5


def test_no_two_runs_get_the_same_port_though_neither_has_bound_it() -> None:
    """Of 500 each out of 10 000 some 25 would be the same."""
    with subprocess.Popen(
        [sys.executable, "-c", TAKES],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        ours = {free_port() for _ in range(KEPT)}
        other.communicate("\n")
    assert len(theirs) == len(ours) == KEPT
    assert theirs & ours == set()
    assert all(PORTS[0] <= port < PORTS[1] for port in ours)
