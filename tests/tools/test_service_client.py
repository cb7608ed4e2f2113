"""The demo's HTTP client against a scripted service."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lean_selector.tools import service_process
from lean_selector.tools.service_process import HttpClient, ServiceError

from .conftest import ScriptedService


def run(scripted: ScriptedService, use: Callable[[HttpClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with scripted.running() as url:
            client = HttpClient(url)
            try:
                await use(client)
            finally:
                client.close()

    asyncio.run(main())


def test_requests_one_after_the_other_share_a_connection(scripted: ScriptedService) -> None:
    scripted.answers = {"GET /a": (200, b"x" * 100_000), "POST /b": (201, b"{}")}

    async def use(client: HttpClient) -> None:
        assert await client.request("GET", "/a") == (200, b"x" * 100_000)
        assert await client.call("POST", "/b", {"k": [1, 2]}) == b"{}"
        assert await client.request("POST", "/b") == (201, b"{}")

    run(scripted, use)
    assert scripted.connections == 1
    assert scripted.requests[1] == ("POST /b", b'{"k":[1,2]}')


def test_requests_at_once_have_a_connection_each(scripted: ScriptedService) -> None:
    scripted.answers = {"GET /a": (200, b"")}

    async def use(client: HttpClient) -> None:
        await asyncio.gather(*(client.call("GET", "/a") for _ in range(5)))
        await asyncio.gather(*(client.call("GET", "/a") for _ in range(5)))

    run(scripted, use)
    assert scripted.connections == 5


def test_a_refusal_is_an_error_with_the_words_of_the_service(scripted: ScriptedService) -> None:
    async def use(client: HttpClient) -> None:
        with pytest.raises(ServiceError, match=r"GET /x: 404 .*route not found"):
            await client.call("GET", "/x")

    run(scripted, use)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="hangs up"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab", id="hangs up halfway"),
        pytest.param(b"what is this\r\n\r\n", id="not HTTP"),
    ],
)
def test_no_whole_answer_is_an_error_and_the_next_request_is_fine(
    scripted: ScriptedService, raw: bytes
) -> None:
    scripted.raw = {"GET /x": raw}
    scripted.answers = {"GET /a": (200, b"fine")}

    async def use(client: HttpClient) -> None:
        with pytest.raises(ServiceError, match="GET /x: "):
            await client.call("GET", "/x")
        assert await client.call("GET", "/a") == b"fine"

    run(scripted, use)


def test_a_connection_that_the_service_closes_is_not_used_again(scripted: ScriptedService) -> None:
    scripted.raw = {
        "GET /last": b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
    }

    async def use(client: HttpClient) -> None:
        for _ in range(2):
            assert await client.call("GET", "/last") == b"ok"

    run(scripted, use)
    assert scripted.connections == 2


def test_an_answer_that_does_not_come_in_time_is_an_error(
    scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_process, "ANSWER_TIMEOUT_S", 0.02)

    scripted.silent = {"GET /x"}

    async def use(client: HttpClient) -> None:
        with pytest.raises(ServiceError, match="no answer"):
            await client.call("GET", "/x")

    run(scripted, use)


def test_nobody_listening_is_an_error() -> None:
    async def use() -> None:
        with pytest.raises(ServiceError, match="GET /health: "):
            await HttpClient("http://127.0.0.1:1").call("GET", "/health")

    asyncio.run(use())


@pytest.mark.parametrize("url", ["https://h:1", "http://h", "http://h:x", "h:1", "http://h:70000"])
def test_only_http_urls_with_a_port_are_taken(url: str) -> None:
    with pytest.raises(ServiceError, match="not an http"):
        HttpClient(url)
