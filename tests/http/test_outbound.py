"""Requests of ours: what comes back, and what is said when nothing usable does."""

import asyncio
import os
import socket
import ssl
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from lean_selector.http.client import MOST_HEAD_BYTES
from lean_selector.http.outbound import (
    MOST_WAITING_BYTES,
    OutboundClient,
    OutboundFailed,
    SocketAddress,
)
from lean_selector.http.trust import Credentials, TokenFile, Trust
from lean_selector.links.names import Resolver
from tests.support.certificates import HOST, Authority, Files
from tests.support.on_loop import DEADLINE_S, on_loop, until
from tests.support.outbound_server import CHUNKED, chunk, client, hangs, response, says, serving
from tests.support.running_service import free_port

OURS, STRANGERS = Authority(), Authority()
LONG_S = DEADLINE_S
HI = says(response(b"hi"))


async def told(asking: Coroutine[Any, Any, object]) -> OutboundFailed:
    with pytest.raises(OutboundFailed) as caught:
        await asking
    return caught.value


# -- answers ---------------------------------------------------------------------------------------


@on_loop
async def test_a_request_brings_status_and_body_and_a_post_sends_its_own_as_json() -> None:
    async with serving(says(response(b"body", "404 Not Found", "X-One: 1\r\n"))) as served:
        answer = await client().get(served.url + "/a/b?c=d")
        assert (answer.status, answer.body) == (404, b"body")
        error = await told(client().text(served.url))
        assert (error.status, error.message) == (404, f"GET {served.url}: status 404: body")
        await client().request("POST", served.url, b'{"a":1}')
        lines = served.requests[0].decode().split("\r\n")
        assert lines[0] == "GET /a/b?c=d HTTP/1.1"
        assert f"host: 127.0.0.1:{served.port}" in lines
        assert not [line for line in lines if line.startswith("authorization")]
        assert served.requests[2].startswith(b"POST / HTTP/1.1\r\n")
        assert b"content-type: application/json\r\n" in served.requests[2]
        assert served.requests[2].endswith(b'\r\n\r\n{"a":1}')


@on_loop
async def test_an_answer_is_taken_though_its_sender_keeps_the_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response(b"body"))
        assert await reader.read() == b"", "it is we who close"
        closed.set()

    closed = asyncio.Event()
    async with serving(serve) as served:
        assert (await client().get(served.url)).body == b"body"
        await asyncio.wait_for(closed.wait(), DEADLINE_S)


# -- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((), "the connection ended before an answer"),
        (
            (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",),
            "the connection ended amid the answer",
        ),
        ((CHUNKED + chunk(b"abc"),), "the connection ended amid the answer"),
        ((b"\xff\0\0\0\0\0\0\0\1\x7f",), "the answer is not HTTP"),
        (
            (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n" * MOST_HEAD_BYTES),
            "the head of the answer has more",
        ),
        ((response(b"a" * 101),), "the answer has more than 100 bytes"),
    ],
)
@on_loop
async def test_what_is_no_answer_is_one_clear_line(parts: tuple[bytes, ...], reason: str) -> None:
    async with serving(says(*parts)) as served:
        error = await told(client().get(served.url + "/x", most_bytes=100))
        assert error.message.startswith(f"GET {served.url}/x: {reason}")
        assert "\n" not in error.message


@on_loop
async def test_who_is_silent_is_given_up_and_who_sends_bit_by_bit_gets_no_more_time() -> None:
    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        while True:
            writer.write(chunk(b"a"))
            await asyncio.sleep(0.01)

    for serve, timeout_s in ((hangs, 0.05), (drips, 0.2)):
        async with serving(serve) as served:
            error = await told(client().get(served.url, timeout_s=timeout_s))
            assert error.message == f"GET {served.url}: no answer in {timeout_s} s"


@on_loop
async def test_a_port_where_nobody_listens_and_a_name_that_nobody_knows_say_so() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    error = await told(client().get(url))
    assert error.message == f"GET {url}: Connection refused"

    async def resolve(host: str, port: int) -> list[SocketAddress]:
        raise socket.gaierror(-2, "Name or service not known")

    error = await told(OutboundClient(resolve).get("http://engine"))
    assert error.message == "GET http://engine: Name or service not known"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        *(("ftp://a", "not an http:// or https:// URL"), ("http://", "has no host")),
        *(("http://a:b", "no valid port"), ("http://me:secret@a", "credentials in a URL")),
        *(("http://a/ b", "invalid in a URL"), ("http://a/\r\nx: y", "invalid in a URL")),
    ],
)
@on_loop
async def test_what_is_no_url_says_so(url: str, reason: str) -> None:
    error = await told(client().get(url))
    assert reason in error.message


@on_loop
async def test_the_other_addresses_of_a_name_are_tried() -> None:
    async with serving(says(response(b"here"))) as served:
        gone = free_port()

        async def resolve(host: str, port: int) -> list[SocketAddress]:
            assert (host, port) == ("engine", 80)
            return [
                (socket.AF_INET, ("127.0.0.1", gone)),
                (socket.AF_INET, ("127.0.0.1", served.port)),
            ]

        assert (await OutboundClient(resolve).get("http://engine")).body == b"here"


# -- tokens and TLS --------------------------------------------------------------------------------


@on_loop
async def test_a_token_is_read_again_when_its_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    ours = client(TokenFile(str(path)))
    async with serving(says(response(b""))) as served:
        await ours.get(served.url)
        later = tmp_path / "later"
        later.write_text("second\n")
        os.replace(later, path)
        await ours.get(served.url)
        path.unlink()
        await ours.get(served.url)
        path.write_text("two words")
        await ours.get(served.url)
        sent = [request.decode().split("\r\n")[-3] for request in served.requests]
        bearer = "authorization: Bearer "
        assert sent == [bearer + "first", bearer + "second", bearer + "second", bearer + "second"]


@pytest.mark.parametrize("text", ["", " \n", "two words", "line\nbreak", "\u00fc"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(ValueError, match="has no bearer token"):
        TokenFile(str(path))


@on_loop
async def test_the_right_authority_is_believed_and_no_other(tmp_path: Path) -> None:
    authority, other = Authority(), Authority()
    path = tmp_path / "ca.crt"
    path.write_bytes(b"# of \xc3\xa9tat\n" + authority.pem)
    trust = Trust(str(path))

    async def resolve(host: str, port: int) -> list[SocketAddress]:
        return [(socket.AF_INET, ("127.0.0.1", port))]

    ours = OutboundClient(resolve, Credentials(trust=trust))
    async with serving(HI, authority.server("engine"), "engine") as served:
        assert (await ours.get(served.url)).body == b"hi"
        served.requests.clear()
        error = await told(ours.get(f"https://impostor:{served.port}"))
        assert "its certificate is not trusted: Hostname mismatch" in error.message
        error = await told(OutboundClient(resolve).get(served.url))
        assert "its certificate is not trusted" in error.message
        path.write_bytes(other.pem)
        error = await told(ours.get(served.url))
        assert "its certificate is not trusted" in error.message
        path.write_bytes(b"no certificate")
        os.utime(path, ns=(1, 1))
        error = await told(ours.get(served.url))
        assert "its certificate is not trusted" in error.message, "the last ones are believed"
        assert served.requests == []
        path.write_bytes(authority.pem)
        assert (await ours.get(served.url)).body == b"hi"


@on_loop
async def test_a_ca_file_that_is_missing_or_none_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ca.crt"
    error = await told(client(trust=Trust(str(path))).get("https://127.0.0.1:1"))
    assert "No such file or directory" in error.message
    path.write_text("nothing")
    error = await told(client(trust=Trust(str(path))).get("https://127.0.0.1:1"))
    assert f"{path} has no certificates in PEM" in error.message


# -- lines -----------------------------------------------------------------------------------------


@on_loop
async def test_lines_come_as_they_are_sent() -> None:
    heard = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(b"one\ntw"))
        await heard.wait()
        writer.write(chunk(b"o\n\nthr") + chunk(b"ee") + chunk(b""))

    async with serving(serve) as served:
        lines = client().lines(served.url, silence_s=LONG_S)
        assert [await anext(lines) for _ in range(2)] == [b"", b"one"]
        heard.set()
        assert [line async for line in lines] == [b"two", b"", b"three"]


@on_loop
async def test_lines_end_with_a_clear_line_when_the_connection_does() -> None:
    async def story(silence_s: float = LONG_S, most_bytes: int = 1000) -> list[bytes]:
        lines = client().lines(served.url, silence_s=silence_s, most_bytes=most_bytes)
        return [line async for line in lines]

    async with serving(says(CHUNKED + chunk(b"a\nb"))) as served:
        assert "the connection ended amid the answer" in (await told(story())).message
    async with serving(says(CHUNKED + chunk(b"a" * 11) + chunk(b""))) as served:
        assert "a line has more than 10 bytes" in (await told(story(most_bytes=10))).message
    async with serving(says(response(b"gone", "410 Gone"))) as served:
        error = await told(story())
        assert (error.status, error.message) == (410, f"GET {served.url}: status 410: gone")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(b"a\n"))
        await reader.read()

    async with serving(serve) as served:
        assert "nothing received for 0.05 s" in (await told(story(silence_s=0.05))).message


@on_loop
async def test_who_sends_more_than_we_take_has_to_wait() -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED)
        while True:
            writer.write(chunk(b"a" * 9999 + b"\n"))
            await writer.drain()
            sent += 1

    async with serving(serve) as served:
        lines = client().lines(served.url, silence_s=LONG_S)
        assert [await anext(lines) for _ in range(2)] == [b"", b"a" * 9999]
        looks = [-1]

        def has_stopped() -> bool:
            looks.append(sent)
            return looks[-20:] == [sent] * 20

        await until(lambda: sent * 10_000 > MOST_WAITING_BYTES, "more was sent than is kept")
        await until(has_stopped, "the sender waits")
        stopped_at = sent
        for _ in range(stopped_at + 2 * MOST_WAITING_BYTES // 10_000):
            assert await anext(lines) == b"a" * 9999
        assert sent > stopped_at, "reading on lets it send on"


@on_loop
async def test_a_request_that_is_given_up_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + chunk(b"a\n"))
        try:
            await reader.read()
        finally:
            closed.set()

    async with serving(serve) as served:
        lines = client().lines(served.url, silence_s=LONG_S)
        assert [await anext(lines) for _ in range(2)] == [b"", b"a"]
        await lines.aclose()
        await asyncio.wait_for(closed.wait(), DEADLINE_S)
        closed.clear()
        asking = asyncio.ensure_future(client().get(served.url))
        await until(lambda: len(served.requests) == 2)
        asking.cancel()
        await asyncio.wait_for(closed.wait(), DEADLINE_S)


# -- what our own requests bring along over TLS ----------------------------------------------------


async def ask(url: str, credentials: Credentials) -> bytes:
    return await OutboundClient(Resolver().resolve, credentials).text(f"{url}/health", timeout_s=20)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path, OURS, OURS.issue("gateway.test"))


@on_loop
async def test_who_asks_for_a_certificate_is_shown_ours(files: Files) -> None:
    def credentials() -> Credentials:
        return Credentials(trust=Trust(str(files.ca), str(files.cert), str(files.key)))

    async with serving(HI, OURS.server(clients=OURS)) as running:
        assert await ask(running.url, credentials()) == b"hi"
        with pytest.raises(OutboundFailed):
            await ask(running.url, Credentials(trust=Trust(str(files.ca))))
        for wrong in (STRANGERS.issue("gateway.test"), OURS.issue("gateway.test", expired=True)):
            files.write(wrong)
            with pytest.raises(OutboundFailed):
                await ask(running.url, credentials())
        assert len(running.requests) == 1


@on_loop
async def test_a_name_may_be_given_for_who_is_found_by_address(files: Files) -> None:
    trust = Trust(str(files.ca))
    async with serving(HI, OURS.server("selector.test")) as running:
        assert await ask(running.url, Credentials(trust=trust, tls_name="selector.test")) == b"hi"
        with pytest.raises(OutboundFailed, match="its certificate is not trusted"):
            await ask(running.url, Credentials(trust=trust, tls_name="another.test"))


@pytest.mark.parametrize("lacks", ["cert", "key", "fits"])
def test_a_certificate_that_cannot_be_used_is_named(files: Files, lacks: str) -> None:
    if lacks == "fits":
        files.key.write_bytes(OURS.issue(HOST).private_key_pem.bytes())
        said = f"{files.cert} and {files.key} are not a certificate and its key in PEM"
    else:
        path = getattr(files, lacks)
        path.unlink()
        said = f"No such file or directory: '{path}'"
    with pytest.raises(OSError, match=r"PEM|No such file") as refused:
        Trust(str(files.ca), str(files.cert), str(files.key)).context()
    assert str(refused.value).endswith(said)


def test_files_that_cannot_be_used_are_tried_once_for_each_change(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[ssl.SSLContext] = []
    make = ssl.create_default_context

    def making(cafile: str | None = None) -> ssl.SSLContext:
        made.append(make(cafile=cafile))
        return made[-1]

    monkeypatch.setattr("lean_selector.http.trust.ssl.create_default_context", making)
    trust = Trust(str(files.ca), str(files.cert), str(files.key))
    first = trust.context()
    files.key.write_text("nothing")
    assert [trust.context() for _ in range(5)] == [first] * 5
    assert len(made) == 2
    files.write(OURS.issue("gateway.test"))
    assert trust.context() is trust.context() is made[-1]
    assert len(made) == 3
    told = [each for each in caplog.messages if "certificate" in each]
    assert len(told) == 1
