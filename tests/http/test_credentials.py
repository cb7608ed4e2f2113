"""The credentials of requests: known again on their connection, and kept nowhere but as digests."""

import random

import pytest

from lean_selector.http.head import UNUSABLE, HeaderBlocks, Limits, Request, digest_of
from lean_selector.http.reader import RequestReader

TOKEN = b"s3cret-t0ken"
DIGEST = digest_of(TOKEN)


def head(*lines: bytes) -> bytes:
    return b"GET /a HTTP/1.1\r\n" + b"".join(line + b"\r\n" for line in (b"host: x", *lines, b""))


def read_one(reader: RequestReader, data: bytes) -> Request:
    (request,) = reader.feed(data)
    return request


def kept_by(blocks: HeaderBlocks) -> bytes:
    """All that the memory of judged sections holds."""
    parts: list[bytes] = []
    for key, block in blocks.items():
        parts += [key] if isinstance(key, bytes) else key
        for holder in (block, block.frame):  # a compiled one has no __slots__
            values = [getattr(holder, name) for name in dir(holder)]
            parts += [value for value in values if isinstance(value, bytes)]
    return b"|".join(parts)


@pytest.mark.parametrize(
    ("line", "credential"),
    [
        pytest.param(b"authorization: Bearer " + TOKEN, DIGEST, id="as usual"),
        pytest.param(b"Authorization: Bearer " + TOKEN, DIGEST, id="a capital"),
        pytest.param(b"AUTHORIZATION: BEARER " + TOKEN, DIGEST, id="capitals"),
        pytest.param(b"authorization:bearer " + TOKEN, DIGEST, id="without a blank"),
        pytest.param(b"authorization: \t Bearer   " + TOKEN + b" \t", DIGEST, id="blanks"),
        pytest.param(b"authorization: Bearer " + TOKEN + b"x", digest_of(TOKEN + b"x"), id="other"),
        pytest.param(b"authorization: Basic " + TOKEN, UNUSABLE, id="another scheme"),
        pytest.param(b"authorization: Bearer" + TOKEN, UNUSABLE, id="no blank in it"),
        pytest.param(b"authorization: " + TOKEN, UNUSABLE, id="no scheme"),
        pytest.param(b"authorization:", UNUSABLE, id="empty"),
        pytest.param(b"authorization: Bearer", digest_of(b""), id="no token"),
        pytest.param(b"x-authorization: Bearer " + TOKEN, None, id="another name before"),
        pytest.param(b"authorization-x: Bearer " + TOKEN, None, id="another name behind"),
        pytest.param(b"proxy-authorization: Bearer " + TOKEN, None, id="a proxy's"),
        pytest.param(b"x: authorization: Bearer " + TOKEN, None, id="in a value"),
    ],
)
def test_what_a_line_says_it_says_each_time(line: bytes, credential: bytes | None) -> None:
    reader = RequestReader(Limits())
    for _ in range(3):
        assert read_one(reader, head(b"a: b", line)).credential == credential
    assert reader.error is None


@pytest.mark.parametrize("name", [b"authorization", b"Authorization", b"AUTHORIZATION"])
@pytest.mark.parametrize(
    "around",
    [(b"", b""), (b"traceparent: 00-a-b-01", b"content-length: 0"), (b"a: b", b"a: c")],
    ids=["alone", "among lines that vary", "among others"],
)
def test_nothing_that_is_remembered_holds_a_credential(
    name: bytes, around: tuple[bytes, bytes]
) -> None:
    blocks: HeaderBlocks = {}
    reader = RequestReader(Limits(), blocks)
    for number in range(3):
        token = b"%b-%d" % (TOKEN, number % 2)
        lines = [each for each in (around[0], name + b": Bearer " + token, around[1]) if each]
        assert read_one(reader, head(*lines)).credential == digest_of(token)
        reader.feed(head(*lines, b"authorization: Basic " + TOKEN))
    for length in range(300):  # where lengths vary, what stands around them is known
        varying = b"content-length: %d" % length
        asked = head(varying, name + b": Bearer " + TOKEN) + bytes(length)
        assert read_one(reader, asked).credential == DIGEST
    assert blocks  # something is remembered
    assert TOKEN not in kept_by(blocks)
    assert b"uthorization" not in kept_by(blocks).replace(b"A", b"a")


def test_a_section_is_judged_once_whoever_sends_it() -> None:
    blocks: HeaderBlocks = {}
    mine, yours = RequestReader(Limits(), blocks), RequestReader(Limits(), blocks)
    first = read_one(mine, head(b"authorization: Bearer mine", b"a: b"))
    second = read_one(yours, head(b"authorization: Bearer yours", b"a: b"))
    assert first.headers is second.headers
    assert (first.credential, second.credential) == (digest_of(b"mine"), digest_of(b"yours"))
    assert len(blocks) == 1


KINDS = (
    *((b"authorization: Bearer a", digest_of(b"a")), (b"authorization: Bearer b", digest_of(b"b"))),
    *((b"Authorization: Bearer a", digest_of(b"a")), (b"authorization: Bearer", digest_of(b""))),
    *((b"authorization: Basic a", UNUSABLE), (b"", None)),
)


@pytest.mark.parametrize("kinds", [3, 100], ids=["few kinds", "more than are remembered"])
def test_a_connection_says_what_each_section_says_alone(kinds: int) -> None:
    drawn = random.Random(kinds)
    reader = RequestReader(Limits())
    for _ in range(1_000):
        size, kind = 10 ** drawn.randrange(3), drawn.randrange(kinds)
        lines = [b"content-length: %d" % size, b"content-type: a/%d" % kind]
        line, credential = drawn.choice((*KINDS, KINDS[0], KINDS[0]))
        if line:
            lines.insert(drawn.randrange(3), line)
        data = head(*lines) + bytes(size)
        alone = read_one(RequestReader(Limits()), data)
        request = read_one(reader, data)
        assert request.credential == alone.credential == credential
        assert (request.body, request.headers.content_type) == (bytes(size), b"a/%d" % kind)


@pytest.mark.parametrize("known", [False, True], ids=["at once", "behind one that is known"])
@pytest.mark.parametrize("first", [b"authorization", b"AUTHORIZATION"])
def test_two_credentials_are_none(known: bool, first: bytes) -> None:
    """Whoever stands before us may have looked at the other one."""
    blocks: HeaderBlocks = {}
    reader = RequestReader(Limits(), blocks)
    line = first + b": Bearer " + TOKEN
    if known:
        assert read_one(reader, head(line)).credential == DIGEST
    for _ in range(3):
        for second in (line, b"authorization: Bearer other", b"Authorization:"):
            for lines in ((line, second), (second, line), (line, b"a: b", second)):
                assert read_one(reader, head(*lines)).credential == UNUSABLE
    assert read_one(reader, head(line)).credential == DIGEST
    assert TOKEN not in kept_by(blocks)


def test_a_credential_in_parts_of_a_head_is_read_as_one() -> None:
    reader = RequestReader(Limits())
    data = head(b"authorization: Bearer " + TOKEN)
    for _ in range(2):
        for cut in range(1, len(data)):
            assert reader.feed(data[:cut]) == []
            assert read_one(reader, data[cut:]).credential == DIGEST
