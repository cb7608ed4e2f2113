"""The subset of ZMTP 3.0 that we speak: golden bytes, and bytes cut anywhere."""

import contextlib
import itertools
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.sockets import zmtp
from lean_selector.sockets.zmtp import Decoder, Message, ProtocolError

PEER = zmtp.GREETING + zmtp.ready(b"PUB")
MAX = 100_000


def fed(*chunks: bytes, socket_type: bytes = b"SUB") -> tuple[Decoder, list[Message]]:
    heard: list[Message] = []
    decoder = Decoder(socket_type, heard.append, MAX)
    for chunk in chunks:
        decoder.feed(chunk)
    return decoder, heard


def test_what_we_send_first_is_as_the_rfc_has_it() -> None:
    decoder, _ = fed()
    assert decoder.reply == (
        b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL" + bytes(48) + b"\x04\x19\x05READY\x0bSocket-Type"
        b"\0\0\0\x03SUB"
    )
    assert zmtp.subscription(b"kv") == b"\0\x03\x01kv"
    assert (
        zmtp.message(b"", b"x" * 256) == b"\x01\0" + b"\x02" + struct.pack(">Q", 256) + b"x" * 256
    )


messages = st.lists(
    st.lists(
        st.one_of(st.binary(max_size=20), st.integers(250, 40_000).map(lambda n: b"z" * n)),
        min_size=1,
        max_size=3,
    ),
    max_size=6,
)


@given(messages, st.randoms(use_true_random=False))
def test_messages_come_out_whole_however_the_bytes_were_cut(
    sent: list[Message], dice: random.Random
) -> None:
    stream = PEER + b"".join(zmtp.message(*frames) for frames in sent)
    cuts = sorted({0, len(stream), *(dice.randrange(len(stream)) for _ in range(12))})
    chunks = [stream[a:b] for a, b in itertools.pairwise(cuts)]
    decoder, heard = fed(*chunks)
    assert decoder.is_ready
    assert heard == sent
    assert decoder.partial_bytes == 0


def test_a_handshake_byte_by_byte_is_one_too() -> None:
    decoder, heard = fed(*(bytes((byte,)) for byte in PEER + zmtp.message(b"a", b"b")))
    assert decoder.is_ready
    assert heard == [[b"a", b"b"]]


def test_a_frame_that_is_too_long_is_cut_off_and_the_next_is_whole() -> None:
    long = zmtp.message(b"t", bytes(3 * MAX)) + zmtp.message(b"next")
    for size in (1000, 70_000, len(long)):
        chunks = [long[at : at + size] for at in range(0, len(long), size)]
        _, heard = fed(PEER, *chunks)
        assert [len(frame) for frame in heard[0]] == [1, MAX + 1]
        assert heard[1:] == [[b"next"]]


def test_what_is_held_of_a_frame_that_is_not_whole_is_told() -> None:
    decoder, _ = fed(PEER, zmtp.message(b"", bytes(50_000))[:40_000])
    assert 39_000 < decoder.partial_bytes <= 40_000


def test_a_ping_is_answered_with_its_context() -> None:
    decoder, _ = fed(PEER)
    decoder.reply.clear()
    decoder.feed(b"\x04\x0a\x04PING\x00\x96abc")
    assert decoder.reply == b"\x04\x08\x04PONGabc"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak ZMQ"),
        (b"\xff" + bytes(8) + b"\x7f\x01" + bytes(60), "speaks ZMTP 1"),
        (PEER.replace(b"NULL\0\0\0\0\0", b"CURVE\0\0\0\0"), "security mechanism 'CURVE'"),
        (zmtp.GREETING + zmtp.ready(b"REP"), "it is a 'REP' socket, not PUB or XPUB"),
        (zmtp.GREETING + zmtp.frame(b"\x05READY", zmtp.COMMAND), "it is a '' socket"),
        (zmtp.GREETING + zmtp.frame(b"\x05READY\xff", zmtp.COMMAND), "a READY that is cut off"),
        (zmtp.GREETING + zmtp.frame(b"\x05ERROR\x04busy", zmtp.COMMAND), "refused.*'busy'"),
        (zmtp.GREETING + zmtp.message(b"x"), "a message before the handshake"),
        (zmtp.GREETING + zmtp.message(b"x", b"y"), "a message before the handshake"),
        (zmtp.GREETING + zmtp.message(bytes(MAX)), "a message before the handshake"),
        (PEER + b"\x08\0", "frame flags 0x8"),
        (PEER + b"\x05\0", "frame flags 0x5"),
        (PEER + b"\x06" + struct.pack(">Q", 1 << 40), "command of"),
        (PEER + zmtp.message(*[b""] * 300), "message of more than 256 frames"),
        (PEER + zmtp.message(*[bytes(90_000)] * 3), "message of more than 270000 bytes"),
    ],
)
def test_who_does_not_speak_as_we_do_is_told_apart(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        fed(data)
    with pytest.raises(ProtocolError, match=text):
        fed(*(data[at : at + 100] for at in range(0, len(data), 100)))


def test_an_unknown_command_and_an_empty_one_change_nothing() -> None:
    _, heard = fed(PEER, b"\x04\0", b"\x04\x04\x03WHY", zmtp.message(b"a"))
    assert heard == [[b"a"]]


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for start in (b"", zmtp.GREETING, PEER):
        with contextlib.suppress(ProtocolError):
            fed(start, data)
