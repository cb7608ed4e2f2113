"""What drives and starts the services in the comparison, and what the system says of them."""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from loadtest.child_service import free_port
from loadtest.duel.prompts import Prompts, http
from loadtest.duel.results import LoadFailed, RequestFile, Results, closed_load, open_load
from loadtest.duel.stages import Case, Plan, Stage, StageRun
from loadtest.duel.targets import (
    Pair,
    Service,
    Target,
    TargetError,
    cpu_ns,
    footprint,
    machine,
    ours,
    references,
)
from tests.support.running_service import RunningService

HEALTH = b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n"


def test_cpu_time_of_a_process_grows_with_its_work() -> None:
    before = cpu_ns(os.getpid())
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    assert cpu_ns(os.getpid()) - before >= 20_000_000


def test_threads_and_descriptors_are_counted() -> None:
    before = footprint(os.getpid())
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    with socket.socket():
        thread.start()
        during = footprint(os.getpid())
    stop.set()
    thread.join()
    assert during.threads == before.threads + 1
    assert during.descriptors == before.descriptors + 1
    assert 0 < during.pss <= during.rss


def test_a_process_that_is_gone_is_an_error() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(FileNotFoundError):
        cpu_ns(pid)


def test_the_machine_is_named_in_one_line() -> None:
    assert "CPUs, Linux" in machine()
    assert "\n" not in machine()


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService() as running:
        yield running


@pytest.mark.parametrize("program", ["wrk", "our own"])
def test_closed_load_sends_every_request_once(
    service: RunningService, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program == "our own":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif shutil.which("wrk") is None:
        pytest.skip("wrk is not installed")
    requests = [HEALTH] * 300 + [http("DELETE", "/workers/77")] * 5
    with RequestFile(requests) as file:
        load = closed_load(service.port, file)
    assert (load.requests, load.bad) == (305, 5)
    assert 0 < load.p50_us <= load.p99_us
    assert load.seconds > 0


@pytest.mark.parametrize("program", ["wrk", "our own"])
def test_each_lane_has_a_connection_of_its_own_and_keeps_its_order(
    service: RunningService, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program == "our own":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    elif shutil.which("wrk") is None:
        pytest.skip("wrk is not installed")
    lanes = []
    for number in range(1, 9):  # a worker that is registered and deleted can be deleted only then
        worker = {"worker_id": number, "model_name": "m", "endpoint": "http://e", "block_size": 16}
        registered = http("POST", "/workers", json.dumps(worker).encode())
        lanes.append([registered, http("DELETE", f"/workers/{number}")] * (5 * number))
    with RequestFile(*lanes) as file:
        for _ in range(2):
            load = closed_load(service.port, file)
            assert (load.requests, load.bad) == (360, 0)


def test_open_load_takes_the_time_of_its_rate(service: RunningService) -> None:
    with RequestFile([HEALTH]) as file:
        load = open_load(service.port, file, 200.0, 60)
    assert (load.requests, load.bad) == (60, 0)
    assert load.seconds >= 59 / 200
    assert len(load.latencies_us) == len(load.late_us) == 60


def test_a_request_that_had_to_wait_for_a_stalled_service_counts_from_when_it_was_due() -> None:
    stall_s, answer = 0.3, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    def serve(listener: socket.socket) -> None:
        """Every connection is answered, none of them before the stall is over."""
        connections = [listener.accept()[0] for _ in range(64)]
        time.sleep(stall_s)
        for connection in connections:
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    def echo(connection: socket.socket) -> None:
        with connection:
            while connection.recv(4_096):
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with RequestFile([HEALTH]) as file:
            load = open_load(listener.getsockname()[1], file, 1_000.0, 200)
        thread.join()
    # 200 requests due in 0.2 s meet 64 connections that answer after 0.3 s. Those that found none
    # free were sent only then, and are charged with the time that they waited all the same.
    assert load.requests == 200
    assert min(load.latencies_us) >= (stall_s - 0.2) * 1e6 * 0.5


def test_a_service_that_closes_is_a_readable_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            for _ in range(64):
                listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with (
            RequestFile([HEALTH]) as file,
            pytest.raises(LoadFailed, match=r"closed a connection|reset|Broken pipe"),
        ):
            open_load(listener.getsockname()[1], file, 100.0, 10)
        thread.join()


def test_a_reference_is_a_quiet_and_a_default_target() -> None:
    quiet, default = references("/opt/other/bin/selector --port {port}")
    assert quiet.command == ["/opt/other/bin/selector", "--port", "{port}"]
    assert (quiet.name, quiet.log) == ("selector warn", "warn")
    assert (default.name, default.log) == ("selector default log", None)


def test_a_command_without_a_port_is_refused() -> None:
    with pytest.raises(TargetError, match=r"must name \{port\}"):
        references("selector --port 1")


def test_a_version_is_looked_up_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAN_SELECTOR_REFERENCE_123", "/opt/r/bin/python")
    assert references("1.2.3")[0].command[0] == "/opt/r/bin/python"


def test_a_target_that_ends_at_once_tells_its_last_words() -> None:
    target = msgspec.structs.replace(ours(), command=[*ours().command, "--threads", "none"])
    with Service(target) as service, pytest.raises(TargetError, match=r"ended with 2: .*--threads"):
        service.wait()


def test_sockets_are_gone_with_the_services_that_made_them() -> None:
    with Pair(ours(), True, ()) as pair:
        sockets = [service.uds for service in pair.services]
        for service in pair.services:
            service.wait()
        assert [os.path.exists(path) for path in sockets] == [True, True]
    assert [os.path.exists(path) for path in sockets] == [False, False]


@pytest.mark.parametrize(("rounds", "those"), [(3, [3, 5]), (7, [7, 5])])
def test_an_open_load_has_its_own_number_of_rounds(
    rounds: int, those: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(StageRun, "_round", lambda self, case, *rest: ran.append(case.name))
    cases = [Case("closed", "select", 8, 1), Case("open", "select", 8, 1, rate=1.0)]
    plan, stage = Plan([], None, rounds, idle_seconds=0.0), Stage(1, cases, listens=False)
    results = Results("ours", [])
    StageRun(stage, plan, Prompts(None, 16), results, print).run(lambda name: True)
    assert [ran.count("closed"), ran.count("open")] == those


def test_a_program_that_does_not_exist_is_a_readable_error() -> None:
    with pytest.raises(TargetError, match="cannot start /no/such"):
        Service(Target("t", ["/no/such", "{port}"]))


def test_ports_are_those_that_the_system_does_not_hand_out() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) == 20
    assert all(21_000 <= port < 31_000 for port in ports)
