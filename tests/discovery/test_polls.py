"""Polls of workers: whom, where, how many at once, and what comes of them, with real servers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from lean_selector.http.urls import url_at
from lean_selector.publisher import KvEventPublisher
from tests.client.fleet import NO_EVENTS, Fleet
from tests.support.fake_engine import FakeEngine
from tests.support.running_service import RunningService, wait_until
from tests.support.tuned import TUNED

FLAGS = ("--worker-health-interval-secs", "0.05")


@contextlib.contextmanager
def two_engines(
    *flags: str, service: RunningService | None = None
) -> Iterator[tuple[Fleet, FakeEngine, FakeEngine]]:
    engines = FakeEngine(), FakeEngine()
    try:
        with Fleet(0, *FLAGS, *flags, service=service) as fleet:
            for number, engine in enumerate(engines, 1):
                fleet.register(number, f"{engine.url}/v1")
            yield fleet, *engines
    finally:
        for engine in engines:
            with contextlib.suppress(OSError):
                engine.close()


def health(fleet: Fleet, worker_id: int) -> Any:
    workers = fleet.service.get("/workers?detail=true")[1]
    return next(each["health"] for each in workers if each["worker_id"] == worker_id)


def becomes(fleet: Fleet, worker_id: int, state: str) -> None:
    wait_until(lambda: health(fleet, worker_id)["state"] == state, f"it is {state}")


def reason(fleet: Fleet, worker_id: int) -> str:
    return str(health(fleet, worker_id)["ranks"][0]["reason"])


def test_a_worker_that_says_it_is_not_well_is_ejected_until_it_says_it_is() -> None:
    with two_engines("--worker-health-path", "/livez") as (fleet, sick, _):
        for status in (500, 503, 404, 301):
            sick.status = status
            becomes(fleet, 1, "ejected")
            assert "3 consecutive polls failed" in reason(fleet, 1)
            assert f"status {status}" in reason(fleet, 1)
            assert health(fleet, 2)["state"] == "in_service"
            sick.status = 200
            becomes(fleet, 1, "probation")
        assert set(sick.asked) == {"/livez"}


def test_a_worker_that_does_not_answer_in_time_is_ejected() -> None:
    tuned = RunningService(*FLAGS, module=TUNED, env=NO_EVENTS)
    with tuned as service, two_engines(service=service) as (fleet, mute, _):
        mute.status = 0
        becomes(fleet, 1, "ejected")
        assert "no answer in 0.1 s" in reason(fleet, 1)


def test_a_worker_that_is_gone_is_ejected_and_one_that_was_refused_is_back_at_a_poll() -> None:
    with two_engines() as (fleet, gone, _):
        for _ in range(3):
            fleet.service.post("/workers/2/report", {"outcome": "refused"})
        becomes(fleet, 2, "probation")  # it was out, and answers
        gone.close()
        becomes(fleet, 1, "ejected")


def test_workers_that_come_and_go_are_polled_and_no_longer() -> None:
    with two_engines() as (fleet, one, other):
        wait_until(lambda: one.asked.total() > 1 and other.asked.total() > 1, "both are asked")
        fleet.service.request("DELETE", "/workers/1")
        seen = one.asked.total()
        more = other.asked.total() + 5
        wait_until(lambda: other.asked.total() >= more, "the other goes on being asked")
        assert one.asked.total() <= seen + 1  # one may have been on its way


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://w:8000", "http://w:8000/health"),
        ("http://w:8000/v1", "http://w:8000/health"),
        ("https://w/base/", "https://w:443/health"),
        ("10.0.0.1:8000", "http://10.0.0.1:8000/health"),
        ("http://[::1]:8000", "http://[::1]:8000/health"),
        ("grpc://w:1", None),
        ("http://w:99999", None),
        ("http://", None),
        ("", None),
        (None, None),
    ],
)
def test_where_a_worker_is_asked(endpoint: str | None, url: str | None) -> None:
    assert url_at(endpoint, "/health") == url


def test_a_worker_whose_event_source_is_lost_is_asked_at_once() -> None:
    with FakeEngine() as engine, RunningService("--worker-health-interval-secs", "1e9") as service:
        publisher = KvEventPublisher(worker_id=1, kv_block_size=16, endpoint="tcp://127.0.0.1:0")
        worker = {"worker_id": 1, "model_name": "m", "endpoint": engine.url, "block_size": 16}
        worker["kv_events_endpoint"] = publisher.endpoint
        assert service.post("/workers", worker)[0] == 201
        wait_until(
            lambda: service.get("/kv_sources")[1][0]["connection"] == "connected", "it is heard"
        )
        assert not engine.asked  # its turn is in years
        publisher.close()
        wait_until(lambda: [*engine.asked] == ["/health"], "it is asked")
