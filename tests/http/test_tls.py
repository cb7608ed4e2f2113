"""TLS on real sockets and uvloop: what it says in its own way, and what handshakes bring (D46).

What is the same with and without it is told over either in test_real_socket.py.
"""

import asyncio
import logging
import ssl
import warnings
from collections.abc import Iterator

import pytest

from tests.http.live_server import (
    GET,
    OURS,
    Reader,
    Server,
    Writer,
    answer,
    on_tls,
    served_over_tls,
)
from tests.http.tls_client import TlsClient, raw
from tests.support.certificates import Authority
from tests.support.on_loop import on_loop, until

STRANGERS = Authority()
TRUSTING = OURS.client()


async def bare(server: Server) -> tuple[Reader, Writer]:
    """A connection without TLS."""
    reader, writer = await raw(server.port)
    server.clients.append(writer)
    return reader, writer


async def client_of(server: Server, context: ssl.SSLContext = TRUSTING) -> TlsClient:
    return TlsClient(*await bare(server), context)


def failures(server: Server) -> dict[str, int]:
    return {reason: n for reason, n in server.connections.tls.failures.items() if n}


# -- what is said in its own way -------------------------------------------------------------------


@on_tls
async def test_a_client_that_says_farewell_gets_all_its_answers(server: Server) -> None:
    client = await client_of(server)
    await client.shake_hands()
    client.writer.write(client.sealed(GET * 200))
    client.say_farewell()
    assert (await client.read_all()).count(b"/a 0") == 200


@on_tls
async def test_an_idle_connection_is_closed_and_told_so(server: Server) -> None:
    client = await client_of(server)
    await client.shake_hands()
    client.writer.write(client.sealed(GET))
    assert b"/a 0" in await client.read()
    server.connections.sweep(76.0)
    assert await client.read() == b""  # by a farewell: a mere end would raise


@on_tls
async def test_a_record_that_comes_byte_by_byte_is_a_request_once_it_is_whole(
    server: Server,
) -> None:
    client = await client_of(server)
    await client.shake_hands()
    for byte in client.sealed(GET):
        client.writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert b"/a 0" in await client.read()


@on_tls
async def test_what_cannot_be_decrypted_ends_its_connection_and_no_other(server: Server) -> None:
    reader, writer = await server.connect()
    client = await client_of(server)
    await client.shake_hands()
    await until(lambda: len(server.connections.open) == 2)
    forged = bytearray(client.sealed(GET))
    forged[-1] ^= 1
    client.writer.write(bytes(forged))
    await until(lambda: len(server.connections.open) == 1)
    assert server.handled == 0
    writer.write(GET)
    assert (await answer(reader))[0] == 200


# -- handshakes ------------------------------------------------------------------------------------


@on_tls
async def test_handshakes_that_never_end_have_places_and_are_cleared(server: Server) -> None:
    server.connections.max_connections = 3
    silent = [await raw(server.port) for _ in range(2)]
    halfway = await client_of(server)
    hello = halfway.flight()
    halfway.writer.write(hello[:50])
    await until(lambda: len(server.connections.greeting) == 3)
    late = await client_of(server)
    await late.shake_hands()
    assert (await late.read_all()).startswith(b"HTTP/1.1 503 ")
    server.connections.sweep(9.0)
    assert len(server.connections.greeting) == 3
    server.connections.sweep(11.0)
    await until(lambda: not server.connections.greeting)
    assert failures(server) == {"timeout": 3}
    reader, writer = await server.connect()
    writer.write(GET)
    assert (await answer(reader))[0] == 200
    for _, bare in silent:
        bare.transport.abort()


@pytest.mark.parametrize(("sent", "counted"), [(0, {}), (50, {"closed": 1})])
@on_tls
async def test_a_client_that_leaves_has_failed_if_it_began_its_handshake(
    server: Server, sent: int, counted: dict[str, int]
) -> None:
    """One that sends nothing only looks whether the port is open."""
    client = await client_of(server)
    client.writer.write(client.flight()[:sent])
    await until(lambda: server.connections.greeting)
    client.writer.close()
    await until(lambda: not server.connections.greeting)
    assert failures(server) == counted


@on_tls
async def test_a_handshake_under_way_when_a_stop_begins_ends_in_an_answer_and_none_is_waited_for(
    server: Server,
) -> None:
    client, silent = await client_of(server), await bare(server)
    await until(lambda: len(server.connections.greeting) == 2)
    server.connections.start_draining()
    server.connections.sweep(0.5)
    await client.shake_hands()
    client.writer.write(client.sealed(GET))
    told = await client.read_all()
    assert told.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in told
    assert len(server.connections.greeting) == 1
    server.connections.sweep(1.5)
    assert await silent[0].read() == b""


@pytest.fixture
def nothing_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        yield
    assert caplog.records == []


@pytest.mark.usefixtures("nothing_logged")
@on_tls
async def test_who_speaks_plain_http_is_told_what_is_spoken(server: Server) -> None:
    reader, writer = await bare(server)
    writer.write(GET)
    status, head, body = await answer(reader)
    assert (status, body) == (400, b'{"error":"this port speaks TLS: use https://"}')
    assert b"connection: close" in head
    assert await reader.read() == b""
    writer.close()
    await until(lambda: not server.connections.greeting)
    assert failures(server) == {"not_tls": 1}


@pytest.mark.usefixtures("nothing_logged")
@pytest.mark.parametrize(
    "garbage", [b"\x16" + bytes(70_000), b"\x16\x03\x01\xff\xff" + b"x" * 200_000]
)
@on_tls
async def test_garbage_in_place_of_a_handshake_is_refused(server: Server, garbage: bytes) -> None:
    reader, writer = await bare(server)
    writer.write(garbage)
    while await reader.read(65536):  # an alert, perhaps
        pass
    writer.close()
    await until(lambda: not server.connections.greeting)
    assert sum(failures(server).values()) == 1


async def _is_refused(server: Server, context: ssl.SSLContext) -> bool:
    """Whether a client gets no answer, wherever it notices."""
    try:
        reader, writer = await server.connect(context=context)
        writer.write(GET)
        await answer(reader)
    except (OSError, asyncio.IncompleteReadError):
        return True
    return False


@on_tls
async def test_what_is_sent_in_handshakes_is_bounded_for_all_together(server: Server) -> None:
    server.connections.max_held_bytes = 100_000
    reader, writer = await server.connect()
    senders = [await raw(server.port) for _ in range(10)]
    for _, sender in senders:
        sender.write(b"\x16\x03\x01\x40\x00\x01\x01\xff\xfc" + bytes(15_000))
    await until(lambda: server.connections.bodies_refused >= 4)
    assert server.connections.held_bytes <= 100_000
    for _, sender in senders:
        sender.transport.abort()
    await until(lambda: not server.connections.greeting)
    assert server.connections.held_bytes == 0
    writer.write(GET)
    assert (await answer(reader))[0] == 200


@on_loop
async def test_tls_1_1_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    old, context = OURS.client(), OURS.server()
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    async with served_over_tls(context) as server:
        assert await _is_refused(server, old)
        await until(lambda: failures(server) == {"other": 1})
    (told,) = (vars(each) for each in caplog.records if each.name == "lean_selector.server")
    assert (told["client"], told["error"]) == ("127.0.0.1", "unsupported protocol")


@pytest.mark.parametrize("names", [("127.0.0.1",), ("elsewhere.test",)])
@pytest.mark.parametrize("authority", [OURS, STRANGERS])
@on_loop
async def test_clients_believe_the_right_name_of_the_right_authority_alone(
    authority: Authority, names: tuple[str, ...]
) -> None:
    async with served_over_tls(authority.server(*names)) as server:
        client = await client_of(server)
        if authority is OURS and names == ("127.0.0.1",):
            await client.shake_hands()
            client.writer.write(client.sealed(GET))
            assert b"/a 0" in await client.read()
            assert failures(server) == {}
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                await client.shake_hands()
            await until(lambda: failures(server) == {"refused_by_client": 1})


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("whose", ["ours", "none", "another authority's", "expired"])
@on_loop
async def test_mutual_tls_lets_in_who_has_a_certificate_that_counts(
    whose: str, version: ssl.TLSVersion
) -> None:
    async with served_over_tls(OURS.server(clients=OURS)) as server:
        own = {
            "ours": OURS.issue("gateway.test"),
            "none": None,
            "another authority's": STRANGERS.issue("gateway.test"),
            "expired": OURS.issue("gateway.test", expired=True),
        }[whose]
        context = OURS.client(own)
        context.maximum_version = version
        assert await _is_refused(server, context) is (whose != "ours")
        expected = {} if whose == "ours" else {"client_certificate": 1}
        await until(lambda: failures(server) == expected)
        assert server.handled == (whose == "ours")


@on_tls
async def test_a_new_certificate_is_for_new_handshakes_and_open_connections_stay(
    server: Server,
) -> None:
    assert server.door is not None
    reader, writer = await server.connect()
    shown = writer.get_extra_info("ssl_object").getpeercert(True)
    server.door.context = OURS.server()
    _, newcomer = await server.connect()
    assert newcomer.get_extra_info("ssl_object").getpeercert(True) != shown
    writer.write(GET)
    assert (await answer(reader))[0] == 200
    assert writer.get_extra_info("ssl_object").getpeercert(True) == shown
