"""Start and stop of the service's process, its UNIX socket, and its clock."""

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import program
from tests.support.running_service import DEADLINE_S, RunningService, free_port, wait_until

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


GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def connect_to(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), DEADLINE_S)


def connect_tcp(service: RunningService) -> socket.socket:
    return connect_to(service.port)


def connect_unix(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(DEADLINE_S)
        connection.connect(str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def refuses_connections(service: RunningService) -> bool:
    try:
        socket.create_connection(("127.0.0.1", service.port), 1.0).close()
    except ConnectionRefusedError:
        return True
    except TimeoutError:
        pass  # it keeps newcomers away while it takes those who had come
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


def exchange(connection: socket.socket, request: bytes = GET) -> bytes:
    """One answer, of which only the end says that it is whole: `{"status":"ok"}`."""
    connection.sendall(request)
    return answer_to(connection)


def answer_to(connection: socket.socket) -> bytes:
    text = b""
    while not text.endswith(b"}"):
        piece = connection.recv(65536)
        if not piece:
            break
        text += piece
    return text


@STOPS
def test_a_request_that_crosses_the_signal_is_answered(number: int, tmp_path: Path) -> None:
    """The process is stopped while it comes, on connections old and new: nothing is by chance."""
    path = tmp_path / "s"
    with RunningService("--drain-secs", "3600", "--uds", str(path), env=NO_EVENTS) as service:
        kept = [connect_tcp(service) for _ in range(32)] + [connect_unix(path) for _ in range(32)]
        for connection in kept:
            assert exchange(connection).startswith(b"HTTP/1.1 200 ")
        service.process.send_signal(signal.SIGSTOP)
        new = [connect_tcp(service) for _ in range(32)] + [connect_unix(path) for _ in range(32)]
        for connection in kept + new:
            connection.sendall(GET)
        service.process.send_signal(number)
        service.process.send_signal(signal.SIGCONT)
        for connection in kept + new:
            assert answer_to(connection).startswith(b"HTTP/1.1 200 OK\r\n")
            assert connection.recv(1) == b"", "then it ends without a reset"
            connection.close()
        assert service.stop()[0] == 0


def test_a_connection_that_goes_quiet_is_closed_without_a_word() -> None:
    with RunningService("--drain-secs", "3600") as service:
        used = connect_tcp(service)
        assert exchange(used).startswith(b"HTTP/1.1 200 ")
        service.process.send_signal(signal.SIGTERM)
        assert used.recv(1) == b""
        used.close()
        assert service.stop()[0] == 0


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


def test_a_successor_takes_the_path_while_the_old_process_drains(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with RunningService("--uds", str(path), "--drain-secs", "3600") as old:
        half = connect_unix(path)
        half.sendall(GET[:10])
        assert '{"status":"ok"}' in ask_unix(path)
        old.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not path.exists(), "the old process lets go of the path")
        with RunningService("--uds", str(path)) as new:
            assert '{"status":"ok"}' in ask_unix(path)
            assert old.process.poll() is None, "the old process still drains"
            assert exchange(half, GET[10:]).startswith(b"HTTP/1.1 200 ")
            half.close()
            assert old.stop()[0] == 0
            assert '{"status":"ok"}' in ask_unix(path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert new.stop()[0] == 0
    assert not path.exists()


class KeepAliveClients:
    """Clients that ask without end, each on a connection that it keeps as long as it may.

    What may fail is a connection that is refused: nothing was sent, and the client tries again. A
    request that was sent and is not answered 200 is lost.
    """

    def __init__(self, count: int, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._ends = threading.Event()
        self.answered = [0] * count
        self.lost: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]

    def __enter__(self) -> "KeepAliveClients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _ask(self, index: int) -> None:
        connection = None
        while not self._ends.is_set():
            if connection is None:
                try:
                    connection = self._connect()
                except (ConnectionRefusedError, FileNotFoundError):
                    self._ends.wait(0.01)
                    continue
            try:
                answer = exchange(connection)
            except OSError as error:
                answer = repr(error).encode()
            if not answer.startswith(b"HTTP/1.1 200 ") or not answer.endswith(b"}"):
                self.lost.append(answer[:100].decode())
                return
            self.answered[index] += 1
            if b"\r\nconnection: close\r\n" in answer:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def go_on(self, rounds: int = 20) -> None:
        """Every client is answered `rounds` times from now on, or one has lost a request."""
        goals = [count + rounds for count in self.answered]

        def reached() -> bool:
            return bool(self.lost) or all(
                count >= goal for count, goal in zip(self.answered, goals, strict=True)
            )

        wait_until(reached, "all clients are answered")
        assert self.lost == []


def test_restarts_on_one_path_lose_no_request(tmp_path: Path) -> None:
    path = tmp_path / "s"
    flags = ("--uds", str(path), "--drain-secs", "20")
    with contextlib.ExitStack() as services:
        serving = services.enter_context(RunningService(*flags))
        with KeepAliveClients(16, lambda: connect_unix(path)) as clients:
            for _ in range(3):
                clients.go_on()
                serving.process.send_signal(signal.SIGTERM)
                wait_until(lambda: not path.exists(), "the old process lets go of the path")
                successor = services.enter_context(RunningService(*flags))
                clients.go_on()
                assert serving.stop()[0] == 0
                serving = successor
            clients.go_on()


HAPROXY = """
defaults
    mode http
    timeout connect 10s
    timeout client 60s
    timeout server 60s
    option redispatch 1
    retries 10
frontend gateway
    bind 127.0.0.1:{port}
    default_backend selectors
backend selectors
    option httpchk GET /health
    http-reuse always
"""
HAPROXY_SERVER = "    server s{port} 127.0.0.1:{port} check inter 100ms fall 1 rise 1\n"


@contextlib.contextmanager
def gateway(folder: Path, services: list[RunningService]) -> Iterator[int]:
    """The port of a haproxy before the services. It tries again only what was refused."""
    haproxy = program("haproxy", "haproxy")
    config = folder / "haproxy.cfg"

    def start() -> tuple[int, subprocess.Popen[bytes]]:
        port = free_port()
        servers = "".join(HAPROXY_SERVER.format(port=service.port) for service in services)
        config.write_text(HAPROXY.format(port=port) + servers)
        return port, subprocess.Popen([haproxy, "-q", "-db", "-f", str(config)])

    port, process = start()
    try:

        def is_up() -> bool:
            nonlocal port, process
            if process.poll() == 1:
                port, process = start()  # somebody was faster, and has the port
            with contextlib.suppress(OSError), connect_to(port) as connection:
                return exchange(connection).startswith(b"HTTP/1.1 200 ")
            return False

        wait_until(is_up, "the gateway is up")
        yield port
    finally:
        process.kill()
        process.wait()


def test_services_that_stop_behind_a_gateway_lose_no_request(tmp_path: Path) -> None:
    with contextlib.ExitStack() as started:
        services = [started.enter_context(RunningService("--drain-secs", "20")) for _ in range(3)]
        port = started.enter_context(gateway(tmp_path, services))
        with KeepAliveClients(16, lambda: connect_to(port)) as clients:
            clients.go_on()
            for stopping in services[:2]:
                assert stopping.stop()[0] == 0
                clients.go_on()


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


def test_a_host_without_an_address_is_one_line_in_words() -> None:
    status, err = refused_start("--port", "1", "--host", "")
    assert (status, err) == (1, "lean-selector: error: Name or service not known: :1\n")


def test_an_empty_path_is_no_path() -> None:
    status, err = refused_start("--port", str(free_port()), "--uds", "")
    assert status == 2
    assert err.endswith("error: --uds: invalid value ``: expected a path\n")


# -- how many (D27) -------------------------------------------------------------------------------


def test_connections_beyond_the_most_are_refused_and_counted() -> None:
    with RunningService("--max-connections", "2", env=NO_EVENTS) as service:

        def admitted() -> socket.socket:
            """A connection that is let in: one closed before may not be given up yet."""
            tried: list[socket.socket] = []

            def is_let_in() -> bool:
                tried.append(connect_tcp(service))
                if exchange(tried[-1]).startswith(b"HTTP/1.1 200 "):
                    return True
                tried[-1].close()
                return False

            wait_until(is_let_in, "a place is free")
            return tried[-1]

        first, second = admitted(), admitted()
        third = connect_tcp(service)
        answer = exchange(third)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert answer.endswith(b'{"error":"too many connections"}')
        assert third.recv(1) == b""
        third.close()
        second.close()
        with admitted() as again:
            again.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            text = b""
            while piece := again.recv(65536):
                text += piece
        assert b"\nlean_selector_http_connections 2\n" in text
        assert re.search(rb"\nlean_selector_http_connections_refused_total [1-9]", text)
        first.close()


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
