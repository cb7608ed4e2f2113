"""Calls of the service, as they leave and as their answers are read."""

import httpx
import pytest

from lean_selector.client import calls
from lean_selector.client.client_settings import Timeouts
from lean_selector.client.errors import NoWorkerAvailable, ServiceRefused
from lean_selector.client.transport import ServiceAddress


def test_an_answer_that_is_not_the_expected_one_is_an_error() -> None:
    address = ServiceAddress("http://selector:8092/")
    call = calls.select({})
    assert address.request(call, Timeouts()).url == "http://selector:8092/select"
    with pytest.raises(ServiceRefused, match=r"200: not the expected answer: .*worker_id"):
        address.answer(call, httpx.Response(200, content=b"{}"))
    busy = httpx.Response(503, headers={"retry-after": "7"}, content=b'{"error": "busy"}')
    with pytest.raises(NoWorkerAvailable) as caught:
        address.answer(call, busy)
    assert caught.value.retry_after_s == 7.0
    dated = httpx.Response(503, headers={"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"})
    with pytest.raises(NoWorkerAvailable) as caught:
        address.answer(call, dated)
    assert caught.value.retry_after_s is None


def test_only_a_selection_may_take_long() -> None:
    address, timeouts = (
        ServiceAddress("http://s"),
        Timeouts(connect_s=1.0, service_s=2.0, queue_s=None),
    )
    waits = address.request(calls.select({}), timeouts).extensions["timeout"]
    prompt = address.request(calls.free("r"), timeouts).extensions["timeout"]
    assert (waits["connect"], waits["read"]) == (1.0, None)
    assert (prompt["connect"], prompt["read"], prompt["write"]) == (1.0, 2.0, 2.0)


def test_a_reservation_id_is_escaped_in_the_path() -> None:
    assert calls.free("a/b c").path == "/reservations/a%2Fb%20c"
