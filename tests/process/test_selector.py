"""Start and stop of the service's process, its UNIX socket, and its clock."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running_service import DEADLINE_S, RunningService, free_port, wait_until

NO_EVENTS = {"DYN_USE_KV_EVENTS": "false"}
PROMPT = {"block_hashes": [1], "sequence_hashes": [2], "isl_tokens": 32}
STOPS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


def worker(**changes: Any) -> dict[str, Any]:
    fields = {"worker_id": 1, "endpoint": "http://w", "block_size": 16, "max_num_batched_tokens": 1}
    return {**fields, **changes}


class Raw:
    """A connection that sends what it is told to, when it is told to."""

    def __init__(self, service: RunningService) -> None:
        self.socket = socket.create_connection(("127.0.0.1", service.port), DEADLINE_S)

    def send(self, text: str) -> None:
        self.socket.sendall(text.encode())

    def read_all(self) -> str:
        """Everything until the server closes."""
        text = b""
        while chunk := self.socket.recv(65536):
            text += chunk
        return text.decode()

    def close(self) -> None:
        self.socket.close()


def refuses_connections(service: RunningService) -> bool:
    try:
        socket.create_connection(("127.0.0.1", service.port), 1.0).close()
    except ConnectionRefusedError:
        return True
    return False


def stop_accepting(service: RunningService, number: int) -> None:
    service.process.send_signal(number)
    wait_until(lambda: refuses_connections(service), "the service takes no more connections")


# -- stopping (D14) -------------------------------------------------------------------------------


@STOPS
def test_an_idle_service_ends_at_once_with_status_0(number: int) -> None:
    with RunningService("--drain-secs", "3600") as service:
        idle = Raw(service)
        assert service.stop(number)[0] == 0
        assert idle.read_all() == ""
        idle.close()


@STOPS
def test_what_is_in_flight_is_answered_and_readiness_is_gone(number: int) -> None:
    with RunningService("--drain-secs", "3600", env=NO_EVENTS) as service:
        assert service.post("/workers", worker())[0] == 201
        half = Raw(service)
        half.send("GET /ready HTTP/1.1\r\nhost: ")
        body = json.dumps(PROMPT)
        posting = Raw(service)
        posting.send(
            "POST /select HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body[:10]}"
        )
        wait_until(lambda: service.get("/health")[0] == 200, "both connections are open")
        stop_accepting(service, number)
        half.send("x\r\n\r\n")
        posting.send(body[10:])
        ready = half.read_all()
        assert ready.startswith("HTTP/1.1 503 ")
        assert '"ready":false,"schedulable_workers":1' in ready
        assert "connection: close" in ready
        selected = posting.read_all()
        assert selected.startswith("HTTP/1.1 200 ")
        assert '"worker_id":1' in selected
        assert service.stop()[0] == 0
        half.close()
        posting.close()


@STOPS
def test_parked_requests_are_told_that_the_service_stops(number: int) -> None:
    flags = ("--drain-secs", "3600", "--queue-threshold", "1")
    with RunningService(*flags, env=NO_EVENTS) as service:
        service.post("/workers", worker())
        assert service.post("/select_and_reserve", {**PROMPT, "reservation_id": "a"})[0] == 200
        answers: list[tuple[int, Any]] = []
        waiting = threading.Thread(
            target=lambda: answers.append(service.post("/select_and_reserve", PROMPT))
        )
        waiting.start()
        # A client that has pipelined a second request behind its parked one.
        body = json.dumps(PROMPT)
        post = (
            "POST /select HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}"
        )
        pipelining = Raw(service)
        pipelining.send(post + post)

        def pending() -> Any:
            return service.get("/loads")[1][0]["pending_count"]

        wait_until(lambda: bool(pending() == 2), "two requests are parked")
        assert service.stop(number)[0] == 0
        waiting.join(DEADLINE_S)
        assert answers == [(503, {"error": "endpoint subscriber shutdown"})]
        both = pipelining.read_all()
        assert both.count("HTTP/1.1 503 ") == both.count("endpoint subscriber shutdown") == 2
        pipelining.close()


@STOPS
def test_a_second_signal_ends_it_at_once(number: int) -> None:
    with RunningService("--drain-secs", "3600") as service:
        half = Raw(service)
        half.send("GET /health HTTP/1.1\r\nhost: x\r\n")
        wait_until(lambda: service.get("/health")[0] == 200, "the half request was read")
        stop_accepting(service, number)
        assert service.process.poll() is None
        assert service.stop(number)[0] == 0
        half.close()


def test_draining_takes_no_longer_than_it_may() -> None:
    with RunningService("--drain-secs", "0.1") as service:
        half = Raw(service)
        half.send("GET /health HTTP/1.1\r\nhost: x\r\n")
        wait_until(lambda: service.get("/health")[0] == 200, "the half request was read")
        assert service.stop()[0] == 0
        half.close()


# -- the UNIX socket (D19) ------------------------------------------------------------------------


def ask_unix(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE_S)
        connection.connect(str(path))
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        text = b""
        while chunk := connection.recv(65536):
            text += chunk
        return text.decode()


def test_the_unix_socket_serves_beside_tcp_and_goes_with_the_service(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with RunningService("--uds", str(path)) as service:
        assert '{"status":"ok"}' in ask_unix(path)
        assert service.get("/health")[0] == 200
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert service.stop()[0] == 0
    assert not path.exists()


def test_a_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with RunningService("--uds", str(path)):
        assert '{"status":"ok"}' in ask_unix(path)


def refused_start(*flags: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "lean_selector", "--log-level", "error", *flags],
        env={name: value for name, value in os.environ.items() if not name.startswith("DYN_")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return done.returncode, done.stderr


def test_a_unix_socket_that_somebody_serves_is_left_to_them(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with RunningService("--uds", str(path)):
        status, err = refused_start("--port", str(free_port()), "--uds", str(path))
        assert (status, err) == (
            1,
            f"lean-selector: error: Address already in use (os error 98): {path}\n",
        )
        assert '{"status":"ok"}' in ask_unix(path)


@pytest.mark.parametrize("kind", ["file", "nowhere", "long"])
def test_a_path_that_cannot_be_a_socket_is_one_line_and_stays(tmp_path: Path, kind: str) -> None:
    path = {
        "file": tmp_path / "s",
        "nowhere": tmp_path / "no" / "s",
        "long": tmp_path / ("s" * 200),
    }[kind]
    if kind == "file":
        path.write_text("precious")
    status, err = refused_start("--port", str(free_port()), "--uds", str(path))
    assert status == 1
    assert err.count("\n") == 1
    assert str(path) in err
    if kind == "file":
        assert path.read_text() == "precious"


# -- half a hang-up -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/metrics", "/loads", "/dump"])
def test_a_client_that_closes_its_sending_side_gets_its_answer(path: str) -> None:
    with RunningService(env=NO_EVENTS) as service:
        for _ in range(5):
            asking = Raw(service)
            asking.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")
            asking.socket.shutdown(socket.SHUT_WR)
            assert asking.read_all().startswith("HTTP/1.1 200 ")
            asking.close()


# -- what the clock does --------------------------------------------------------------------------


@pytest.fixture
def hasty() -> Iterator[RunningService]:
    flags = ("--reservation-expiry-secs", "0.5", "--queue-threshold", "1")
    with RunningService(*flags, "--queue-max-wait-secs", "0.05", env=NO_EVENTS) as service:
        service.post("/workers", worker())
        yield service


def test_reservations_expire_by_themselves(hasty: RunningService) -> None:
    assert hasty.post("/select_and_reserve", {**PROMPT, "reservation_id": "a"})[0] == 200

    def requests() -> Any:
        return hasty.get("/loads")[1][0]["loads"][0]["active_requests"]

    wait_until(lambda: bool(requests() == 0), "the reservation is gone")
    assert hasty.request("DELETE", "/reservations/a")[0] == 404


def test_who_waits_too_long_is_told_so(hasty: RunningService) -> None:
    assert hasty.post("/select_and_reserve", PROMPT)[0] == 200
    status, body = hasty.post("/select_and_reserve", PROMPT)
    if status == 503:  # or else the first has expired, and made room
        assert body == {"error": "no worker became free within 0.05 seconds"}
    assert hasty.get("/loads")[1][0]["pending_count"] == 0


def test_a_client_that_hangs_up_is_counted_no_more() -> None:
    with RunningService("--queue-threshold", "1", env=NO_EVENTS) as service:
        service.post("/workers", worker())
        assert service.post("/select_and_reserve", PROMPT)[0] == 200
        body = json.dumps(PROMPT)
        gone = Raw(service)
        gone.send(
            "POST /select HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}"
        )

        def pending() -> Any:
            return service.get("/loads")[1][0]["pending_count"]

        wait_until(lambda: bool(pending() == 1), "the request is parked")
        gone.close()
        wait_until(lambda: bool(pending() == 0), "the request has left the queue")


def test_ports_are_chosen_and_named_when_0_is_asked_for() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "lean_selector", "--port", "0", "--host", "127.0.0.1"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = threading.Timer(DEADLINE_S, process.kill)
    deadline.start()
    try:
        assert process.stderr is not None
        lines = (re.search(r" listening .*\bport=(\d+)", line) for line in process.stderr)
        port = next(int(found[1]) for found in lines if found)
        socket.create_connection(("127.0.0.1", port), DEADLINE_S).close()
    finally:
        process.terminate()
        process.communicate()
        deadline.cancel()
    assert process.returncode == 0
