"""Answers on their way to the client: the ids are read, and the client sees none of them."""

import itertools
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.gateway.answers import Additions, AnswerReader
from lean_selector.gateway.model_request import MOST_ID_BYTES
from tests.gateway.talking_engine import stream, tokens_of, whole_answer

PROMPT = list(range(100, 160))
WORDS = ["Hello", " there", ' "token_ids":[1,2]', " \\", " end"]


class Learned:
    def __init__(self) -> None:
        self.prompt: list[int] | None = None
        self.output: list[int] = []
        self.times = 0

    def __call__(self, prompt: bytes | None, output: bytes) -> None:
        self.times += 1
        self.prompt = None if prompt is None else [int(each) for each in prompt.split(b",")]
        self.output = [int(each) for each in output.split(b",") if each]


def reader_of(
    streams: bool, on_ids: Learned | None = None, *, strips: bool = False, drops_usage: bool = False
) -> AnswerReader:
    added = Additions()
    added.on_ids, added.strips, added.drops_usage = on_ids, strips, drops_usage
    return added.reader(streams)


def read(
    pieces: list[bytes], streams: bool = False, strips: bool = True, drops_usage: bool = False
) -> tuple[bytes, Learned, AnswerReader]:
    learned = Learned()
    reader = reader_of(streams, learned, strips=strips, drops_usage=drops_usage)
    sent = b"".join(map(reader.feed, pieces)) + reader.end()
    return sent, learned, reader


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(address % (len(data) + 1) for address in places), len(data)]
    return [data[one:other] for one, other in itertools.pairwise(ends)]


PLACES = st.lists(st.integers(min_value=0), max_size=12)
OUTPUT = [token for word in WORDS for token in tokens_of(word)]


@given(PLACES, st.sampled_from([b"\n", b"\r\n"]), st.booleans(), st.booleans())
def test_a_stream_cut_anywhere_reads_as_if_nobody_had_asked_for_ids_and_usage(
    places: list[int], end: bytes, usage: bool, strips: bool
) -> None:
    """A client that asked for them itself gets every byte."""
    asked, plain = (
        b"".join(stream(PROMPT, WORDS, asked=each, usage=each and usage)).replace(b"\n", end)
        for each in (True, False)
    )
    sent, learned, reader = read(cut(asked, places), True, strips, usage and strips)
    assert sent == (plain if strips else asked)
    assert (learned.prompt, learned.output) == (PROMPT, OUTPUT)
    assert reader.usage.cached_tokens == (32 if usage else None)


@given(PLACES)
def test_a_whole_answer_cut_anywhere_reads_as_if_nobody_had_asked(places: list[int]) -> None:
    text, output = "".join(WORDS), [7, 8, 9]
    asked = whole_answer(PROMPT, text, output, asked=True)
    sent, learned, reader = read(cut(asked, places))
    assert sent == whole_answer(PROMPT, text, output, asked=False)
    assert (learned.prompt, learned.output) == (PROMPT, output)
    assert reader.usage.cached_tokens == 48


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_every_event_is_sent_on_at_once(end: bytes) -> None:
    reader = reader_of(True, Learned(), strips=True, drops_usage=True)
    for asked, plain in zip(
        stream(PROMPT, WORDS, asked=True), stream(PROMPT, WORDS, asked=False), strict=True
    ):
        event = asked.replace(b"\n", end)
        sent = reader.feed(event[: -len(end)]), reader.feed(event[-len(end) :])
        assert sent == (b"", plain.replace(b"\n", end))


def test_of_a_whole_answer_all_is_sent_at_once_up_to_its_first_ids() -> None:
    reader = reader_of(False, Learned(), strips=True)
    assert reader.feed(b'{"choices":[{"text":"token ids') == b'{"choices":[{"text":"token ids'
    assert reader.feed(b' a","prompt_tok') == b' a",'
    assert reader.feed(b'ens":1,"') == b'"prompt_tokens":1,'
    assert reader.feed(b'token_ids":[1') == b""
    assert reader.feed(b'],"text":"b"}]}') == b""
    assert reader.end() == b'"token_ids":null,"text":"b"}]}'


def test_an_answer_with_blanks_in_its_json_is_read_too() -> None:
    told = b'{"prompt_token_ids": [1, 2], "choices": [{"token_ids" : [ 3 ]}]}'
    for at in range(len(told)):
        sent, learned, _ = read([told[:at], told[at:]])
        assert sent == b'{"prompt_token_ids": null, "choices": [{"token_ids" : null}]}'
        assert (learned.prompt, learned.output) == ([1, 2], [3])


def test_ids_without_end_teach_nothing_and_are_not_kept() -> None:
    learned = Learned()
    reader = reader_of(False, learned, strips=True)
    pieces = [reader.feed(b'{"prompt_token_ids":[1')]
    pieces += [reader.feed(b",1" * (1 << 20)) for _ in range(10)]
    assert [len(each) for each in pieces[-2:]] == [1 << 21, 1 << 21]
    assert len(b"".join(pieces)) > MOST_ID_BYTES
    assert reader.feed(b"]}") + reader.end() == b"]}"
    for cut in (learned, read([b'{"prompt_token_ids":[1,2'])[1]):
        assert (cut.prompt, cut.output) == (None, [])


# -- what is counted -------------------------------------------------------------------------------


def known_of(*pieces: bytes, streams: bool = True, **options: Any) -> tuple[Any, int | None]:
    """Return (lengths, cached tokens)."""
    reader = Additions(**options).reader(streams)
    assert b"".join(map(reader.feed, pieces)) + reader.end() == b"".join(pieces)
    return reader.usage.lengths, reader.usage.cached_tokens


def event(told: object, name: str = "") -> bytes:
    line = f"event: {name}\n" if name else ""
    return b"%bdata: %b\n\n" % (line.encode(), json.dumps(told).encode())


OPENAI = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
ANTHROPIC = {"input_tokens": 5, "output_tokens": 6, "cache_read_input_tokens": 32}
DETAILS = "input_tokens_details"
NO_USAGE: list[object] = [None, 5, "x", [], {}, {"usage": OPENAI}]


@pytest.mark.parametrize(
    ("usage", "lengths", "cached"),
    [
        (OPENAI, (7, 2), 4),
        ({**ANTHROPIC, "cache_creation_input_tokens": 1}, (38, 6), 32),
        # The prompt of these includes what was cached
        ({"input_tokens": 9, "output_tokens": 3, DETAILS: {"cached_tokens": 4}}, (9, 3), 4),
        ({**OPENAI, "cache_read_input_tokens": 4}, (7, 2), 4),
        ({"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}, None, 4),
        *((each, None, None) for each in NO_USAGE),
        ({**OPENAI, "prompt_tokens_details": {"cached_tokens": 8}}, (7, 2), None),
        ({**OPENAI, "prompt_tokens_details": []}, (7, 2), None),
        ({"prompt_tokens_details": {"cached_tokens": 4}}, None, None),
        ({**ANTHROPIC, "cache_read_input_tokens": (1 << 21) - 4}, None, None),
    ],
)
@pytest.mark.parametrize("streams", [True, False])
def test_usage_is_what_the_engine_counted(
    usage: object, lengths: object, cached: int | None, streams: bool
) -> None:
    if streams:
        told = event({"choices": [{"delta": {}}], "usage": usage})
        assert known_of(told, b"data: [DONE]\n\n") == (lengths, cached)
    else:
        for whole in ({"id": 1, "usage": usage, "choices": []}, {"choices": [], "usage": usage}):
            assert known_of(json.dumps(whole).encode(), streams=False) == (lengths, cached)


COUNTS = ["-5", "12.7", "12.0", "1e3", "9" * 30, "9" * 5_000, "2097153", '"12"', "true", "null"]
COUNTS += ["{}", "[1]", "1e999"]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("streams", [True, False])
def test_only_whole_numbers_that_an_engine_can_hold_are_counts(count: str, streams: bool) -> None:
    """The count that is no number takes no other with it."""

    def told(prompt: str, output: str, cached: str) -> bytes:
        text = (
            f'{{"choices":[],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{output},'
            f'"prompt_tokens_details":{{"cached_tokens":{cached}}}}}}}'
        )
        return b"data: %b\n\n" % text.encode() if streams else text.encode()

    assert known_of(told(count, "3", "4"), streams=streams) == (None, None)
    assert known_of(told("7", count, "4"), streams=streams) == (None, 4)
    assert known_of(told("7", "3", count), streams=streams) == ((7, 3), None)
    assert known_of(told("8", "3", "4"), streams=streams, most_tokens=7) == (None, None)
    if streams:  # the counts before it stay
        assert known_of(told("7", "3", "4"), told(count, count, count)) == ((7, 3), 4)


def test_without_an_output_all_tokens_are_the_prompt_s() -> None:
    for usage in ({"prompt_tokens": 7, "total_tokens": 7}, {"total_tokens": 7}):
        told = json.dumps({"data": [], "usage": usage}).encode()
        assert known_of(told, streams=False, has_output=False) == ((7, 0), None)
        assert known_of(told, streams=False) == (None, None)


@pytest.mark.parametrize(
    ("start", "end", "known"),
    [
        (
            {"input_tokens": 25, "cache_read_input_tokens": 100, "output_tokens": 1},
            {"output_tokens": 12},
            ((125, 12), 100),
        ),
        (
            {"input_tokens": 30, "output_tokens": 0},
            {"input_tokens": 25, "cache_read_input_tokens": 100, "output_tokens": 12},
            ((125, 12), 100),
        ),
        (
            {"input_tokens": 25, "cache_read_input_tokens": 100, "output_tokens": 1},
            {"input_tokens": None, "output_tokens": 12},
            ((125, 12), 100),
        ),
    ],
)
@given(PLACES, st.booleans(), st.integers(min_value=0, max_value=40))
def test_counts_that_come_in_two_events_are_put_together(
    start: object, end: object, known: object, places: list[int], named: bool, deltas: int
) -> None:
    told: list[Any] = [
        {"type": "message_start", "message": {"id": "m", "content": [], "usage": start}}
    ]
    told += [{"type": "content_block_delta", "delta": {"input": {"usage": OPENAI}}}] * deltas
    told += [{"type": "message_delta", "delta": {"stop_reason": "x"}, "usage": end}]
    told += [{"type": "message_stop"}]
    answer = b"".join(event(each, each["type"] if named else "") for each in told)
    reader = reader_of(True)
    assert b"".join(map(reader.feed, cut(answer, places))) == answer
    assert (reader.usage.lengths, reader.usage.cached_tokens) == known
    assert reader.is_done


TOOL = {"name": "f", "input": {"usage": {"prompt_tokens": 1, "completion_tokens": 1}, "a": [{}]}}
TEXT = 'it said "usage": {"prompt_tokens": 3} and \\'


@given(PLACES, st.booleans(), st.integers(min_value=0, max_value=300), st.booleans())
def test_in_a_whole_answer_usage_is_found_first_or_last_and_cut_anywhere(
    places: list[int], is_first: bool, size: int, spaced: bool
) -> None:
    more = {"content": [{"text": TEXT, "top": [[[{"x": [1, 2]}] * 3, 4]]}, TOOL] * (size // 10)}
    told = {"id": "x", "choices": [], **more, '\\"usage': {"prompt_tokens": 9}, "tools": [TOOL]}
    told = {"usage": OPENAI, **told} if is_first else {**told, "usage": OPENAI}
    answer = json.dumps(told, indent=2 if spaced else None).encode()
    assert known_of(*cut(answer, places), streams=False) == ((7, 2), 4)


def test_a_whole_answer_is_kept_up_to_a_bound_and_one_beyond_it_passes_unread() -> None:
    usage = b'{"usage":%b,"data":[' % json.dumps(OPENAI).encode()
    for count, lengths in ((400, (7, 2)), (4_000, None)):
        reader = reader_of(False)
        tracemalloc.start()
        reader.feed(usage)
        for _ in range(count):
            reader.feed(b"[%b0]," % (b"0.25," * 1_000))
        reader.feed(b"0]}")
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        reader.end()
        assert reader.usage.lengths == lengths
        assert most < 3 * MOST_ID_BYTES


# -- events ----------------------------------------------------------------------------------------

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
CHOICE = {"choices": [{"delta": {"content": 'data: [DONE]\n\ndata: {"type":"message_stop"}'}}]}
LAST = [
    *(b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"id: 1\nevent: message_stop\ndata: {}\n\n"),
    b'data: {"type":\ndata: "message_stop"}\n\n',
    *(event({"type": f"response.{each}"}) for each in ("completed", "incomplete", "failed")),
    b"data: [DONE]\n\n: bye\n\n",
]


@given(PLACES, ENDS, st.sampled_from(LAST), st.booleans(), st.booleans())
def test_a_stream_is_done_at_its_last_event_and_not_at_a_text_that_looks_like_it(
    places: list[int], end: bytes, last: bytes, begins_with_bom: bool, has_comment: bool
) -> None:
    begin = b"\xef\xbb\xbf" * begins_with_bom + b": data: [DONE]\n\n" * has_comment
    begin += b"event: ping\ndata: {}\n\n" * last.startswith(b"id:")
    told = begin + event(CHOICE) * 3 + event({"choices": [], "error": None})
    told += b"xdata: [DONE]\n\n: x\ndata: 1\ndata: [DONE]\n\n"
    for text, is_done in ((told, False), (told + last, True)):
        answer = text.replace(b"\n", end)
        reader = reader_of(True)
        sent = b"".join(map(reader.feed, cut(answer, places)))
        assert (sent, reader.is_done) == (answer, is_done)
        assert reader.error is None


CREATED = {"type": "response.created", "response": {"instructions": "ends in .delta, or content_"}}


@given(PLACES, ENDS)
def test_the_first_token_is_in_an_event_that_has_a_part_of_the_output(
    places: list[int], end: bytes
) -> None:
    for before, first in (
        ([b": ping\n\n", event({"choices": [], "prompt_filter_results": [{}]})], event(CHOICE)),
        ([event(CREATED, CREATED["type"])], event({"type": "response.output_text.delta"})),  # type: ignore[arg-type]
        (
            [event({"type": "message_start", "message": {}}), b"event: ping\ndata: {}\n\n"],
            event({"type": "content_block_start"}),
        ),
    ):
        reader = reader_of(True)
        for piece in cut(b"".join(before).replace(b"\n", end), places):
            reader.feed(piece)
        assert not reader.has_token
        for piece in cut(first.replace(b"\n", end), places):
            reader.feed(piece)
        assert reader.has_token


FAILURES = [
    event({"error": {"message": "died", "code": 500}}),
    event({"error": {"code": "502", "message": "died"}}),
    event({"object": "error", "message": "died", "code": 500}),
    event({"type": "error", "error": {"type": "api_error"}}, "error"),
    event({"error": {"type": "api_error"}}, "error"),
    event({"type": "error", "code": "server_error", "message": "died"}, "error"),
]
OTHERS = [
    event({"error": {"message": "died", "code": 400}}),
    event({"type": "error", "error": {"type": "invalid_request_error"}}, "error"),
    event({"choices": [{"delta": {"content": '{"error": {"code": 500}}'}}], "error": None}),
]


@given(PLACES, ENDS, st.sampled_from(FAILURES + OTHERS), st.booleans(), st.booleans())
def test_nothing_is_sent_before_it_is_known_whether_the_first_event_is_an_error(
    places: list[int], end: bytes, first: bytes, has_comment: bool, drops_usage: bool
) -> None:
    comment = (b": \n\n" * has_comment).replace(b"\n", end)
    answer = first.replace(b"\n", end)
    reader = reader_of(True, drops_usage=drops_usage)
    sent = reader.feed(comment)
    for piece in cut(answer, places):
        assert sent == comment or not piece.strip()  # once the event is complete
        sent += reader.feed(piece)
        assert (reader.error is not None) <= (first in FAILURES)
    sent += reader.rest()
    assert sent == comment + answer
    assert (reader.error is not None) == (first in FAILURES)
    assert reader_of(True).feed(event(CHOICE) + answer) == event(CHOICE) + answer


def test_an_event_that_is_too_long_is_passed_on_in_pieces_and_not_read() -> None:
    reader = reader_of(True, drops_usage=True)
    piece = b"x" * (1 << 20)
    assert reader.feed(b'data: {"choices":[],"usage":{"prompt_tokens":1},"x":"') == b""
    assert b"".join(reader.feed(piece) for _ in range(17)).endswith(piece)
    assert reader.feed(piece) == piece
    assert reader.feed(b'"}\n') + reader.feed(b"\n") == b'xxx"}\n\n'
    dropped = event({"choices": [], "usage": OPENAI})
    assert reader.feed(dropped + b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert (reader.usage.lengths, reader.is_done, reader.has_token) == ((7, 2), True, True)


def test_of_a_prompt_told_twice_the_first_counts_and_an_empty_output_adds_nothing() -> None:
    two = b'[{"prompt_token_ids":[1,2],"token_ids":[]},{"prompt_token_ids":[3],"token_ids":[4]}]'
    for pieces, nulls, prompt in (
        ([two], 4, [1, 2]),
        ([b'data: {"token_ids":[]}\n\n', b'data: {"token_ids":[4]}\n\n'], 2, None),
    ):
        sent, learned, _ = read(pieces)
        assert sent.count(b"null") == nulls
        assert (learned.prompt, learned.output) == (prompt, [4])
