"""Header lines on their way through."""

import sys
from pathlib import Path
from time import monotonic

import pytest

from lean_selector.api.access import AccessTokens
from lean_selector.core.errors import BadRequest
from lean_selector.core.selection.prompt import Prompt
from lean_selector.gateway.headers import (
    QueueHeaders,
    answer_lines,
    request_id_of,
    request_lines,
    retry_after,
    wants_websocket,
)
from lean_selector.gateway.prompts import Routed
from lean_selector.http.head import digest_of


def test_a_client_is_told_to_come_again_within_a_minute() -> None:
    lines = [b"retry-after: %d\r\n" % seconds for seconds in (1, 1, 2, 60)]
    assert list(map(retry_after, (0.0, 1.0, 1.1, 1e6))) == lines


def section(*lines: str) -> bytes:
    return "\r\n".join(["1.1", *lines, "", ""]).encode()


def test_what_belongs_to_one_connection_is_not_sent_on() -> None:
    text = section(
        "Host: a",
        "Connection: keep-alive, X-Secret ,close",
        "X-Secret: 1",
        "Keep-Alive: timeout=5",
        "Transfer-Encoding: chunked",
        "Expect: 100-continue",
        "Accept: a, b",
        "TE: trailers",
        "X-Request-ID: mine",
        "Upgrade: h2c",
        "Content-Length: 5",
        "Authorization: Bearer x",
        "Accept-Encoding: gzip",
        "X-Hostess: b",
    )
    kept = b"\r\nAccept: a, b"
    auth, codings, last = (
        b"\r\nAuthorization: Bearer x",
        b"\r\nAccept-Encoding: gzip",
        b"\r\nX-Hostess: b",
    )
    assert request_lines(text) == kept + auth + codings + last
    assert request_lines(text, without_codings=True) == kept + auth + last
    assert request_lines(text, drops_authorization=True) == kept + codings + last
    assert request_id_of(text) == b"mine"


def test_each_connection_line_names_fields() -> None:
    lines = section("connection: keep-alive", "a: b", "Connection: X-Secret", "x-secret: 1")
    assert request_lines(lines) == b"\r\na: b"
    told = b"\r\nconnection: close\r\nx-secret: 1\r\nconnection: x-secret\r\na: b"
    assert answer_lines(told) == b"\r\na: b"


def test_a_connection_line_takes_nothing_away_that_describes_the_body() -> None:
    lines = b"\r\nConnection: Content-Length, content-encoding, a\r\ncontent-length: 3\r\na: b"
    assert answer_lines(lines) == b"\r\ncontent-length: 3"
    assert answer_lines(lines, without_length=True) == b""
    text = section(
        "connection: content-type", "content-type: application/json", "content-length: 3"
    )
    assert request_lines(text) == b"\r\ncontent-type: application/json"


def test_thousands_of_named_fields_cost_no_more_than_a_look_at_each() -> None:
    """Each was a regular expression of its own, compiled anew."""
    names = [f"x-{number}" for number in range(4000)]
    text = section("a: b", "connection: " + ",".join(names), *(f"{name}: 1" for name in names))
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        lines = request_lines(text)
    finally:
        sys.setprofile(None)
    assert lines == b"\r\na: b"
    assert calls < 10 * len(names)


def test_the_first_and_the_last_line_are_lines_like_others() -> None:
    assert request_lines(section("te: x", "a: b", "connection: close")) == b"\r\na: b"
    assert request_lines(section("host: x")) == b""


def test_a_request_id_is_one_word_or_none() -> None:
    assert request_id_of(section("x-request-id: two words")) is None
    assert request_id_of(section("x-request-id: " + "a" * 201)) is None
    assert request_id_of(section("a: b")) is None


ONE, OTHER = digest_of(b"one"), digest_of(b"other")


@pytest.fixture
def tokens(tmp_path: Path) -> AccessTokens:
    path = tmp_path / "tokens"
    path.write_bytes(b"write one a max-priority=high\nwrite other\n")
    return AccessTokens(str(path))


def read(
    lines: bytes,
    tokens: AccessTokens | None,
    credential: bytes | None = None,
    *,
    priority: int = 0,
    trusts: bool = False,
    by_name: bool = True,
) -> Routed:
    prompt = Prompt(16, b"", 0, b"", bytes)
    routed = Routed("m", "default", prompt, b"", why_not=None, streams=False)
    routed.strict_priority = priority
    headers = QueueHeaders("X-Team", "x-lean-priority", tokens, trusts=trusts, by_name=by_name)
    headers.read(routed, b"1.1\r\nhost: x\r\n%b\r\naccept: y\r\n\r\n" % lines, credential)
    return routed


def test_a_request_is_that_of_its_token_s_name_or_else_of_the_header(tokens: AccessTokens) -> None:
    for line, credential, whose in (
        (b"x-team: b", ONE, "a"),  # no client takes another's share
        *((b"x-team: b", OTHER, "b"), (b"X-TEAM:\tb ", None, "b"), (b"x-team: b c", None, "")),
        *((b"x-team: " + b"b" * 257, None, ""), (b"x-team:", None, ""), (b"x-x-team: b", None, "")),
    ):
        assert read(line, tokens, credential).fairness_id == whose, line
    assert read(b"x-team: b", tokens, ONE, by_name=False).fairness_id == "b"


def test_who_is_urgent_needs_the_right_to_it_and_anybody_can_wait(tokens: AccessTokens) -> None:
    for line, body, asked in (
        (b"x-lean-priority: high", 0, 1),
        (b"X-Lean-Priority:HIGH\t", -1, 1),  # the header comes before the body
        *((b"x-lean-priority: normal", 1, 0), (b"x-lean-priority: low", 1, -1)),
        *((b"x-team: b", 1, 1), (b"x-team: b", -1, -1)),
    ):
        for known, credential, trusts, most in (
            *((tokens, ONE, False, 1), (tokens, OTHER, False, 0), (tokens, None, False, 0)),
            *((None, None, False, 0), (None, None, True, 1)),
        ):
            routed = read(line, known, credential, priority=body, trusts=trusts)
            assert routed.strict_priority == min(asked, most), (line, credential)


@pytest.mark.parametrize("value", [b"urgent", b"", b"1", b"high, low"])
def test_a_priority_that_is_none_is_refused_by_its_header(value: bytes) -> None:
    with pytest.raises(BadRequest, match="x-lean-priority"):
        read(b"x-lean-priority: %b" % value, None)


def test_a_deadline_is_so_many_seconds_from_now() -> None:
    for text, seconds in ((b"30", 30.0), (b"0.25", 0.25), (b"0", 0.0), (b"999999.9\t", 999_999.9)):
        before = monotonic()
        deadline = read(b"X-Request-Timeout-Secs: " + text, None).deadline
        assert deadline is not None
        assert before + seconds <= deadline <= monotonic() + seconds
    assert read(b"x-team: b", None).deadline is None
    for text in (b"", b"soon", b"-1", b"1e3", b"inf", b"1.", b".5", b"1000000", b"1, 2"):
        with pytest.raises(BadRequest, match="x-request-timeout-secs"):
            read(b"x-request-timeout-secs: " + text, None)


def test_a_websocket_is_told_from_other_upgrades() -> None:
    assert wants_websocket(section("Connection: Upgrade", "Upgrade: WebSocket"))
    assert not wants_websocket(section("Upgrade: h2c", "x: websocket"))


def test_what_an_answer_s_connection_says_is_not_sent_on() -> None:
    own = b"\r\nX-Lean-Worker: fake\r\nx-lean-prompt: fake\r\nx-request-id: y"
    lines = b"\r\nDate: x\r\nConnection: close" + own
    assert answer_lines(lines) == b"\r\nDate: x"
    lines = b"\r\ncontent-length: 3\r\na: b\r\ntransfer-encoding: chunked"
    assert answer_lines(lines) == b"\r\ncontent-length: 3\r\na: b"
    assert answer_lines(lines, without_length=True) == b"\r\na: b"
