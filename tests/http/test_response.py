"""Golden bytes of responses."""

from collections.abc import Iterator

import pytest

from lean_selector.http.response import (
    GrowingResponse,
    date_header,
    encode_response,
    status_of,
    with_connection,
    without_body,
)

DATE = b"date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"  # the example of RFC 9110 section 5.6.7


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    date_header.set(784111777.9)
    yield
    date_header.set(0)


@pytest.mark.parametrize(
    ("arguments", "response"),
    [
        pytest.param(
            (200, b"{}"),
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + DATE
            + b"content-length: 2\r\n\r\n{}",
            id="json",
        ),
        pytest.param(
            (200, b"", b""),
            b"HTTP/1.1 200 OK\r\n" + DATE + b"content-length: 0\r\n\r\n",
            id="empty, without a content type",
        ),
        pytest.param(
            (405, b"", b"", b"allow: GET,HEAD\r\n"),
            b"HTTP/1.1 405 Method Not Allowed\r\n" + DATE
            + b"allow: GET,HEAD\r\ncontent-length: 0\r\n\r\n",
            id="extra header",
        ),
        pytest.param(
            (200, b"x" * 2000, b"text/plain"),
            b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n" + DATE
            + b"content-length: 2000\r\n\r\n" + b"x" * 2000,
            id="text, long",
        ),
    ],
)  # fmt: skip
def test_bytes_of_a_response(arguments: tuple[int, bytes], response: bytes) -> None:
    assert encode_response(*arguments) == response


def test_the_date_follows_the_clock_and_is_built_once_a_second() -> None:
    first = encode_response(200, b"{}")
    line = date_header.line
    date_header.set(784111777.0)
    assert date_header.line is line
    date_header.set(784111778.0)
    assert encode_response(200, b"{}") == first.replace(b"08:49:37", b"08:49:38")


def test_an_unknown_status_is_an_error_of_ours() -> None:
    with pytest.raises(KeyError):
        encode_response(299, b"{}")


@pytest.mark.parametrize("status", [200, 201, 404, 529])
def test_the_status_of_a_response_is_what_it_was_made_with(status: int) -> None:
    assert status_of(encode_response(status, b"{}")) == b"%d" % status


def test_head_gets_the_head_of_get() -> None:
    response = encode_response(200, b"a\r\n\r\nb")
    assert without_body(response) + b"a\r\n\r\nb" == response


def test_connection_comes_after_the_status_line() -> None:
    response = with_connection(encode_response(200, b"{}"), b"close")
    assert response.startswith(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: ")
    assert response.replace(b"connection: close\r\n", b"") == encode_response(200, b"{}")


def test_a_response_that_grows_says_at_its_end_how_long_it_is() -> None:
    growing = GrowingResponse()
    growing.add(b"{")
    growing.add(b"}" * 9)
    response = bytes(growing.finish())
    head, body = response.split(b"\r\n\r\n")
    assert body == b"{" + b"}" * 9
    assert b"content-length:" + b"10".rjust(20) in head.split(b"\r\n")
    assert status_of(response) == b"200"
