"""The flags that open the doors for gateways, on the real process."""

import socket
import stat
from pathlib import Path

from tests.support.running_service import RunningService, free_port, wait_until


def test_lines_from_everywhere_that_is_allowed_end_what_route_has_booked(tmp_path: Path) -> None:
    path, port = tmp_path / "ends.sock", free_port()
    flags = (
        *("--prompts", "off", "--use-kv-events", "false", "--lifecycle-allow", "10.0.0.0/8"),
        *("--lifecycle-from", f"unixgram:{path}", "--lifecycle-from", f"syslog:0.0.0.0:{port}"),
    )
    with RunningService(*flags) as service:
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        service.add_worker(model_name="m", endpoint="http://10.0.0.7:8000")
        for reservation_id, kind, where in (
            ("a", socket.AF_UNIX, str(path)),
            ("b", socket.AF_INET, ("127.0.0.1", port)),
        ):
            status, _ = service.request(
                "POST",
                "/route/v1/completions",
                {"model": "m", "prompt": "hello"},
                headers={"x-reservation-id": reservation_id},
            )
            assert (status, service.active()) == (200, 1)
            with socket.socket(kind, socket.SOCK_DGRAM) as log:
                log.sendto(
                    b"<13>gateway: lean-end status=200 reservation=%b" % reservation_id.encode(),
                    where,
                )
                wait_until(lambda: service.active() == 0, "the line frees it")
        service.stop()
    assert not path.exists()


def test_who_can_write_lines_needs_no_token_to_free_and_to_eject(tmp_path: Path) -> None:
    path, tokens = tmp_path / "ends.sock", tmp_path / "tokens"
    tokens.write_text("admin a-0123456789")
    flags = ("--use-kv-events", "false", "--lifecycle-from", f"unixgram:{path}")
    with RunningService(*flags, "--auth-token-file", str(tokens)) as service:
        assert service.end("a") == 401
        service.token = "a-0123456789"
        service.add_worker()
        service.reserve("a", 1, 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
            log.connect(str(path))
            log.send(b"lean-end reservation=a")
            for _ in range(3):
                log.send(b"lean-end worker=1 rank=0 status=500")
        wait_until(lambda: "ejected" in service.get("/ready")[1], "the worker is ejected")
        assert service.active() == 0
