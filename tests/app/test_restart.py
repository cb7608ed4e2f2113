"""Services that end, in every way, and start again from their state directory."""

import json
import signal
from pathlib import Path

from lean_selector.app.state_files import opened
from tests.app.kept_selector import is_free
from tests.app.test_selector import Connection
from tests.support.asked import prompt
from tests.support.prometheus_tools import parsed, scrape, value
from tests.support.running_service import RunningService, free_port, wait_until

NO_EVENTS = {"DYN_USE_KV_EVENTS": "false"}
TRACKER = "lean_selector.slot_tracker"


def selector(path: Path, *flags: str) -> RunningService:
    return RunningService("--state-dir", str(path), *flags, env=NO_EVENTS)


def live(path: Path) -> set[str]:
    """The ids in the file."""
    try:
        text, _ = opened((path / "reservations").read_bytes())
    except FileNotFoundError:
        return set()
    return {each["request_id"] for each in json.loads(text)["reservations"]}


def metric(service: RunningService) -> float:
    return value(parsed(scrape(service.port)), "lean_selector_state_failing")


def kill(service: RunningService) -> None:
    assert service.stop(signal.SIGKILL)[0] == -signal.SIGKILL


# -- after kill -9 ---------------------------------------------------------------------------------


def test_a_killed_selector_knows_what_it_answered(tmp_path: Path) -> None:
    own, peer, dropped, added = (f"tcp://127.0.0.1:{free_port()}" for _ in range(4))
    sync = ("--replica-sync-bind", own, "--replica-sync-peers", f"{peer},{dropped}")
    with selector(tmp_path, *sync) as service:
        for worker_id in (1, 2, 3):
            service.add_worker(worker_id, model_name="m", taints=["b", "a"])
        assert service.post("/replica_sync/register_peer", {"endpoint": added})[0] == 201
        assert service.post("/replica_sync/deregister_peer", {"endpoint": dropped})[0] == 200
        assert service.request("PATCH", "/workers/2", {"total_kv_blocks": 77})[0] == 200
        assert service.request("DELETE", "/workers/3")[0] == 200
        limits = {"model": "m", "active_prefill_tokens_threshold": 1000}
        assert service.post("/busy_threshold", limits)[0] == 200
        service.book("r", model_name="m")
        paths = ("/workers", "/busy_threshold", "/replica_sync/peers")
        told = [service.get(path) for path in paths]
        wait_until(lambda: live(tmp_path) == {"r"}, "the booking is on disk")
        kill(service)
    with service:
        assert [service.get(path) for path in paths] == told
        assert service.get("/replica_sync/peers") == (200, sorted([peer, added]))
        assert service.active() == 1
        assert service.get("/ready")[0] == 200
        taken = prompt(model_name="m", reservation_id="r")
        assert service.post("/select_and_reserve", taken)[0] == 409
        assert service.end("r") == 200
        assert service.active() == 0


def test_a_killed_slot_tracker_knows_what_it_answered(tmp_path: Path) -> None:
    row = {"model_name": "m", "worker_id": 7, "dp_start": 0, "dp_size": 2, "block_size": 16}
    add = {"model_name": "m", "request_id": "r", "worker_id": 7, "dp_rank": 1}
    flags = ("--state-dir", str(tmp_path))
    with RunningService(*flags, module=TRACKER) as service:
        assert service.post("/register", row)[0] == 201
        assert service.post("/register", {**row, "worker_id": 8})[0] == 201
        assert service.post("/unregister", {"model_name": "m", "worker_id": 8})[0] == 200
        assert (
            service.post("/add", {**add, "sequence_hashes": [1, 2], "new_isl_tokens": 9})[0] == 201
        )
        told = [service.get(path) for path in ("/workers", "/loads")]
        wait_until(lambda: live(tmp_path) == {"r"}, "the booking is on disk")
        kill(service)
    with service:
        assert [service.get(path) for path in ("/workers", "/loads")] == told
        assert service.post("/free", {"model_name": "m", "request_id": "r"})[0] == 200


def test_what_any_peer_ended_meanwhile_is_not_live_again(tmp_path: Path) -> None:
    """Not only the one that is asked first."""
    ends = [f"tcp://127.0.0.1:{free_port()}" for _ in range(3)]

    def mesh(own: str) -> tuple[str, ...]:
        others = ",".join(end for end in ends if end != own)
        return "--replica-sync-bind", own, "--replica-sync-peers", others

    with (
        RunningService(*mesh(ends[1]), env=NO_EVENTS) as second,
        RunningService(*mesh(ends[2]), env=NO_EVENTS) as third,
    ):
        urls = ",".join(f"http://127.0.0.1:{each.port}" for each in (second, third))
        flags = ("--state-dir", str(tmp_path), "--replica-sync-catch-up", urls)
        with RunningService(*flags, *mesh(ends[0]), env=NO_EVENTS) as service:
            for each in (service, second, third):
                each.add_worker()
            names = iter(f"r{number}" for number in range(1000))

            def is_heard() -> bool:
                """A booking, since what is published before they are connected is lost."""
                third.book(next(names))
                return service.active() > 0 and second.active() > 0

            wait_until(is_heard, "both hear the third")
            wait_until(lambda: len(live(tmp_path)) > 0, "a copy is on disk")
            kill(service)
            for each in third.get("/replica_sync/snapshot")[1]["reservations"]:
                assert third.end(each["request_id"]) == 200
            wait_until(lambda: second.active() == 0, "the second hears of it")
            with service:
                wait_until(lambda: service.active() == 0, "and the first, from the third")


# -- who may write ---------------------------------------------------------------------------------


def test_what_changes_while_it_drains_is_kept(tmp_path: Path) -> None:
    with selector(tmp_path, "--drain-secs", "3600") as service:
        for worker_id in (1, 2):
            service.add_worker(worker_id)
        for reservation_id in ("r", "s"):
            service.book(reservation_id, allowed_worker_ids=[1])
        with Connection(service.port) as free, Connection(service.port) as gone:
            free.send(b"DELETE /reservations/r HTTP/1.1\r\nhost: ")
            gone.send(b"DELETE /workers/2 HTTP/1.1\r\nhost: ")
            wait_until(lambda: service.get("/health")[0] == 200, "both were read")
            service.process.send_signal(signal.SIGTERM)
            assert free.exchange(b"x\r\n\r\n").startswith(b"HTTP/1.1 200 ")
            assert not is_free(tmp_path)
            assert gone.exchange(b"x\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        assert service.stop()[0] == 0
    assert live(tmp_path) == {"s"}
    with service:
        assert service.active() == 1
        assert [each["worker_id"] for each in service.get("/workers")[1]] == [1]


def fault(service: RunningService) -> str | None:
    status, body = service.get("/ready")
    assert status == 200  # whatever the disk does
    found: str | None = body.get("state_fault")
    return found


def test_a_directory_that_is_gone_is_told_of_and_written_when_it_is_back(tmp_path: Path) -> None:
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    with selector(state) as service:
        service.add_worker(model_name="m")
        assert fault(service) is None
        state.rename(elsewhere)
        service.add_worker(2, model_name="m")  # answered all the same
        service.book("r", model_name="m")
        wait_until(lambda: fault(service) is not None, "it says so")
        assert "No such file or directory" in str(fault(service))
        assert metric(service) == 1
        assert "state is not written" in service.log()
        state.mkdir()  # another disk, which has nothing
        wait_until(lambda: fault(service) is None, "it is written again")
        assert "state is written again" in service.log()
        wait_until(lambda: live(state) == {"r"}, "the booking is on disk")
        kill(service)
    with service:
        assert [each["worker_id"] for each in service.get("/workers")[1]] == [1, 2]
