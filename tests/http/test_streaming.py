"""Answers in pieces on one connection, driven by hand: no socket, no loop."""

from functools import partial

import pytest

from lean_selector.http.head import Request
from lean_selector.http.response import PendingReply, encode_response
from lean_selector.http.streaming import StreamedReply, StreamingProtocol
from tests.http.test_protocol import Client

GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n"
OLD_STREAM = STREAM.replace(b"1.1", b"1.0")
HEAD = b"HTTP/1.1 200 OK\r\n"


class Driven(Client):
    """A connection whose app streams what the test says."""

    def __init__(self, data: bytes) -> None:
        super().__init__(kind=StreamingProtocol)
        self.streams: list[StreamedReply] = []
        self.told: list[str] = []
        self.send(data)

    def app(self, request: Request) -> bytes | PendingReply:
        if request.path == b"/stream":
            ends = [partial(self.told.append, each) for each in ("hung up", "pause", "resume")]
            self.streams.append(StreamedReply(*ends))
            return self.streams[-1]
        return super().app(request)


def test_pieces_go_out_as_they_come_and_the_connection_stays() -> None:
    driven = Driven(STREAM)
    stream = driven.streams[0]
    assert driven.transport.take() == b""
    assert stream.begin() == b""
    stream.write(HEAD)
    assert driven.transport.take() == HEAD
    stream.write(b"\r\nabc")
    stream.finish()
    assert driven.transport.take() == b"\r\nabc"
    assert driven.send(GET).endswith(b'"/a"')
    assert driven.told == []


def test_what_comes_behind_a_stream_is_answered_behind_it() -> None:
    driven = Driven(STREAM + GET)
    stream = driven.streams[0]
    stream.begin()
    stream.write(HEAD)
    assert driven.transport.take() == HEAD
    stream.finish()
    assert driven.run_soon().endswith(b'"/a"')


def test_a_whole_answer_may_still_be_given_in_place_of_a_stream() -> None:
    driven = Driven(STREAM)
    driven.streams[0].resolve(encode_response(503, b"{}"))
    assert driven.transport.take().startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize(
    ("request_bytes", "why", "line"),
    [
        (STREAM, "", b""),
        (STREAM.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), "", b"close"),
        (OLD_STREAM, "", b"close"),
        (OLD_STREAM.replace(b"\r\n\r\n", b"\r\nconnection: keep-alive\r\n\r\n"), "", b"keep-alive"),
        (STREAM, "only its connection frames it", b"close"),
        (STREAM, "the server drains", b"close"),
    ],
)
def test_the_head_says_whether_the_connection_stays(
    request_bytes: bytes, why: str, line: bytes
) -> None:
    driven = Driven(request_bytes)
    stream = driven.streams[0]
    if "drains" in why:
        driven.connections.start_draining()
    begun = stream.begin(closes="only" in why)
    assert begun == (b"connection: %b\r\n" % line if line else b"")
    stream.write(HEAD)
    assert driven.transport.state == "open"
    stream.finish()
    assert (driven.transport.state == "open") == (line != b"close")


def test_a_client_that_takes_nothing_is_waited_for() -> None:
    driven = Driven(STREAM)
    stream = driven.streams[0]
    stream.begin()
    driven.transport.high_water = 10
    stream.write(b"x" * 20)
    assert driven.told == ["pause"]
    assert stream.is_paused
    driven.transport.unsent, driven.transport.high_water = 0, None
    driven.protocol.resume_writing()
    assert driven.told == ["pause", "resume"]
    assert not stream.is_paused


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_hang_up_is_told_once(begun: bool, half: bool) -> None:
    driven = Driven(STREAM)
    if begun:
        driven.streams[0].begin()
        driven.streams[0].write(HEAD)
    if half:
        assert not driven.protocol.eof_received()
    driven.protocol.connection_lost(None)
    assert driven.told == ["hung up"]


def test_after_its_end_nobody_is_told_of_a_hang_up() -> None:
    driven = Driven(STREAM)
    driven.streams[0].begin()
    driven.streams[0].finish()
    driven.protocol.connection_lost(None)
    assert driven.told == []


def test_a_stream_that_breaks_off_is_closed_and_one_without_framing_is_reset() -> None:
    driven = Driven(STREAM)
    driven.streams[0].begin()
    driven.streams[0].write(HEAD)
    driven.streams[0].break_off()
    assert driven.transport.state == "closed"
    driven = Driven(STREAM)
    driven.streams[0].begin(closes=True)
    driven.streams[0].break_off()
    assert driven.transport.state == "aborted"


def test_in_the_middle_of_a_stream_nobody_is_turned_away_with_an_answer() -> None:
    driven = Driven(STREAM)
    driven.streams[0].begin()
    driven.streams[0].write(HEAD)
    driven.protocol.turn_away("too much")
    assert driven.transport.take() == HEAD
    assert driven.transport.state == "aborted"
    driven = Driven(STREAM)
    driven.protocol.turn_away("too much")
    assert driven.transport.take().startswith(b"HTTP/1.1 503")
    assert driven.told == ["hung up"]


def test_a_stream_that_the_connection_has_left_is_ended_and_paused_by_nobody() -> None:
    for end in ("finish", "break_off"):
        stream = StreamedReply(lambda: None)
        getattr(stream, end)()
        paused = []
        for turn in (stream.pause, stream.resume):
            turn()
            paused.append(stream.is_paused)
        assert paused == [True, False]
        with pytest.raises(AssertionError):
            stream.write(b"too late")
