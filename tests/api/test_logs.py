"""What the services log: start, lifecycle, shedding, expiry, and requests if they are asked to."""

import gc
import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from lean_selector.api.access_log import with_access_log
from lean_selector.api.logs import ACCESS_LOG
from lean_selector.build_info import form
from lean_selector.http.head import HeaderBlock, Request
from lean_selector.http.response import PendingReply, encode_response
from tests.support.asked import prompt, worker
from tests.support.prometheus_tools import parsed, scrape, value
from tests.support.running_service import RunningService, wait_until

AROUND = ["configuration", "listening", "stopped"]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def lines(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines()]


def events(log: str) -> list[str]:
    return [line["event"] for line in lines(log)]


def start(*flags: str, module: str = "lean_selector") -> RunningService:
    own = ("--use-kv-events", "false") if module == "lean_selector" else ()
    # On loopback, where no warning is due.
    own = (*own, "--host", "127.0.0.1", "--log-format", "json")
    return RunningService(*own, *flags, module=module)


def let_it_tick(service: RunningService) -> None:
    """Return when the service has surely looked at what is to be logged."""

    # The loop lag is sampled 20 times a second, the tick is every half second: 12 samples later.
    def samples() -> int:
        return int(value(parsed(scrape(service.port)), "lean_selector_loop_lag_seconds_count"))

    enough = samples() + 12
    wait_until(lambda: samples() >= enough, "the tick has run")


def test_workers_shedding_and_ejections_are_lines_when_they_begin_and_end() -> None:
    with start("--active-prefill-tokens-threshold", "0") as service:

        def after(method: str, path: str, body: object = None) -> int:
            """The status of a request, after whose effects the log was looked at."""
            status, _ = service.request(method, path, body)
            let_it_tick(service)
            return status

        assert after("POST", "/workers", worker(block_size=None)) == 201
        service.add_worker()
        assert after("POST", "/workers", worker()) == 201
        assert after("POST", "/workers", worker()) == 201  # an identical one changes nothing
        service.book("r")
        for _ in range(3):
            assert after("POST", "/select", prompt()) == 503
        assert after("DELETE", "/reservations/r") == 200
        for _ in range(3):
            service.post("/workers/1/report", {"outcome": "refused"})
        let_it_tick(service)
        # All are out, so it counts at once.
        assert after("POST", "/workers/1/report", {"outcome": "ok"}) == 200
        let_it_tick(service)
        assert after("DELETE", "/workers/1") == 200
        found = [line for line in lines(service.stop()[1]) if line["level"] != "debug"]
    said = [(line["event"], line) for line in found if line["event"] not in AROUND]
    assert [event for event, _ in said] == [
        *("worker registered", "worker changed", "shedding began: all workers are busy"),
        *("shedding ended", "worker ejected: it gets no requests", "worker no longer ejected"),
        "worker removed",
    ]
    registered, changed, began, ended, ejected = (line for _, line in said[:5])
    assert (registered["lifecycle"], changed["lifecycle"]) == ("incomplete", "schedulable")
    assert registered["reasons"] == ["block_size must be greater than 0"]
    assert (began["model"], ended["requests_shed"]) == ("default", 3)
    assert ejected["reason"] == "3 consecutive requests failed, the last: connection refused"
    assert (ejected["ranks"], ejected["worker_id"]) == (1, 1)


# -- the access log --------------------------------------------------------------------------------


def access(log: str) -> list[dict[str, Any]]:
    found = [line for line in lines(log) if line["logger"] == "lean_selector.access"]
    for line in found:
        assert line["duration_us"] >= 0
    return [line for line in found if line["route"] != "/health"]


def test_the_log_begins_with_what_differs_and_has_route_status_and_every_id_of_requests() -> None:
    with start("--access-log", "--queue-threshold", "7", "--drain-secs", "2") as service:
        port = service.port
        service.add_worker(max_num_batched_tokens=1000)
        service.request(
            "POST",
            "/select",
            prompt(selection_id="s"),
            headers={"content-type": "application/json", "traceparent": TRACEPARENT},
        )
        generated = service.post("/select_and_reserve", prompt())[1]["reservation_id"]
        service.post("/select_and_reserve", prompt(reservation_id=generated))
        service.request("POST", f"/reservations/{generated}/prefill_complete")
        service.request("DELETE", "/reservations/a%20b")
        service.request("DELETE", "/reservations/%ff")
        service.request("PUT", "/select")
        service.post("/select", [1])
        service.request("POST", "/select", raw=b"nonsense")
        _, log = service.stop()
    first, second, *_, last = lines(log)
    assert (first["event"], first["form"]) == ("configuration", form())
    assert (first["listen.port"], first["listen.drain_s"]) == (port, "2.0")
    assert first["router.use_kv_events"] is False
    assert len([name for name in first if "." in name]) == 7  # none that is the default
    assert (second["event"], second["port"]) == ("listening", port)
    assert last["event"] == "stopped"
    assert first["time"].endswith("Z")
    found = access(log)
    shown = [(line["method"], line["route"], line["status"]) for line in found]
    assert shown == [
        ("POST", "/workers", 201),
        ("POST", "/select", 200),
        ("POST", "/select_and_reserve", 200),
        ("POST", "/select_and_reserve", 409),
        ("POST", "/reservations/{reservation_id}/prefill_complete", 200),
        ("DELETE", "/reservations/{reservation_id}", 404),
        ("DELETE", "/reservations/{reservation_id}", 400),
        ("PUT", None, 405),
        ("POST", "/select", 422),
        ("POST", "/select", 400),
    ]
    assert found[1]["selection_id"] == "s"
    assert found[1]["traceparent"] == TRACEPARENT
    assert "traceparent" not in found[2]
    assert [line.get("reservation_id") for line in found[2:7]] == [
        *(generated, generated, generated, "a b", "%ff")
    ]
    assert found[7]["path"] == "/select"


class WithoutStderr(RunningService):
    """A service whose stderr is closed from the start."""

    def _command(self) -> list[str]:
        python, *arguments = super()._command()
        closes = "import os, sys; os.close(2); os.execv(sys.argv[1], sys.argv[1:])"
        return [python, "-c", closes, python, *arguments]


def test_a_service_started_with_stderr_closed_runs_and_ends_like_any_other() -> None:
    with WithoutStderr("--access-log") as service:
        assert service.get("/health") == (200, {"status": "ok"})
        assert service.stop() == (0, "")


def test_what_was_logged_before_a_crash_and_its_traceback_are_both_on_stderr() -> None:
    code = (
        "from lean_selector.api import logs; import logging;"
        "logs.set_up('info', 'text');"
        "[logging.info('line %d', number) for number in range(1000)];"
        "raise RuntimeError('the end')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    lines, _, traceback = ended.stderr.partition("Traceback (most recent call last):\n")
    assert lines.endswith(" INFO root line 999\n")
    assert lines.count("INFO root ") == 1000
    assert traceback.endswith("RuntimeError: the end\n")
    assert "INFO" not in traceback


def test_the_body_of_a_request_that_waits_is_not_kept_for_its_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reply = PendingReply()
    app = with_access_log(lambda request: reply, ())
    body = b'{"selection_id":"s","pad":"%b"}' % (b"x" * 10_000)
    headers = HeaderBlock(False, True, 0, None, None, None, False)
    app(Request(b"POST", b"/select", None, body, headers))
    assert not any(isinstance(holder, Request) for holder in gc.get_referrers(body))
    with caplog.at_level(logging.INFO, ACCESS_LOG):
        reply.resolve(encode_response(200, b'{"reservation_id":"r"}'))
    (line,) = caplog.records
    said = vars(line)
    assert (said["status"], said["selection_id"], said["reservation_id"]) == (200, "s", "r")
