"""The engine's side: the request, its stream of chunks, the words of its errors."""

import json
from typing import Any

import pytest

from lean_selector.client.completions import (
    MAX_EVENT_BYTES,
    CompletionStream,
    MalformedStream,
    completion_body,
    error_text,
)
from lean_selector.client.transport import OpenStream


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://w:8000", "http://w:8000/v1/completions"),
        ("http://w:8000/", "http://w:8000/v1/completions"),
        ("https://w/prefix/v1/", "https://w/prefix/v1/completions"),
        ("w:8000", "http://w:8000/v1/completions"),
        ("http://v1", "http://v1/v1/completions"),
    ],
)
def test_the_completions_url_follows_from_the_endpoint(endpoint: str, url: str) -> None:
    assert OpenStream(1, endpoint, b"", {}).url == url


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": "no workers"}', "no workers"),
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"message": "busy", "type": "x", "code": 503}', "busy"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<h1>gone</h1>", "<h1>gone</h1>"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
        (b"", "no reason given"),
    ],
)
def test_the_words_of_an_error_are_found_in_every_shape(body: bytes, text: str) -> None:
    assert error_text(body) == text


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\r\n\r\n"


def test_a_stream_cut_anywhere_gives_the_same_chunks() -> None:
    text = (
        b": a comment\n\nevent: message\n"
        + event(choices=[{"index": 0, "text": "a\u00e9", "token_ids": [1, 2]}])
        + event(choices=[{"index": 1, "text": "", "finish_reason": "stop"}], usage=None)
        + event(choices=[], usage={"completion_tokens": 5})
        + b"data: [DONE]\n\n"
    )
    expected = [
        {"index": 0, "text": "a\u00e9", "token_ids": [1, 2]},
        {"index": 1, "text": "", "finish_reason": "stop"},
        {"usage": {"completion_tokens": 5}},
    ]
    for cut in range(len(text)):
        stream = CompletionStream()
        assert [*stream.feed(text[:cut]), *stream.feed(text[cut:])] == expected
        assert (stream.state, stream.output_tokens) == ("done", 5)


def test_tokens_are_counted_by_ids_then_usage_then_text() -> None:
    stream = CompletionStream()
    list(stream.feed(event(choices=[{"text": "ab", "token_ids": [1, 2, 3]}])))
    assert stream.output_tokens == 3
    list(stream.feed(event(choices=[{"text": "c"}])))
    assert stream.output_tokens == 4
    chunks = list(stream.feed(event(choices=[{"text": "d"}], usage={"completion_tokens": 9})))
    assert chunks == [{"index": 0, "text": "d", "usage": {"completion_tokens": 9}}]
    assert stream.output_tokens == 9
    list(stream.feed(event(usage={"completion_tokens": None})))
    assert stream.output_tokens == 9


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"data: {\n", "not a completion", id="cut json"),
        pytest.param(b'data: {"choices": 1}\n', "not a completion", id="wrong shape"),
        pytest.param(b'data: "\xff"\n', "not a completion", id="not utf-8"),
        pytest.param(event(error={"message": "oom"}), "the engine reports oom", id="an error"),
        pytest.param(b"x" * (MAX_EVENT_BYTES + 1), "an event has more", id="endless line"),
    ],
)
def test_what_is_no_stream_of_completions_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedStream, match=reason):
        list(CompletionStream().feed(data))


def test_nothing_is_read_behind_the_end_of_a_stream() -> None:
    stream = CompletionStream()
    token = b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n'
    assert len(list(stream.feed(token + b"data: [DONE]\n\n" + token + b"data: what"))) == 1
    assert list(stream.feed(b" is this\n\n" + token)) == []
    assert (stream.state, stream.output_tokens) == ("done", 1)


def test_what_is_not_wanted_is_left_out_of_the_request() -> None:
    body = json.loads(completion_body([1], "m", cache_salt="", return_token_ids=False))
    assert set(body) == {"model", "prompt", "stream", "stream_options"}
