"""What a TLS connection holds and costs beyond its requests, without a socket (D46)."""

import contextlib
import ssl
from collections.abc import Callable

from lean_selector.http.connections import TURN_S, Connections
from lean_selector.http.head import Limits, Request
from lean_selector.http.protocol import HttpProtocol
from lean_selector.http.response import PendingReply, encode_response
from lean_selector.http.tls import TlsAcceptor, TlsConnection
from tests.http.test_protocol import Transport
from tests.http.tls_client import TlsMemory
from tests.support.certificates import Authority

OURS = Authority()
TRUSTING = OURS.client()
PARK = b"GET /park HTTP/1.1\r\nhost: x\r\n\r\n"
KIB = 1024


class Loop:
    """The turns of a loop, one at a time, and a door whose app says how large a body was."""

    def __init__(self) -> None:
        self.turns: list[Callable[[], None]] = []
        self.now = self.tick = 0.0
        self.connections = Connections(
            self.turns.append, Limits(max_body_bytes=8 * KIB * KIB), clock=self.clock
        )
        self.parked: list[PendingReply] = []
        self.door = TlsAcceptor(
            OURS.server(), self.connections, lambda: HttpProtocol(self.app, self.connections)
        )

    def app(self, request: Request) -> bytes | PendingReply:
        if request.path == b"/park":
            reply = PendingReply(is_being_made=True)
            self.parked.append(reply)
            return reply
        return encode_response(200, b"%d bytes" % len(request.body))

    def clock(self) -> float:
        self.now += self.tick
        return self.now

    def turn(self) -> None:
        """What is due now."""
        due, self.turns[:] = self.turns[:], []
        for call in due:
            call()

    def client(self) -> "Client":
        return Client(self)


class Client(Transport, TlsMemory):
    """A client, and the transport that the server has of it."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.set_up(TRUSTING)
        self._loop = loop
        self._unread = b""
        self.server = TlsConnection(loop.door)
        self.server.connection_made(self)

    # What the server does to its transport.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.incoming.write(data)

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True
        self._loop.turns.append(self._send_unread)

    @property
    def is_answered(self) -> bool:
        return bool(self.incoming.pending)

    # What the client does.

    def send(self, data: bytes, piece_bytes: int = 64 * KIB) -> None:
        """Over the wire, as far as the server reads."""
        for at in range(0, len(data), piece_bytes):
            if not self.reads:
                self._unread += data[at:]
                return
            if not self.is_closing():
                self.server.data_received(data[at : at + piece_bytes])

    def _send_unread(self) -> None:
        data, self._unread = self._unread, b""
        self.send(data)

    def connected(self) -> "Client":
        for _ in range(2):
            self.send(self.flight())
            self._loop.turn()
        assert self._loop.connections.tls.completed
        return self

    def received(self) -> bytes:
        pieces = []
        with contextlib.suppress(ssl.SSLWantReadError):
            while piece := self.tls.read(64 * KIB):
                pieces.append(piece)
        return b"".join(pieces)


def test_a_large_request_may_follow_a_handshake_that_waits_for_its_turn() -> None:
    loop = Loop()
    client = loop.client()
    client.send(client.flight())
    loop.turn()
    body = bytes(2000 * KIB)
    head = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    client.send(client.flight() + client.sealed(head + body))
    assert 0 < loop.connections.held_bytes <= 512 * KIB
    loop.turn()
    loop.turn()  # reads what it had left
    assert client.received().endswith(b"%d bytes" % len(body))
    assert not any(loop.connections.tls.failures.values())


def test_a_turn_of_the_loop_does_a_few_handshakes_and_lets_others_have_theirs() -> None:
    loop = Loop()
    clients = [loop.client() for _ in range(6)]
    for client in clients:
        client.send(client.flight())
    loop.tick = TURN_S / 2  # at each look at the clock: so long a handshake takes
    done = []
    while loop.turns:
        assert len(loop.turns) == 1
        loop.turn()
        done.append(sum(client.is_answered for client in clients))
    assert done == [2, 4, 6]


def test_who_has_left_takes_nobodys_turn() -> None:
    loop = Loop()
    for _ in range(40):
        leaver = loop.client()
        leaver.send(leaver.flight() + bytes(64 * KIB))
        leaver.close()
        leaver.server.connection_lost(None)
    client = loop.client()
    client.send(client.flight())
    loop.turn()
    assert client.is_answered


def test_what_comes_behind_a_farewell_is_thrown_away() -> None:
    loop = Loop()
    client = loop.client().connected()
    client.send(client.sealed(PARK) + client.farewell())
    assert loop.parked
    assert not client.is_closing()
    for _ in range(100):
        client.send(bytes(64 * KIB))
    assert client.server._incoming.pending == 0  # what OpenSSL has not taken


def test_a_handshake_that_goes_on_and_on_is_refused() -> None:
    loop = Loop()
    client = loop.client()
    change_of_cipher = b"\x14\x03\x03\x00\x01\x01"  # which TLS 1.3 takes as nothing
    client.send(client.flight())
    loop.turn()
    for _ in range(100):
        client.send(change_of_cipher * 1000)
        loop.turn()
    assert loop.connections.tls.failures["other"] == 1
    assert loop.connections.held_bytes == 0


def test_records_of_a_byte_are_decrypted_over_several_turns() -> None:
    loop = Loop()
    client = loop.client().connected()
    loop.tick = 0.001  # at each look at the clock
    records = client.sealed(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n")
    records += client.sealed(b"x" * 9000, record_bytes=1)
    client.send(records, piece_bytes=256 * KIB)
    turns = 0
    while not client.reads:
        assert len(loop.turns) == 1
        loop.turn()
        turns += 1
    assert turns >= 3
    assert client.received().endswith(b"9000 bytes")
    assert client.reads
