"""What our own requests bring along, over real TLS: whatever opens a connection, on the one hand
right authorities, names, certificates and tokens, on the other wrong ones."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lean_selector.events.names import Resolver
from lean_selector.http.outbound import OutboundClient, OutboundFailed
from lean_selector.http.trust import Credentials, Trust
from lean_selector.replicas.peer_fetch import PeerFailed, PeerFetch, fetched
from tests.support.certificates import HOST, Authority, Files
from tests.support.on_loop import on_loop
from tests.support.outbound_server import Served, response, says, serving

OURS, STRANGERS = Authority(), Authority()
FAILURES = (PeerFailed, OutboundFailed)
Ask = Callable[[str, Credentials], Awaitable[bytes]]


async def of_a_peer(url: str, credentials: Credentials) -> bytes:
    """As catch-up and recovery do."""
    client = OutboundClient(Resolver().resolve, credentials)
    return await fetched(PeerFetch(client, f"{url}/dump", 20.0, 1000, bytes), 20.0, 1)


async def of_an_engine(url: str, credentials: Credentials) -> bytes:
    """As discovery, polls and doors do."""
    asked = OutboundClient(Resolver().resolve, credentials)
    return await asked.text(f"{url}/health", timeout_s=20.0)


EVERYBODY = pytest.mark.parametrize("ask", [of_a_peer, of_an_engine])
NAMED = pytest.mark.parametrize("ask", [of_a_peer])


@asynccontextmanager
async def served(context: ssl.SSLContext) -> AsyncIterator[Served]:
    async with serving(says(response(b"hi")), context) as running:
        yield running


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path, OURS, OURS.issue("gateway.test"))


@EVERYBODY
@on_loop
async def test_the_right_authority_is_believed_and_no_other(ask: Ask, files: Files) -> None:
    ours = Credentials(trust=Trust(str(files.ca)))
    async with served(OURS.server()) as running:
        assert await ask(running.url, ours) == b"hi"
        with pytest.raises(FAILURES, match="its certificate is not trusted"):
            await ask(running.url, Credentials())
    for wrong in (STRANGERS.server(), OURS.server("elsewhere.test")):
        async with served(wrong) as running:
            with pytest.raises(FAILURES, match="its certificate is not trusted"):
                await ask(running.url, ours)
            assert running.requests == []


@EVERYBODY
@on_loop
async def test_who_asks_for_a_certificate_is_shown_ours(ask: Ask, files: Files) -> None:
    def credentials() -> Credentials:
        return Credentials(trust=Trust(str(files.ca), str(files.cert), str(files.key)))

    async with served(OURS.server(clients=OURS)) as running:
        assert await ask(running.url, credentials()) == b"hi"
        with pytest.raises(FAILURES):
            await ask(running.url, Credentials(trust=Trust(str(files.ca))))
        for wrong in (STRANGERS.issue("gateway.test"), OURS.issue("gateway.test", expired=True)):
            files.write(wrong)
            with pytest.raises(FAILURES):
                await ask(running.url, credentials())
        assert len(running.requests) == 1


@NAMED
@on_loop
async def test_a_name_may_be_given_for_who_is_found_by_address(ask: Ask, files: Files) -> None:
    trust = Trust(str(files.ca))
    async with served(OURS.server("selector.test")) as running:
        assert await ask(running.url, Credentials(trust=trust, tls_name="selector.test")) == b"hi"
        with pytest.raises(FAILURES, match="its certificate is not trusted"):
            await ask(running.url, Credentials(trust=trust, tls_name="another.test"))


@on_loop
async def test_our_certificate_is_read_again_when_it_changes(files: Files) -> None:
    credentials = Credentials(trust=Trust(str(files.ca), str(files.cert), str(files.key)))
    shown: list[bytes | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown.append(writer.get_extra_info("ssl_object").getpeercert(True))
        writer.write(response(b"hi"))

    async with serving(serve, OURS.server(clients=OURS)) as running:
        await of_a_peer(running.url, credentials)
        files.write(OURS.issue("gateway.test"))
        await of_a_peer(running.url, credentials)
        files.key.write_text("nothing")
        await of_a_peer(running.url, credentials)
    assert shown[0] != shown[1] == shown[2]


@pytest.mark.parametrize("lacks", ["cert", "key", "fits"])
def test_a_certificate_that_cannot_be_used_is_named(files: Files, lacks: str) -> None:
    if lacks == "fits":
        files.key.write_bytes(OURS.issue(HOST).private_key_pem.bytes())
        said = f"{files.cert} and {files.key} hold no certificate and its key in PEM"
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
    told = [each for each in caplog.messages if each.startswith("the last certificates are used")]
    assert len(told) == 1
