"""Start and stop of the service's process, and its UNIX socket."""

import json
import signal
import socket
import stat
from pathlib import Path

import pytest

from tests.support.asked import prompt
from tests.support.running_service import DEADLINE_S, RunningService, wait_until

NO_EVENTS = {"DYN_USE_KV_EVENTS": "false"}
PROMPT = prompt()
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


class Connection:
    """Sends what it is told to, when it is told to; to a port of this host, or a UNIX socket."""

    def __init__(self, to: int | Path) -> None:
        self.socket = socket.socket(socket.AF_INET if isinstance(to, int) else socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_S)
        try:
            self.socket.connect(("127.0.0.1", to) if isinstance(to, int) else str(to))
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def post(self, path: str, body: object, sent: int | None = None) -> bytes:
        """Sends a request, or the first `sent` bytes of its body; returns the others."""
        content = json.dumps(body).encode()
        self.send(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (path.encode(), len(content), content[:sent])
        )
        return b"" if sent is None else content[sent:]

    def read(self) -> bytes:
        """One answer, of which only the end says that it is whole: `{"status":"ok"}`."""
        text = b""
        while not text.endswith(b"}") and (piece := self.socket.recv(65536)):
            text += piece
        return text

    def read_all(self) -> str:
        """Everything until the server closes."""
        text = b""
        while chunk := self.socket.recv(65536):
            text += chunk
        return text.decode()

    def exchange(self, request: bytes = GET) -> bytes:
        self.send(request)
        return self.read()


def serves(path: Path) -> bool:
    with Connection(path) as connection:
        return connection.exchange().endswith(b'{"status":"ok"}')


def refuses_connections(service: RunningService) -> bool:
    try:
        socket.create_connection(("127.0.0.1", service.port), 1.0).close()
    except ConnectionRefusedError:
        return True
    except TimeoutError:
        pass  # it keeps newcomers away while it takes those who had come
    return False


def stop_accepting(service: RunningService) -> None:
    service.process.send_signal(signal.SIGTERM)
    wait_until(lambda: refuses_connections(service), "the service takes no more connections")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_service_ends_at_once_with_status_0(number: int) -> None:
    with RunningService("--drain-secs", "3600") as service, Connection(service.port) as idle:
        assert service.stop(number)[0] == 0
        assert idle.read_all() == ""


def test_what_is_in_flight_is_answered_and_readiness_is_gone() -> None:
    with RunningService("--drain-secs", "3600", env=NO_EVENTS) as service:
        service.add_worker()
        with Connection(service.port) as half, Connection(service.port) as posting:
            half.send(b"GET /ready HTTP/1.1\r\nhost: ")
            rest = posting.post("/select", PROMPT, sent=10)
            wait_until(lambda: service.get("/health")[0] == 200, "both connections are open")
            stop_accepting(service)
            half.send(b"x\r\n\r\n")
            posting.send(rest)
            ready, selected = half.read_all(), posting.read_all()
        assert ready.startswith("HTTP/1.1 503 ")
        assert '"ready":false,"schedulable_workers":1' in ready
        assert "connection: close" in ready
        assert selected.startswith("HTTP/1.1 200 ")
        assert '"worker_id":1' in selected
        assert service.stop()[0] == 0


def test_a_request_that_crosses_the_signal_is_answered(tmp_path: Path) -> None:
    """The process is stopped while it comes, on connections old and new: nothing is by chance."""
    path = tmp_path / "s"
    with RunningService("--drain-secs", "3600", "--uds", str(path), env=NO_EVENTS) as service:
        places: list[int | Path] = [service.port, path] * 32
        kept = [Connection(to) for to in places]
        for connection in kept:
            assert connection.exchange().startswith(b"HTTP/1.1 200 ")
        service.process.send_signal(signal.SIGSTOP)
        crossing = kept + [Connection(to) for to in places]
        for connection in crossing:
            connection.send(GET)
        service.process.send_signal(signal.SIGTERM)
        service.process.send_signal(signal.SIGCONT)
        for connection in crossing:
            with connection:
                assert connection.read().startswith(b"HTTP/1.1 200 OK\r\n")
                assert connection.read_all() == "", "then it ends without a reset"
        assert service.stop()[0] == 0


@pytest.mark.parametrize("drain_s", ["3600", "0.1"], ids=["a second signal", "its time"])
def test_a_request_that_never_ends_is_not_waited_for_beyond(drain_s: str) -> None:
    with RunningService("--drain-secs", drain_s) as service, Connection(service.port) as half:
        half.send(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        wait_until(lambda: service.get("/health")[0] == 200, "the half request was read")
        if drain_s == "3600":
            stop_accepting(service)
            wait_until(lambda: "a second signal" in service.log(), "it says what it waits for")
            assert service.process.poll() is None
        assert service.stop()[0] == 0


def test_a_successor_takes_the_path_while_the_old_process_drains(tmp_path: Path) -> None:
    path = tmp_path / "s"
    flags = ("--uds", str(path), "--drain-secs", "3600")
    with RunningService(*flags) as old, Connection(path) as half:
        half.send(GET[:10])
        assert serves(path)
        assert old.get("/health")[0] == 200  # beside TCP
        old.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not path.exists(), "the old process lets go of the path")
        with RunningService(*flags) as new:
            assert serves(path)
            assert old.process.poll() is None, "the old process still drains"
            assert half.exchange(GET[10:]).startswith(b"HTTP/1.1 200 ")
            assert old.stop()[0] == 0
            assert serves(path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o660
            assert new.stop()[0] == 0
    assert not path.exists()
