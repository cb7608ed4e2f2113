"""Bodies of answers that pass through: where they end, whatever pieces they come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.http.body import ChunkedBody, SizedBody, UnboundedBody

SIZES = st.lists(st.integers(1, 40), max_size=12)


def passed(body: UnboundedBody, data: bytes, cuts: list[int]) -> tuple[int, bytes]:
    """How much of `data` belonged to the body, fed in pieces, and its payload."""
    payload: list[bytes] = []
    at = taken = 0
    for cut in [*cuts, len(data)]:
        piece = data[at : at + cut]
        at += len(piece)
        if not piece or body.is_done or body.error is not None:
            continue
        taken += body.read(piece, 0, payload)
    return taken, b"".join(payload)


def chunked(pieces: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = [b"%x%b\r\n%b\r\n" % (len(each), extension, each) for each in pieces]
    return b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


@given(
    st.lists(st.binary(min_size=1, max_size=30), max_size=8),
    st.binary(max_size=5),
    SIZES,
    st.sampled_from([b"", b";a=b"]),
    st.sampled_from([b"", b"x: y\r\n"]),
)
def test_chunks_end_where_they_say(
    pieces: list[bytes], rest: bytes, cuts: list[int], extension: bytes, trailer: bytes
) -> None:
    body = chunked(pieces, extension, trailer)
    relay = ChunkedBody()
    taken, payload = passed(relay, body + rest, cuts)
    assert relay.is_done
    assert relay.error is None
    assert (taken, payload) == (len(body), b"".join(pieces))


@pytest.mark.parametrize("cut", [1, 4])
def test_many_chunks_after_a_cut_one_are_all_passed(cut: int) -> None:
    body = chunked([b"x"] * 2_000)
    assert passed(ChunkedBody(), body, [cut]) == (len(body), b"x" * 2_000)


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1), SIZES)
def test_chunks_that_are_cut_short_have_no_end(pieces: list[bytes], cuts: list[int]) -> None:
    relay = ChunkedBody()
    passed(relay, chunked(pieces)[:-1], cuts)
    assert not relay.is_done


@pytest.mark.parametrize("body", [b"x\r\n", b"3\r\nabcd\r\n", b"3\nabc\r\n", b"-1\r\n", b"\r\n"])
def test_what_are_no_chunks_is_an_error(body: bytes) -> None:
    relay = ChunkedBody()
    relay.read(body, 0, None)
    assert relay.error is not None


@given(st.binary(max_size=60), st.binary(max_size=9), SIZES)
def test_a_length_is_where_it_ends(body: bytes, rest: bytes, cuts: list[int]) -> None:
    relay = SizedBody(len(body))
    assert passed(relay, body + rest, cuts) == (len(body), body)
    assert relay.is_done


@given(st.binary(max_size=60), SIZES)
def test_without_either_all_belongs_to_it(body: bytes, cuts: list[int]) -> None:
    relay = UnboundedBody()
    assert passed(relay, body, cuts) == (len(body), body)
    assert not relay.is_done


def test_a_whole_piece_is_passed_on_as_it_is() -> None:
    data = b"x" * 100
    payload: list[bytes] = []
    SizedBody(200).read(data, 0, payload)
    assert payload[0] is data


@pytest.mark.parametrize(
    ("relay", "body", "rest"),
    [
        (SizedBody(5), b"hello", b"rest"),
        (SizedBody(0), b"", b"rest"),
        (ChunkedBody(), chunked([b"he", b"llo"]), b"rest"),
        (UnboundedBody(), b"hello", b""),
    ],
    ids=["sized", "empty", "chunked", "unbounded"],
)
def test_a_body_whose_payload_nobody_wants_ends_where_it_says(
    relay: UnboundedBody, body: bytes, rest: bytes
) -> None:
    assert relay.read(body + rest, 0, None) == len(body)
    assert relay.is_done == bool(rest)
