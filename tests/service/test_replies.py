"""Answers go out in the form that their request accepts."""

import msgspec
import pytest

from lean_selector.core.errors import Unavailable
from lean_selector.http.head import Request
from lean_selector.http.response import GrowingResponse, date_header, encode_response
from lean_selector.service.replies import (
    MSGPACK,
    LaterReply,
    Reply,
    Standing,
    error_reply,
    reply,
    sent,
)
from lean_selector.wire.answer_forms import LONGEST_TRANSCODED, JsonText
from tests.support.gates import request


def asking(accept: bytes | None) -> Request:
    return request("GET", "/", accept=accept)


def parts(answer: object) -> tuple[bytes, bytes, bytes]:
    """Status, content type and body of a finished answer, whose length is what it says."""
    assert isinstance(answer, (bytes, bytearray))
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    fields = dict(line.split(b":", 1) for line in head.split(b"\r\n")[1:])
    assert int(fields[b"content-length"]) == len(body)
    return head[9:12], fields[b"content-type"].strip(), body


PACKED = b"\x81\xa1a\x01"


@pytest.mark.parametrize("accept", [None, b"", b"*/*", b"application/json"])
def test_an_answer_is_json_unless_messagepack_is_asked_for(accept: bytes | None) -> None:
    assert parts(reply(asking(accept), 201, {"a": 1})) == (b"201", b"application/json", b'{"a":1}')
    assert sent(asking(accept), 201, {"a": 1}) == reply(asking(accept), 201, {"a": 1})


@pytest.mark.parametrize("accept", [MSGPACK, b"application/json;q=0.5, Application/MsgPack"])
def test_an_answer_is_messagepack_for_those_who_name_it(accept: bytes) -> None:
    assert parts(reply(asking(accept), 201, {"a": 1})) == (b"201", MSGPACK, PACKED)
    assert sent(asking(accept), 201, {"a": 1}) == reply(asking(accept), 201, {"a": 1})


def test_errors_are_in_the_same_form_and_keep_their_header_lines() -> None:
    answer = error_reply(asking(MSGPACK), 405, "no", b"allow: GET\r\n")
    assert b"\r\nallow: GET\r\n" in answer
    assert parts(answer) == (b"405", MSGPACK, msgspec.msgpack.encode({"error": "no"}))


@pytest.mark.parametrize("accept", [None, MSGPACK])
def test_a_handler_may_choose_its_status(accept: bytes | None) -> None:
    assert sent(asking(accept), 200, Reply(503, [])) == reply(asking(accept), 503, [])


@pytest.mark.parametrize("accept", [None, b"*/*", MSGPACK])
def test_a_standing_answer_says_what_its_body_would(accept: bytes | None) -> None:
    standing = Standing({"a": 1})
    for status in (200, 201, 200):
        assert sent(asking(accept), status, standing) == reply(asking(accept), status, {"a": 1})
    chosen = sent(asking(accept), 200, Reply(201, standing))
    assert chosen == reply(asking(accept), 201, {"a": 1})


def test_a_standing_answer_is_made_once_for_each_date() -> None:
    standing = Standing({"a": 1})
    date_header.set(1.0)
    made = sent(asking(None), 200, standing)
    assert sent(asking(None), 200, standing) is made
    date_header.set(2.0)
    later = sent(asking(None), 200, standing)
    assert isinstance(made, bytes)
    assert b"00:00:01 GMT" in made
    assert later == made.replace(b"00:00:01 GMT", b"00:00:02 GMT")


def test_a_finished_answer_is_sent_as_it_is_or_transcoded() -> None:
    made = encode_response(200, b'{"a":1}')
    assert sent(asking(None), 200, made) is made
    assert parts(sent(asking(MSGPACK), 200, made)) == (b"200", MSGPACK, PACKED)


def test_what_has_no_messagepack_form_is_sent_as_it_is() -> None:
    text = encode_response(200, b"up 1\n", b"text/plain")
    empty = encode_response(200, b"", b"")
    long = encode_response(200, b'"' + b"x" * LONGEST_TRANSCODED + b'"')
    for made in (text, empty, long):
        assert sent(asking(MSGPACK), 200, made) is made
    kept = JsonText(b'"' + b"x" * LONGEST_TRANSCODED + b'"')
    assert parts(sent(asking(MSGPACK), 200, kept)) == (b"200", b"application/json", kept.text)


@pytest.mark.parametrize("accept", [None, MSGPACK])
def test_an_answer_that_comes_later_has_the_form_of_one_that_comes_at_once(
    accept: bytes | None,
) -> None:
    later = LaterReply()
    assert sent(asking(accept), 200, later) is later
    later.answer(404, {"a": 1})
    assert later.response == reply(asking(accept), 404, {"a": 1})


def test_one_response_may_be_shared_by_those_who_accept_either_form() -> None:
    plain, packed = LaterReply(), LaterReply()
    sent(asking(None), 200, plain)
    sent(asking(MSGPACK), 200, packed)
    growing = GrowingResponse()
    for part in (b'{"a"', b":1}"):
        growing.add(part)
    made = growing.finish()
    for each in (plain, packed):
        each.finish(made)
    assert plain.response is made
    assert parts(packed.response) == (b"200", MSGPACK, PACKED)


def test_what_goes_wrong_with_an_answer_is_not_the_matter_of_who_lets_it_go() -> None:
    def broken(found: object) -> object:
        raise RuntimeError("a bug")

    def refused(found: object) -> object:
        raise Unavailable("not here")

    def untaken(status: int, body: object) -> None:
        raise RuntimeError("a bug")

    answers = [LaterReply() for _ in range(4)]
    answers[0].answer_with(broken, 1)
    answers[1].answer_with(refused, 1)
    answers[2].take = untaken
    answers[2].answer(200, {})
    assert parts(answers[0].response)[::2] == (b"500", b'{"error":"internal error"}')
    assert parts(answers[1].response)[::2] == (b"503", b'{"error":"not here"}')
    assert answers[2].response == b""
    answers[3].refuse(RuntimeError("a bug"))
    assert parts(answers[3].response)[::2] == (b"500", b'{"error":"internal error"}')
