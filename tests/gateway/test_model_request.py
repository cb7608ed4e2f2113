"""Bodies of requests: whatever they say, they are read, refused by the field, or left alone."""

import contextlib
import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh3_128_hexdigest

from lean_selector.core.errors import BadRequest
from lean_selector.gateway.answers import Additions
from lean_selector.gateway.engine_answers import tokens_body
from lean_selector.gateway.learned_prompts import Chain, PromptMemory
from lean_selector.gateway.model_request import (
    MEDIA,
    MOST_FIELDS,
    MOST_IDS,
    MOST_MESSAGES,
    TOKENS_OF_MEDIA,
    TOO_MANY_IDS,
    TOO_MANY_MESSAGES,
    UNKNOWN_FORM,
    Kind,
    ModelRequest,
    template_arguments,
)
from lean_selector.gateway.prompt_shapes import Served, Unknown
from lean_selector.gateway.prompt_values import LINK_BYTES

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ANTHROPIC, RESPONSES = "/v1/messages", "/v1/responses"
SERVED = Served("m", "default", 4, False, {})
SCALAR = st.one_of(
    *(st.none(), st.booleans(), st.integers(-9, 2**33), st.text()),
    st.floats(allow_nan=False, allow_infinity=False),
)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=3,
)
PART = st.fixed_dictionaries({}, optional={"type": JSON, "text": JSON, "image_url": JSON})
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": JSON, "content": JSON | st.lists(PART | JSON), "tool_calls": JSON}
)
NAMES = (
    *("model", "stream", "cache_salt", "tools", "chat_template_kwargs", "reasoning_effort", "n"),
    *("return_token_ids", "stream_options", "echo", "suffix", "add_generation_prompt"),
    *("session_id", "metadata", "prompt_cache_key"),
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "messages": JSON | st.lists(MESSAGE | JSON, max_size=4),
        "input": JSON | st.lists(MESSAGE | JSON, max_size=4),
        "system": JSON | st.lists(PART | JSON),
        "instructions": JSON,
        "prompt": JSON | st.lists(st.integers(0, 2**32 - 1), max_size=9),
        **dict.fromkeys(NAMES, JSON),
    },
)


PATHS = (CHAT, TEXT, ANTHROPIC, RESPONSES, "/v1/embeddings", "/")


@given(body=BODY, path=st.sampled_from(PATHS), forwards=st.booleans())
def test_any_json_is_read_or_refused_by_the_field(
    body: dict[str, Any], path: str, forwards: bool
) -> None:
    text = json.dumps(body).encode()
    if not _has_read_fields(body):
        with pytest.raises(BadRequest, match=r"^(model|stream|cache_salt): expected"):
            ModelRequest(path, text)
        return
    request = ModelRequest(path, text)
    assert request.session_id != ""
    assert request.estimated_tokens(0.25) >= 0
    assert request.most_output_tokens == (0 if path == "/v1/embeddings" else None)
    additions = Additions()
    additions.mark_salt(request, forwards)
    if request.why_not is None and request.kind is not Kind.IDS:
        memory = PromptMemory(1 << 20)
        assert memory.find(Chain(SERVED, None, request)).tokens >= 1
        for asked in ("/tokenize", f"{path}/render"):
            assert json.loads(tokens_body(request, "m", asked))["model"] == "m"
    additions.ask_for_ids(request, lambda prompt, output: None)
    additions.ask_for_usage(request)
    sent = json.loads(additions.body(request))
    added = {"cache_salt", "return_token_ids", "stream_options"}
    assert {k: v for k, v in sent.items() if k not in added} == {
        k: v for k, v in body.items() if k not in added
    }
    assert sent.get("return_token_ids") == (
        body.get("return_token_ids") if request.echoes else True
    )


def _has_read_fields(body: dict[str, Any]) -> bool:
    """Whether the three that decide here are what they should be."""
    kinds = {"model": str, "stream": bool, "cache_salt": str}
    return all(body.get(name) is None or isinstance(body[name], kinds[name]) for name in kinds)


@pytest.mark.parametrize(
    ("fields", "session_id"),
    [
        ({"session_id": "s", "metadata": {"user_id": "u"}, "prompt_cache_key": "k"}, "s"),
        ({"session_id": "", "metadata": {"user_id": "u"}, "prompt_cache_key": "k"}, "u"),
        ({"session_id": 7, "metadata": {"user_id": None}, "prompt_cache_key": "k"}, "k"),
        ({"metadata": ["u"], "prompt_cache_key": None}, None),
        ({"session_id": "é" * 128}, "é" * 128),
        ({"session_id": "é" * 129}, xxh3_128_hexdigest("é".encode() * 129)),
    ],
)
def test_a_session_has_one_of_three_names(fields: dict[str, Any], session_id: str | None) -> None:
    assert ModelRequest(CHAT, json.dumps(fields).encode()).session_id == session_id


def test_a_priority_is_urgent_below_0_and_what_is_no_integer_is_the_engine_s_to_refuse() -> None:
    for text, priority in (
        *((b"-1", 1), (b"-9223372036854775808", 1), (b"0", 0), (b"-0", 0), (b"1", -1), (b"20", -1)),
        *((b"null", 0), (b'"-1"', 0), (b"-1.5", 0), (b"-1e3", 0), (b"[-1]", 0), (b"true", 0)),
    ):
        assert ModelRequest(CHAT, b'{"priority": %b}' % text).priority == priority, text
    assert ModelRequest(CHAT, b"{}").priority == 0


@given(st.binary(max_size=40))
@example(b"\xff{}")
@example(b'{"messages":[{"a":"\xff"}]}')
@example(b"[" * 3000)
@example(b'{"a":' * 3000)
@example(b'{"model":"m"} {}')
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with contextlib.suppress(BadRequest):
        ModelRequest(CHAT, body)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        *((CHAT, Kind.CHAT), ("/v1/chat/completions?x=1", Kind.CHAT)),
        *(("/v1/chat/completions/", Kind.CHAT), ("/v1%2Fchat/%63ompletions", Kind.CHAT)),
        *(("/prefix/v1/chat/completions", Kind.CHAT), (TEXT, Kind.TEXT), ("/v1/models", Kind.NONE)),
        ("/v1/completions/render", Kind.NONE),
    ],
)
def test_the_path_says_what_the_body_holds(path: str, kind: str) -> None:
    body = json.dumps({"messages": [], "prompt": "Hello"}).encode()
    assert ModelRequest(path, body).kind == kind


def test_a_chain_has_a_link_for_each_message_and_each_part_of_a_long_one() -> None:
    def keys(*contents: str) -> list[int]:
        messages = [{"role": "user", "content": content} for content in contents]
        body = json.dumps({"messages": messages}).encode()
        return Chain(SERVED, None, ModelRequest(CHAT, body)).keys

    assert len(keys()) == 1
    assert len(keys("a", "b")) == 3
    assert len(keys("a" * LINK_BYTES, "b")) == 4
    assert keys("a", "b")[:2] == keys("a", "c")[:2]
    assert keys("a", "b")[2] != keys("a", "c")[2]
    assert keys("a", "b")[2] != keys("b", "a")[2]
    long = "x" * LINK_BYTES
    assert keys(long + "a")[:2] == keys(long + "b")[:2]


def test_an_adapter_and_a_block_size_have_chains_of_their_own() -> None:
    request = ModelRequest(CHAT, b'{"messages":[{"role":"user"}]}')
    chains = [
        Chain(SERVED, None, request),
        Chain(SERVED, "adapter", request),
        Chain(Served("m", "default", 8, False, {}), None, request),
        Chain(Served("m", "default", 4, True, {}), None, request),
        Chain(Served("n", "default", 4, False, {}), None, request),
    ]
    assert len({chain.keys[-1] for chain in chains}) == len(chains)
    assert Chain(Served("m", "other", 4, False, {}), None, request).keys == chains[0].keys


NO_FORM = (
    *('["type"]', '"\\"type\\""', "{}", '{"content":"x"}', "1"),
    *('{"role":"user","content":["type"]}', '{"role":"user","content":[{"type":"text"},{}]}'),
)
TEXTS = (
    '{"role":"user","content":"type"}',
    '{"role":"user","content":{"type":"image_url"}}',
    '{"role":"user","content":["a","b"]}',
    '{"role":"user","content":[{"type":"text","text":"a"}]}',
    '{"role":"assistant","tool_calls":[{"type":"function"}]}',
)


@pytest.mark.parametrize(
    ("path", "message", "kind", "why_not"),
    [
        *((CHAT, each, Kind.NONE, UNKNOWN_FORM) for each in NO_FORM),
        *((CHAT, each, Kind.CHAT, None) for each in TEXTS),
        (ANTHROPIC, '{"role":"user","content":[{"type":"image"}]}', Kind.MESSAGES, MEDIA),
    ],
)
def test_a_message_of_media_or_of_no_known_form_goes_by_load(
    path: str, message: str, kind: str, why_not: Unknown | None
) -> None:
    request = ModelRequest(path, f'{{"messages":[{message}]}}'.encode())
    assert (request.kind, request.why_not) == (kind, why_not)


IMAGE = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
SHOT = {"type": "computer_screenshot", "image_url": "data:image/png,AA"}
PICTURE = {"type": "input_image", "image_url": "data:image/png,AA"}


def used(argument: object, result: object) -> list[object]:
    """The use of a tool in /v1/messages, and its result."""
    use = {"type": "tool_use", "id": "t", "name": "make", "input": argument}
    told = {"type": "tool_result", "tool_use_id": "t", "content": result}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [told]}]


@pytest.mark.parametrize(
    ("messages", "media"),
    [
        (used(IMAGE, "done"), 0),
        (used({"items": [IMAGE, {"type": "document"}]}, [{"type": "text", "text": "done"}]), 0),
        (used({"type": "image"}, [{"type": "text", "text": '{"type":"image"}'}, IMAGE]), 1),
        ([{"role": "user", "content": [IMAGE, {**IMAGE, "type": "document"}]}], 2),
    ],
)
def test_a_medium_is_a_part_of_a_content_and_not_a_tool_s_argument(
    messages: list[object], media: int
) -> None:
    body = json.dumps({"messages": messages}).encode()
    for each in (body, body.replace(b" ", b"")):
        request = ModelRequest(ANTHROPIC, each)
        assert (request.kind, request.why_not) == (Kind.MESSAGES, MEDIA if media else None)
        assert request.estimated_tokens(0.0) == media * TOKENS_OF_MEDIA


@pytest.mark.parametrize(
    ("item", "media"),
    [
        ({"role": "user", "content": [{"type": "input_text", "text": "x"}, PICTURE]}, 1),
        ({"type": "function_call", "arguments": '{"type":"image"}', "extra": PICTURE}, 0),
        ({"type": "function_call_output", "output": [{"type": "input_text", "text": "x"}]}, 0),
        ({"type": "function_call_output", "output": '{"type":"input_image"}'}, 0),
        ({"type": "function_call_output", "output": [PICTURE]}, 1),
        ({"type": "function_call_output", "output": [{"type": "image"}]}, 0),
        ({"type": "computer_call_output", "output": SHOT, "acknowledged": [SHOT]}, 1),
    ],
)
def test_an_item_s_media_are_in_its_content_or_output(item: object, media: int) -> None:
    body = json.dumps({"input": [{"role": "user", "content": "hi"}, item]}).encode()
    request = ModelRequest(RESPONSES, body)
    assert (request.kind, request.why_not) == (Kind.RESPONSES, MEDIA if media else None)
    assert request.estimated_tokens(0.0) == media * TOKENS_OF_MEDIA


def test_beside_an_image_all_text_counts() -> None:
    said = [{"role": "user", "content": "a" * 398}, {"role": "user", "content": [IMAGE]}]
    request = ModelRequest(ANTHROPIC, json.dumps({"messages": said}).encode())
    assert request.estimated_tokens(0.25) == 100 + TOKENS_OF_MEDIA


# -- what reading a body costs ---------------------------------------------------------------------

LONG = 1 << 19


def many(item: str, opening: str, closing: str, size: int = LONG) -> bytes:
    return (opening + ",".join([item] * (size // (len(item) + 1))) + closing).encode()


PARTS = '{"messages":[{"role":"user","content":[{"type":"text"},'
LONG_BODIES = {
    "slow numbers": (CHAT, many("1e308", PARTS[:-1] + '],"x":[', "]}]}")),
    "empty messages": (CHAT, many("{}", '{"messages":[', "]}")),
    "messages of one field": (CHAT, many('{"role":1}', '{"messages":[', "]}", LONG * 4)),
    "empty items": (RESPONSES, many("{}", '{"input":[', "]}")),
    "items of one field": (RESPONSES, many('{"role":1}', '{"input":[', "]}", LONG * 4)),
    "an item": (RESPONSES, b'{"input":"%b"}' % (b"x" * LONG)),
    "images": (ANTHROPIC, many('{"type":"image"}', PARTS, "]}]}", LONG * 4)),
    "marks": (ANTHROPIC, many('{"type":1,"cache_control":{}}', PARTS, "]}]}", LONG * 4)),
    "no messages": (CHAT, many("1", '{"messages":[', "]}")),
    "empty parts": (CHAT, many("{}", PARTS, "]}]}")),
    "parts of one field": (CHAT, many('{"type":1}', PARTS, "]}]}", LONG * 4)),
    "texts as parts": (CHAT, many('""', PARTS, "]}]}")),
    "a text beyond ASCII": (CHAT, many("a\U0001f600", '{"messages":[{"role":"', '"}]}')),
    "ids": (TEXT, many("1", '{"prompt":[', "]}", LONG * 8)),
    "several texts": (TEXT, many('""', '{"prompt":[', "]}")),
    "several lists": (TEXT, many("[1]", '{"prompt":[', "]}")),
    "fields": (TEXT, many('"a":1', '{"prompt":"x",', "}")),
    "one text": (TEXT, b'{"prompt":"%b"}' % (b"x" * LONG)),
}


@pytest.mark.parametrize(("path", "body"), LONG_BODIES.values(), ids=LONG_BODIES)
def test_what_is_made_of_a_long_body_takes_no_more_than_twice_its_memory(
    path: str, body: bytes
) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(BadRequest):
            request = ModelRequest(path, body)
            request.estimated_tokens(0.25)
            if request.why_not is None and request.kind is not Kind.IDS:
                Chain(SERVED, None, request)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * len(body)


def test_a_body_of_too_many_fields_is_refused_and_texts_have_none() -> None:
    fields = ",".join(f'"{number:x}":1' for number in range(MOST_FIELDS + 1))
    with pytest.raises(BadRequest, match=str(MOST_FIELDS)):
        ModelRequest(CHAT, b"{%b}" % fields.encode())
    text = json.dumps({"messages": [{"role": "user", "content": f"{{{fields}}}"}]}).encode()
    assert ModelRequest(CHAT, text).kind is Kind.CHAT


def test_too_many_messages_or_ids_go_by_load() -> None:
    messages = many('{"role":"user"}', '{"messages":[', "]}", 16 * (MOST_MESSAGES + 1))
    ids = many("1", '{"prompt":[', "]}", 2 * (MOST_IDS + 1))
    assert ModelRequest(CHAT, messages).why_not == TOO_MANY_MESSAGES
    request = ModelRequest(TEXT, ids)
    assert (request.why_not, request.ids) == (TOO_MANY_IDS, b"")


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"a": 1}, "documents": [2]}, {"a": 1, "documents": [2]}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"chat_template_kwargs": [1], "documents": [2]}, {}),
        ({"chat_template_kwargs": "a"}, {}),
    ],
)
def test_arguments_of_the_template_are_those_that_are_an_object(
    fields: dict[str, Any], arguments: dict[str, Any]
) -> None:
    request = ModelRequest(CHAT, json.dumps({"messages": [], **fields}).encode())
    assert json.loads(msgspec.json.encode(template_arguments(request))) == arguments
