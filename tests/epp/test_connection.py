"""HTTP/2 and gRPC of a data plane: what a hostile peer costs, and what a good one still gets."""

import struct
from collections.abc import Iterable
from typing import Any

import pytest
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.epp import connection as under_test
from lean_selector.epp import messages
from lean_selector.epp.connection import EXT_PROC, PickerConnection
from lean_selector.http.connections import Connections
from lean_selector.http.head import digest_of
from tests.http import test_protocol

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS = 0, 1, 2, 3, 4
PING, GOAWAY, WINDOW, CONTINUATION = 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
PROCESS = f"/{EXT_PROC}/Process"
CHECK = "/grpc.health.v1.Health/Check"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes((kind, flags))
        + struct.pack(">I", stream)
        + payload
    )


def frames_in(data: bytes | bytearray) -> list[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, payload) of each."""
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 3], "big")
        stream = int.from_bytes(data[at + 5 : at + 9], "big")
        found.append((data[at + 3], data[at + 4], stream, bytes(data[at + 9 : at + 9 + size])))
        at += 9 + size
    return found


def head(path: str = PROCESS, *more: tuple[str, str]) -> bytes:
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        *more,
    ]
    return Encoder().encode(headers, huffman=False)


def message(data: bytes, compressed: int = 0) -> bytes:
    return bytes((compressed,)) + struct.pack(">I", len(data)) + data


GREETING = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0)
OPEN = frame(HEADERS, END_HEADERS, 1, head())


class Transport(test_protocol.Transport):
    """One that may be paused twice, as those of loops."""

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Handler:
    """An echo in place of a request: what is taken is sent back."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.taken: list[bytes] = []
        self.ends = 0
        self.by_reset: bool | None = None
        self.echoes = True

    def take(self, data: bytes) -> None:
        self.taken.append(data)
        if self.echoes:
            self.channel.send(data)

    def closed(self, *, by_reset: bool = False) -> None:
        if not self.ends:
            self.by_reset = by_reset
        self.ends += 1


class Peer:
    """A connection, and whoever is at its other end."""

    def __init__(
        self, *, greets: bool = True, may_write: Any = lambda _: True, ready: bool = True
    ) -> None:
        self.later: list[Any] = []
        self.connections = Connections(self.later.append)
        self.connections.sweep(100.0)
        self.handlers: list[Handler] = []
        self.of = PickerConnection(self.connections, self._new, lambda: ready, may_write)
        self.transport = Transport()
        self.of.connection_made(self.transport)
        if greets:
            self.sends(GREETING)

    def _new(self, channel: Any, credential: bytes | None) -> Any:
        self.handlers.append(Handler(channel))
        return self.handlers[-1]

    def sends(self, data: bytes, at_a_time: int = 1 << 18) -> "Peer":
        """As a transport hands it on, unless it is closed; other work of the loop comes between."""
        for at in range(0, len(data), at_a_time):
            if self.transport.is_closing():
                break
            self.of.data_received(data[at : at + at_a_time])
            while self.later:
                later, self.later[:] = self.later[:], []
                for each in later:
                    each()
        return self

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        return frames_in(b"".join(self.transport.writes))

    def payload(self, kind: int) -> list[bytes]:
        return [payload for each, _, _, payload in self.frames() if each == kind]

    def status(self) -> int | None:
        """The gRPC status of the last call that is over."""
        from hpack import Decoder

        decoder, found = Decoder(), None
        for block in self.payload(HEADERS):
            told = {bytes(name): value for name, value in decoder.decode(block, raw=True)}
            if b"grpc-status" in told:
                found = int(told[b"grpc-status"])
        return found

    def was_closed(self) -> bool:
        """With a GOAWAY, and nothing is left."""
        self.of.connection_lost(None)
        assert self.of.held_bytes == self.connections.held_bytes == 0
        assert all(handler.ends for handler in self.handlers)
        return self.transport.is_closing()


# -- what a good peer gets -------------------------------------------------------------------------


def test_messages_are_cut_anywhere_and_echoed() -> None:
    text = message(b"a" * 40) + message(b"") + message(b"b" * 20_000)
    for size in (1, 7, 40_000):
        peer = Peer()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        framed = b"".join(
            frame(DATA, 0, 1, piece[at : at + 16_384])
            for piece in pieces
            for at in range(0, len(piece), 16_384)
        )
        peer.sends(OPEN + framed, 11)
        assert peer.handlers[0].taken == [b"a" * 40, b"", b"b" * 20_000]
        assert b"".join(peer.payload(DATA)) == text
        peer.sends(frame(DATA, END_STREAM, 1))
        assert peer.handlers[0].by_reset is False
        assert peer.status() == 0
        assert peer.of.held_bytes == 0


def test_a_reset_is_told_apart_from_an_end() -> None:
    peer = Peer().sends(OPEN + frame(RESET, 0, 1, b"\0\0\0\x08"))
    assert peer.handlers[0].by_reset is True


@pytest.mark.parametrize("service", [b"", b"readiness", b"liveness", EXT_PROC.encode()])
def test_health_says_whether_it_is_ready(service: bytes) -> None:
    for ready in (True, False):
        peer = Peer(ready=ready)
        body = message(messages.part(1, service) if service else b"")
        peer.sends(frame(HEADERS, END_HEADERS, 1, head(CHECK)) + frame(DATA, END_STREAM, 1, body))
        expected = messages.SERVING if ready or service == b"liveness" else messages.NOT_SERVING
        assert peer.payload(DATA) == [message(expected)]
        assert peer.status() == 0


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (CHECK, message(messages.part(1, b"abc")), 5),
        (CHECK, message(b"\xff"), 3),
        ("/x/y", message(b""), 12),
        ("/grpc.health.v1.Health/Watch", message(b""), 12),
        (PROCESS, message(b"abc", compressed=1), 12),
        (PROCESS, b"\0\xff\xff\xff\xff" + b"x" * 1000, 8),
    ],
)
def test_a_call_is_refused_by_a_status_and_the_connection_goes_on(
    path: str, body: bytes, status: int
) -> None:
    peer = Peer().sends(frame(HEADERS, END_HEADERS, 1, head(path)) + frame(DATA, 0, 1, body))
    assert peer.status() == status
    assert all(handler.ends for handler in peer.handlers)
    peer.sends(
        frame(HEADERS, END_HEADERS, 3, head(CHECK)) + frame(DATA, END_STREAM, 3, message(b""))
    )
    assert peer.status() == 0
    assert peer.transport.state == "open"


def test_a_call_needs_a_token_that_may_write_and_health_needs_none() -> None:
    def may_write(credential: bytes | None) -> bool:
        return credential == digest_of(b"right")

    for token, is_let_in in (
        ("Bearer right", True),
        ("Bearer wrong", False),
        ("right", False),
        (None, False),
    ):
        more = [] if token is None else [("authorization", token)]
        peer = Peer(may_write=may_write).sends(frame(HEADERS, END_HEADERS, 1, head(PROCESS, *more)))
        assert bool(peer.handlers) == is_let_in
        assert peer.status() == (None if is_let_in else 16)
        peer.sends(
            frame(HEADERS, END_HEADERS, 3, head(CHECK)) + frame(DATA, END_STREAM, 3, message(b""))
        )
        assert peer.payload(DATA) == [message(messages.SERVING)]


def test_an_idle_connection_is_closed_and_one_that_never_asked_sooner() -> None:
    for sends, limit_s in (
        (b"", under_test.MAX_GREETING_S),
        (OPEN + frame(RESET, 0, 1, b"\0\0\0\x08"), under_test.MAX_IDLE_S),
    ):
        peer = Peer().sends(sends)
        peer.connections.sweep(100.0 + limit_s)
        assert peer.transport.state == "open"
        peer.connections.sweep(100.1 + limit_s)
        assert peer.transport.state != "open"
    peer = Peer().sends(OPEN)
    peer.connections.sweep(1e6)
    assert peer.transport.state == "open", "its request is in progress"


# -- what a hostile one costs ----------------------------------------------------------------------


def resets(count: int) -> bytes:
    block = head()
    return b"".join(
        frame(HEADERS, END_HEADERS, 2 * n + 1, block) + frame(RESET, 0, 2 * n + 1, b"\0\0\0\x08")
        for n in range(count)
    )


BOMB = head() + b"\x40\x01a\x7f\x81\x1d" + b"v" * 3840 + b"\xbe" * 10_000
ATTACKS: dict[str, bytes] = {
    "a frame above its limit": b"\xff\xff\xff" + frame(DATA, 0, 1)[3:] + b"x" * 70_000,
    "CONTINUATION without end": frame(HEADERS, 0, 1, head())
    + frame(CONTINUATION, 0, 1, b"\x00\x01a\x20" + b"v" * 32) * 20_000,
    "a bomb of HPACK": frame(HEADERS, 0, 1, BOMB) + frame(CONTINUATION, 4, 1, b"\xbe" * 6_000),
    "headers beyond the bound": frame(
        HEADERS, END_HEADERS, 1, head(PROCESS, *[(f"h{n}", "v" * 200) for n in range(70)])
    ),
    "rapid resets": resets(6_000),
    "too many streams": b"".join(
        frame(HEADERS, END_HEADERS, 2 * n + 1, head()) for n in range(3_000)
    ),
    "PING": frame(PING, 0, 0, b"12345678") * 50_000,
    "SETTINGS": frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535)) * 50_000,
    "PRIORITY": OPEN + frame(PRIORITY, 0, 1, b"\0\0\0\0\x10") * 50_000,
    "DATA without data": OPEN + frame(DATA, 0, 1) * 50_000,
    "a window that overflows": frame(WINDOW, 0, 0, struct.pack(">I", 0x7FFFFFFF)) * 2,
    "no regard for windows": OPEN + frame(DATA, 0, 1, b"\0" + struct.pack(">I", 15 << 20))
    + frame(DATA, 0, 1, b"x" * 16_384) * 2_000,
    "DATA of no stream": frame(DATA, 0, 5, b"x"),
    "an even stream": frame(HEADERS, END_HEADERS, 2, head()),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_costs_a_connection(name: str) -> None:
    assert Peer().sends(ATTACKS[name]).was_closed()


def test_a_message_is_held_up_to_its_bound_and_garbage_behind_it_is_refused() -> None:
    peer = Peer()
    size = under_test.MAX_MESSAGE_BYTES
    peer.sends(OPEN + frame(DATA, 0, 1, b"\0" + struct.pack(">I", size)))
    peer.handlers[0].echoes = False
    for _ in range(size // 16_384 - 1):
        peer.sends(frame(DATA, 0, 1, b"x" * 16_384))
    assert size - 32_768 < peer.of.held_bytes <= size
    peer.sends(frame(DATA, 0, 1, b"x" * 16_384) * 2)
    assert [len(each) for each in peer.handlers[0].taken] == [size]
    assert peer.status() == 12
    assert peer.of.held_bytes == 0


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01", b"PRI * HTTP/1"]
)
def test_what_is_not_http_2_is_closed_at_its_first_wrong_byte(data: bytes) -> None:
    peer = Peer(greets=False).sends(data)
    assert peer.was_closed()


def test_echoes_that_nobody_takes_close_the_window() -> None:
    peer = Peer().sends(OPEN)
    one = frame(DATA, 0, 1, message(b"e" * 16_000))
    sent = 0
    window = under_test.STREAM_WINDOW
    while window >= len(one) and peer.transport.state == "open":
        peer.sends(one)
        sent += len(one)
        window = under_test.STREAM_WINDOW - sent
        window += sum(
            int.from_bytes(payload, "big")
            for kind, _, stream, payload in peer.frames()
            if kind == WINDOW and stream == 1
        )
    assert sent < 2 * under_test.STREAM_WINDOW
    assert peer.of.held_bytes < 2 * under_test.STREAM_WINDOW
    taken = len(b"".join(peer.payload(DATA)))
    peer.sends(
        frame(WINDOW, 0, 0, struct.pack(">I", 1 << 24))
        + frame(WINDOW, 0, 1, struct.pack(">I", 1 << 24))
    )
    assert len(b"".join(peer.payload(DATA))) > taken
    assert peer.of.held_bytes == 0
    assert any(kind == WINDOW and stream == 1 for kind, _, stream, _ in peer.frames())


def test_a_connection_that_holds_too_much_is_closed() -> None:
    peer = Peer()
    peer.connections.max_held_bytes = 1 << 20
    for stream in range(1, 41, 2):
        peer.sends(frame(HEADERS, END_HEADERS, stream, head()))
        for _ in range(8):
            peer.sends(frame(DATA, 0, stream, message(b"e" * 16_000)))
    assert peer.was_closed()


def test_a_peer_that_does_not_read_is_not_read() -> None:
    peer = Peer()
    peer.of.pause_writing()
    assert not peer.transport.reads
    peer.of.resume_writing()
    assert peer.transport.reads


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_peer_that_takes_nothing_is_dropped(is_closed: bool) -> None:
    peer = Peer().sends(OPEN)
    peer.of.pause_writing()
    if is_closed:
        peer.of.go_away()
    peer.connections.sweep(100.0 + under_test.MAX_STUCK_S)
    assert peer.transport.state != "aborted"
    peer.connections.sweep(100.1 + under_test.MAX_STUCK_S)
    assert peer.transport.state == "aborted"


def test_other_work_of_the_loop_comes_between() -> None:
    """However much arrives at once, it is read in turns."""
    peer = Peer()
    data = b"".join(frame(HEADERS, END_HEADERS, 2 * n + 1, head()) for n in range(1500))
    peer.of.data_received(data)
    assert peer.later, "the rest is put off"
    assert not peer.transport.reads
    assert len(peer.handlers) < 1500
    peer.sends(frame(PING, 0, 0, b"12345678"))
    assert len(peer.handlers) == 1500
    assert peer.transport.reads


def test_a_drain_resets_what_is_open() -> None:
    peer = Peer().sends(OPEN)
    peer.of.go_away()
    kinds = [kind for kind, _, _, _ in peer.frames()]
    assert kinds[-2:] == [RESET, GOAWAY]
    assert peer.was_closed()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10), st.integers(0, 255), st.integers(0, 9), st.binary(max_size=60)
        ),
        max_size=30,
    )
)
def test_any_frames_are_answered_or_close_the_connection(
    frames: Iterable[tuple[int, int, int, bytes]],
) -> None:
    peer = Peer().sends(OPEN)
    for each in frames:
        peer.sends(frame(*each))
    peer.was_closed()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 200), st.binary(max_size=6))
def test_damaged_frames_too(more: bytes, at: int, damage: bytes) -> None:
    data = bytearray(OPEN + frame(DATA, 0, 1, message(b"x" * 50)) + more)
    data[at : at + len(damage)] = damage
    peer = Peer().sends(bytes(data))
    peer.was_closed()
