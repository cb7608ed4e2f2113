"""Answers on their way to the client: the ids are read, and the client sees none of them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.gateway.answers import AnswerReader, Usage
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


def read(pieces: list[bytes], **options: bool) -> tuple[bytes, Learned, AnswerReader]:
    learned = Learned()
    reader = AnswerReader(learned, strips=options.pop("strips", True), **options)
    sent = b"".join(map(reader.feed, pieces)) + reader.end()
    return sent, learned, reader


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
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
    sent, learned, reader = read(cut(asked, places), strips=strips, drops_usage=usage and strips)
    assert sent == (plain if strips else asked)
    assert (learned.prompt, learned.output) == (PROMPT, OUTPUT)
    assert Usage(reader.last).cached_tokens == (32 if usage else None)


@given(PLACES)
def test_a_whole_answer_cut_anywhere_reads_as_if_nobody_had_asked(places: list[int]) -> None:
    text, output = "".join(WORDS), [7, 8, 9]
    asked = whole_answer(PROMPT, text, output, asked=True)
    sent, learned, reader = read(cut(asked, places))
    assert sent == whole_answer(PROMPT, text, output, asked=False)
    assert (learned.prompt, learned.output) == (PROMPT, output)
    assert Usage(reader.last).cached_tokens == 48


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_every_event_is_sent_on_at_once(end: bytes) -> None:
    reader = AnswerReader(Learned(), strips=True, drops_usage=True)
    for asked, plain in zip(
        stream(PROMPT, WORDS, asked=True), stream(PROMPT, WORDS, asked=False), strict=True
    ):
        event = asked.replace(b"\n", end)
        sent = reader.feed(event[: -len(end)]), reader.feed(event[-len(end) :])
        assert sent == (b"", plain.replace(b"\n", end))


def test_an_answer_with_blanks_in_its_json_is_read_too() -> None:
    told = b'{"prompt_token_ids": [1, 2], "choices": [{"token_ids" : [ 3 ]}]}'
    for at in range(len(told)):
        sent, learned, _ = read([told[:at], told[at:]])
        assert sent == b'{"prompt_token_ids": null, "choices": [{"token_ids" : null}]}'
        assert (learned.prompt, learned.output) == ([1, 2], [3])


def test_ids_without_end_teach_nothing_and_are_not_kept() -> None:
    learned = Learned()
    reader = AnswerReader(learned, strips=True)
    assert reader.feed(b'{"prompt_token_ids":[1') == b'{"prompt_token_ids":null'
    for _ in range(40):
        assert reader.feed(b",1" * (1 << 18)) == b""
    assert MOST_ID_BYTES < 40 << 19
    assert reader.feed(b"]}") == b"}"
    reader.end()
    assert learned.times == read([b'{"prompt_token_ids":[1,2'])[1].times == 0


@pytest.mark.parametrize(
    ("last", "lengths", "cached"),
    [
        (b"".join(stream(PROMPT, WORDS, asked=False, usage=True)), None, 32),
        (b"", None, None),
        (b'{"usage":{"prompt_tokens":7,"total_tokens": 9,"completion_tokens": 2}}', (7, 2), None),
        (
            b'{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4},'
            b'"output_tokens":3,"output_tokens_details":{"reasoning_tokens":1}}}',
            (9, 3),
            4,
        ),
        (  # Anthropic's
            b'{"usage":{"input_tokens":5,"output_tokens":6,"cache_read_input_tokens":32,'
            b'"cache_creation_input_tokens":1}}',
            (38, 6),
            32,
        ),
    ],
)
def test_usage_is_read_at_the_end_of_an_answer(
    last: bytes, lengths: tuple[int, int] | None, cached: int | None
) -> None:
    usage = Usage(b'{"usage":{"prompt_tokens":1,"completion_tokens":1}}' * bool(last) + last)
    assert (usage.lengths, usage.cached_tokens) == (lengths, cached)


def test_of_a_long_answer_the_usage_at_its_end_is_found() -> None:
    reader = AnswerReader(None, strips=True)
    for _ in range(1_000):
        reader.feed(b'data: {"choices":[{"text":" and so on, for a hundred bytes or so"}]}\n\n')
    reader.feed(b'data: {"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}')
    assert Usage(reader.last).cached_tokens == 4
    assert len(reader.last) < 32_768


def test_of_a_prompt_told_twice_the_first_counts_and_an_empty_output_adds_nothing() -> None:
    two = b'[{"prompt_token_ids":[1,2],"token_ids":[]},{"prompt_token_ids":[3],"token_ids":[4]}]'
    for pieces, nulls, prompt in (
        ([two], 4, [1, 2]),
        ([b'data: {"token_ids":[]}\n\n', b'data: {"token_ids":[4]}\n\n'], 2, None),
    ):
        sent, learned, _ = read(pieces)
        assert sent.count(b"null") == nulls
        assert (learned.prompt, learned.output) == (prompt, [4])
