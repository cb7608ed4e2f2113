"""What peers tell a replica that starts again from its state directory."""

from pathlib import Path

from tests.server.test_restart import NO_EVENTS, QUICK, active, booking, live, worker
from tests.support.running_service import RunningService, free_port, wait_until


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
        flags = ("--state-dir", str(tmp_path), *QUICK, "--replica-sync-catch-up", urls)
        with RunningService(*flags, *mesh(ends[0]), env=NO_EVENTS) as service:
            for each in (service, second, third):
                assert each.post("/workers", worker())[0] == 201
            names = iter(f"r{number}" for number in range(1000))

            def is_heard() -> bool:
                """A booking, since what is published before they are connected is lost."""
                assert third.post("/select_and_reserve", booking(next(names)))[0] == 200
                return active(service) > 0 and active(second) > 0

            wait_until(is_heard, "both hear the third")
            wait_until(lambda: len(live(tmp_path)) > 0, "a copy is on disk")
            service.process.kill()
            service.stop()
            ended = [
                each["request_id"]
                for each in third.get("/replica_sync/snapshot")[1]["reservations"]
            ]
            for reservation_id in ended:
                assert third.request("DELETE", f"/reservations/{reservation_id}")[0] == 200
            wait_until(lambda: active(second) == 0, "the second hears of it")
            with service:
                wait_until(lambda: active(service) == 0, "and the first, from the third")
