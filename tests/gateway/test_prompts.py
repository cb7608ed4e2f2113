"""What a door is told of raw requests, with engines that answer over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lean_selector.core.errors import BadRequest, UnknownModel
from lean_selector.core.hashing import hash_seed, local_hashes, sequence_hashes_bytes
from lean_selector.core.settings import EjectionSettings
from lean_selector.gateway.answers import UNMARKABLE
from lean_selector.gateway.engine_answers import FRESH_S, EngineAnswers
from lean_selector.gateway.fleet import GatewayFleet
from lean_selector.gateway.model_request import (
    ENGINE_FIELDS,
    MEDIA,
    NO_PROMPT,
    SEVERAL,
    UNKNOWN_FORM,
)
from lean_selector.gateway.prompt_shapes import Mode, PromptSettings, Unknown, Why
from lean_selector.gateway.prompts import BEGINNING, NEW, OFF, UNMARKED, Prompts, Routed
from lean_selector.http.outbound import OutboundClient
from lean_selector.links.names import Resolver
from tests.gateway.talking_engine import (
    ADAPTER,
    MODEL,
    TalkingEngine,
    chat_tokens,
    stream,
    talking_engine,
    tokens_of,
    whole_answer,
)
from tests.support.driven_selector import DrivenSelector
from tests.support.on_loop import finished, on_loop

BLOCK_SIZE = 4
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [
    {"role": "system", "content": "You answer in one word, and never in more than one."},
    {"role": "user", "content": [{"type": "text", "text": "Which is the largest planet?"}]},
]


def fleet_of(
    workers: dict[int, str], model: str = MODEL, block_size: int = BLOCK_SIZE, out: int = 0
) -> GatewayFleet:
    """A fleet of one model. `out`: the id of the worker that is ejected."""
    driven = DrivenSelector()
    for worker_id, url in workers.items():
        driven.register(worker_id, model_name=model, endpoint=url, block_size=block_size)
    for _ in range(EjectionSettings().failed_polls):
        driven.selector.health.polled(out, "it is silent", 0.0)
    return GatewayFleet(driven.selector.catalog)


@asynccontextmanager
async def door(mode: Mode, **settings: Any) -> AsyncIterator[tuple[Prompts, TalkingEngine]]:
    async with talking_engine() as engine:
        prompts = Prompts(
            PromptSettings(mode=mode, **settings),
            fleet_of({1: engine.url, 2: engine.url}),
            OutboundClient(Resolver().resolve),
        )
        try:
            yield prompts, engine
        finally:
            await prompts.close()


async def of(prompts: Prompts, path: str, body: bytes, *, forwards: bool = True) -> Routed:
    return await finished(prompts.read(path, body, forwards=forwards))


def chat(messages: object = MESSAGES, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, **fields}).encode()


def text(prompt: object, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, **fields}).encode()


def hashes(tokens: list[int], lora: str | None = None, salt: str | None = None) -> bytes:
    return local_hashes(tokens, BLOCK_SIZE, hash_seed(lora, salt))


def is_exactly(routed: Routed, tokens: list[int]) -> bool:
    assert routed.why_not is None
    return (routed.prompt.isl_tokens, routed.prompt.local_hashes) == (len(tokens), hashes(tokens))


def is_load_only(routed: Routed, why_not: Unknown) -> bool:
    assert routed.why_not == why_not
    return begins(routed, b"") and routed.prompt.isl_tokens >= 1


def begins(routed: Routed, known: bytes) -> bool:
    """What is known is the beginning; behind it are blocks for all its tokens, like no other's.
    Where nothing is known nothing can match, and nothing is predicted."""
    prompt = routed.prompt
    assert prompt.sequence_count == prompt.isl_tokens // BLOCK_SIZE
    assert len(prompt.sequence_hashes()) == 8 * prompt.sequence_count
    assert len(prompt.local_hashes) == (8 * prompt.sequence_count if known else 0)
    assert prompt.known_blocks == len(known) // 8
    assert prompt.first_sequence_hash == prompt.sequence_hashes()[:8]
    assert prompt.sequence_hashes().startswith(sequence_hashes_bytes(known))
    return prompt.local_hashes.startswith(known)


# -- lengths that are not known --------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.LEARN])
@on_loop
async def test_lengths_that_are_not_known_are_estimated_by_those_of_the_answers_before(
    mode: Mode,
) -> None:
    async with door(mode, ask_from_bytes=16_384) as (prompts, _):
        first = await of(prompts, TEXT, text("x" * 4_000))
        assert first.prompt.isl_tokens == 4_002 // 4  # with the quotes
        assert first.output_tokens == 128
        twin = await of(prompts, TEXT, text("x" * 4_000))
        assert twin.prompt.first_sequence_hash != first.prompt.first_sequence_hash
        assert twin.prompt.local_hashes == first.prompt.local_hashes == b""
        assert first.on_lengths is not None
        for _ in range(40):
            first.on_lengths(2_001, 300)
        routed = await of(prompts, TEXT, text("y" * 8_000))
        assert routed.prompt.isl_tokens == pytest.approx(4_001, rel=0.01)
        assert routed.output_tokens == 300
        assert (await of(prompts, TEXT, text("z", max_tokens=5))).output_tokens == 5
        several = await of(prompts, TEXT, text("z", max_tokens=5, n=3))
        assert several.output_tokens == 15
        assert several.on_lengths is not None
        several.on_lengths(1, 900)  # 300 each
        assert (await of(prompts, TEXT, text("z"))).output_tokens == 300
        assert (await of(prompts, CHAT, chat(max_completion_tokens=6))).output_tokens == 6


# -- off -------------------------------------------------------------------------------------------


@on_loop
async def test_off_nothing_is_known_nothing_asked_and_nothing_changed() -> None:
    """A request that names no model means the only one."""
    unnamed = json.dumps({"messages": MESSAGES}).encode()
    async with door(Mode.OFF) as (prompts, engine):
        asked = ((CHAT, chat()), (TEXT, text("Hello")), (TEXT, text([1, 2, 3, 4])), (CHAT, unnamed))
        for path, body in asked:
            routed = await of(prompts, path, body)
            assert is_load_only(routed, OFF)
            assert routed.body is body
            assert not routed.additions.change_answer
            assert (routed.model_name, routed.tenant_id) == (MODEL, "default")
        assert engine.served is not None
        assert engine.served.requests == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not a JSON object"),
        (b"[1]", "the body is not a JSON object"),
        (b'{"model":7}', "model: expected a string"),
        (b'{"model":"m","stream":"yes"}', "stream: expected true or false"),
        (b'{"model":"m","cache_salt":["x"]}', "cache_salt: expected a string"),
        (b'{"model":"\xff"}', "the body is not a JSON object"),
    ],
)
@on_loop
async def test_a_body_that_names_no_model_is_refused_by_the_field(
    body: bytes, message: str
) -> None:
    async with door(Mode.OFF) as (prompts, _):
        with pytest.raises(BadRequest, match=message):
            await of(prompts, CHAT, body)


@on_loop
async def test_a_model_that_nobody_serves_is_unknown_and_engines_are_not_asked_each_time() -> None:
    async with door(Mode.OFF) as (prompts, engine):
        for _ in range(5):
            with pytest.raises(UnknownModel, match="`nobody` does not exist") as caught:
                await of(prompts, CHAT, b'{"model":"nobody"}')
            assert (caught.value.status, caught.value.model) == (404, "nobody")
        assert len(engine.asked("/v1/models")) <= 2  # once of each worker


# -- tokenize --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"reasoning_effort": "high"},
        {"reasoning_effort": "none"},
        {"documents": [{"title": "one", "text": "two"}]},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids=lambda fields: next(iter(fields), "plain"),
)
@on_loop
async def test_a_chat_is_tokenized_as_the_engine_will(fields: dict[str, Any]) -> None:
    async with door(Mode.TOKENIZE) as (prompts, engine):
        routed = await of(prompts, CHAT, chat(**fields))
        assert is_exactly(routed, chat_tokens({"messages": MESSAGES, **fields}))
        again = await of(prompts, CHAT, chat(temperature=0.5, **fields))
        assert again.prompt.local_hashes == routed.prompt.local_hashes
        assert again.why_not is None
        assert len(engine.asked("/tokenize")) == 1  # what was asked before is known


@on_loop
async def test_an_engine_that_renders_chats_gets_the_whole_request() -> None:
    async with door(Mode.TOKENIZE) as (prompts, engine):
        engine.render = 200, None
        fields = {"tool_choice": "none", "documents": [{"text": "two"}]}
        routed = await of(prompts, CHAT, chat(stream=True, stream_options={}, **fields))
        assert is_exactly(routed, chat_tokens({"messages": MESSAGES, **fields}))
        whole = {"model": MODEL, "messages": MESSAGES, **fields}
        assert engine.asked(f"{CHAT}/render") == [whole]
        assert engine.asked("/tokenize") == []


@pytest.mark.parametrize(
    "lacking",
    [
        (404, {"detail": "Not Found"}),
        (403, {"error": {"type": "PermissionDeniedError"}}),  # vLLM without --enable-scale-out
        (200, [[], [{"prompt_token_ids": [1]}]]),  # vLLM 0.16
    ],
)
@on_loop
async def test_an_engine_that_does_not_render_chats_is_asked_once(
    lacking: tuple[int, object],
) -> None:
    async with door(Mode.TOKENIZE) as (prompts, engine):
        engine.render = lacking
        for content in ("one two", "three four five"):
            messages = [{"role": "user", "content": content}]
            routed = await of(prompts, CHAT, chat(messages))
            assert is_exactly(routed, chat_tokens({"messages": messages}))
        asked = [len(engine.asked(path)) for path in (f"{CHAT}/render", "/tokenize")]
        assert asked == [2, 2]  # the first for both workers, by the first chat


@on_loop
async def test_a_text_is_tokenized_alone_and_as_the_only_one_of_a_list() -> None:
    async with door(Mode.TOKENIZE) as (prompts, engine):
        words = "one two three four five"
        for prompt in (words, [words]):
            assert is_exactly(await of(prompts, TEXT, text(prompt)), tokens_of(words))
        assert engine.asked("/tokenize") == [{"model": MODEL, "prompt": words}]


@on_loop
async def test_a_worker_that_refuses_leaves_what_was_known_of_the_beginning() -> None:
    async with door(Mode.TOKENIZE) as (prompts, engine):
        await of(prompts, CHAT, chat())
        engine.tokenize_status = 404
        routed = await of(prompts, CHAT, chat([*MESSAGES, {"role": "user", "content": "And?"}]))
        refused = Unknown(Why.REFUSED, f"POST {engine.url}/tokenize: status 404")
        assert routed.why_not == refused
        known = hashes(chat_tokens({"messages": MESSAGES}))
        assert begins(routed, known)
        other = await of(prompts, TEXT, text("Something else"))
        assert is_load_only(other, refused)
        assert prompts.unknown == {"refused": 2}


@on_loop
async def test_an_engine_that_does_not_answer_is_not_waited_for_nor_asked_otherwise() -> None:
    async with door(Mode.TOKENIZE, ask_timeout_s=0.05) as (prompts, engine):
        engine.is_silent = True
        routed = await of(prompts, TEXT, text("one two"))
        late = Unknown(Why.TIMEOUT, f"POST {engine.url}/tokenize: no answer in 0.05 s")
        assert is_load_only(routed, late)
        engine.render, asked = (200, None), engine.asked("/tokenize")
        routed = await of(prompts, CHAT, chat())
        assert routed.why_not is not None
        assert (routed.why_not.why, engine.asked("/tokenize")) == (Why.TIMEOUT, asked)


@on_loop
async def test_an_ejected_worker_is_not_asked_while_there_are_others() -> None:
    async with talking_engine() as well, talking_engine() as out:
        workers = fleet_of({1: out.url, 2: well.url}, out=1)
        settings = PromptSettings(mode=Mode.TOKENIZE)
        prompts = Prompts(settings, workers, OutboundClient(Resolver().resolve))
        try:
            for number in range(4):
                await of(prompts, TEXT, text(f"Which is number {number}?"))
            assert [len(each.asked("/tokenize")) for each in (out, well)] == [0, 4]
        finally:
            await prompts.close()


@on_loop
async def test_an_engine_that_cannot_be_asked_or_tells_no_tokens_has_failed() -> None:
    async with door(Mode.TOKENIZE) as (prompts, engine):
        engine.tells_tokens = False
        routed = await of(prompts, CHAT, chat())
        text = f"POST {engine.url}/tokenize: an answer without tokens"
        assert is_load_only(routed, Unknown(Why.FAILED, text))
    for url in ("tcp://127.0.0.1:1", "http://127.0.0.1:1"):
        settings = PromptSettings(mode=Mode.TOKENIZE)
        prompts = Prompts(settings, fleet_of({1: url}), OutboundClient(Resolver().resolve))
        routed = await of(prompts, CHAT, chat())
        assert routed.why_not is not None
        assert routed.why_not.why is Why.FAILED
        await prompts.close()


@on_loop
async def test_a_known_beginning_is_enough_when_little_is_new() -> None:
    async with door(Mode.TOKENIZE, ask_from_bytes=400) as (prompts, engine):
        long = [{"role": "system", "content": "word " * 200}]
        await of(prompts, CHAT, chat(long))
        routed = await of(prompts, CHAT, chat([*long, {"role": "user", "content": "short"}]))
        assert routed.why_not == BEGINNING
        assert len(engine.asked("/tokenize")) == 1
        await of(prompts, CHAT, chat([*long, {"role": "user", "content": "long " * 200}]))
        assert len(engine.asked("/tokenize")) == 2


# -- learn -----------------------------------------------------------------------------------------


def answered(routed: Routed, answer: list[bytes]) -> bytes:
    reader = routed.additions.reader(routed.streams)
    return b"".join(map(reader.feed, answer)) + reader.end()


@pytest.mark.parametrize("streams", [True, False])
@on_loop
async def test_what_an_answer_tells_is_known_the_next_time(streams: bool) -> None:
    async with door(Mode.LEARN, ask_from_bytes=16_384) as (prompts, engine):
        body = chat(stream=True) if streams else chat()
        routed = await of(prompts, CHAT, body)
        assert is_load_only(routed, NEW)
        assert json.loads(routed.body)["return_token_ids"] is True
        prompt, words = chat_tokens({"messages": MESSAGES}), [" Jupiter", "."]
        output = [token for word in words for token in tokens_of(word)]
        if streams:
            assert json.loads(routed.body)["stream_options"] == {"include_usage": True}
            sent = answered(routed, stream(prompt, words, asked=True, usage=True))
            assert sent == b"".join(stream(prompt, words, asked=False))
        else:
            assert "stream_options" not in json.loads(routed.body)
            sent = answered(routed, [whole_answer(prompt, "".join(words), output, asked=True)])
            assert sent == whole_answer(prompt, "".join(words), output, asked=False)
        assert is_exactly(await of(prompts, CHAT, body), prompt)
        more = [
            {"role": "assistant", "content": " Jupiter."},
            {"role": "user", "content": "And the smallest?"},
        ]
        routed = await of(prompts, CHAT, chat([*MESSAGES, *more]))
        assert routed.why_not == BEGINNING
        assert begins(routed, hashes([*prompt, *output]))
        assert engine.asked("/tokenize") == []


@on_loop
async def test_a_client_that_asks_for_ids_and_usage_itself_gets_them() -> None:
    async with door(Mode.LEARN, ask_from_bytes=16_384) as (prompts, _):
        body = chat(stream=True, return_token_ids=True, stream_options={"include_usage": True})
        routed = await of(prompts, CHAT, body)
        assert routed.body is body
        prompt = chat_tokens({"messages": MESSAGES})
        answer = stream(prompt, [" Jupiter"], asked=True, usage=True)
        assert answered(routed, answer) == b"".join(answer)
        assert is_exactly(await of(prompts, CHAT, body), prompt)


@on_loop
async def test_an_engine_that_says_its_make_late_is_asked_again_and_not_waited_for() -> None:
    async with talking_engine() as engine:
        now = 0.0
        fleet = fleet_of({1: engine.url})
        served = fleet.model(MODEL, "default")
        assert served is not None
        engines = EngineAnswers(fleet, OutboundClient(Resolver().resolve), lambda: now)
        engine.models_status = 503
        assert await finished(engines.make(served)) is None
        engine.models_status = 200
        assert await finished(engines.make(served)) is None
        assert len(engine.asked("/v1/models")) == 1
        now = FRESH_S + 1
        assert await finished(engines.make(served)) is None  # what was known
        await asyncio.gather(*engines._under_way.values())
        assert await finished(engines.make(served)) == "vllm"
        assert len(engine.asked("/v1/models")) == 2
        now = 100 * FRESH_S
        assert await finished(engines.make(served)) == "vllm"
        await engines.close()  # before what is asked beside has begun
        assert len(engine.asked("/v1/models")) == 2


@on_loop
async def test_long_unknown_prompts_are_tokenized_while_learning() -> None:
    async with door(Mode.LEARN, ask_from_bytes=1_000) as (prompts, engine):
        await of(prompts, CHAT, chat())
        assert engine.asked("/tokenize") == []
        long = [{"role": "user", "content": "word " * 300}]
        assert is_exactly(await of(prompts, CHAT, chat(long)), chat_tokens({"messages": long}))


@pytest.mark.parametrize(
    ("make", "path", "body", "asks"),
    [
        ("vllm", TEXT, text("Once", echo=False), True),
        ("vllm", TEXT, text("Once", echo=True), False),
        ("vllm", CHAT, chat(echo=True), False),
        ("other", CHAT, chat(stream=True), False),
    ],
)
@on_loop
async def test_another_make_and_a_prompt_that_is_to_be_echoed_are_not_asked_for_ids(
    make: str, path: str, body: bytes, asks: bool
) -> None:
    """vLLM leaves the text of an echoed prompt out of an answer with ids."""
    async with door(Mode.LEARN, ask_from_bytes=16_384) as (prompts, engine):
        engine.make = make
        routed = await of(prompts, path, body)
        assert (routed.body is body, routed.additions.change_answer) == (not asks, asks)


@pytest.mark.parametrize("several", [2, 2.0, "2"])  # as vLLM takes them
@on_loop
async def test_of_several_answers_only_the_prompt_is_learned(several: object) -> None:
    async with door(Mode.LEARN, ask_from_bytes=16_384) as (prompts, _):
        routed = await of(prompts, CHAT, chat(n=several))
        prompt = chat_tokens({"messages": MESSAGES})
        output = tokens_of(" a b c d e f g h")
        answered(routed, [whole_answer(prompt, "", output, asked=True)])
        more = [*MESSAGES, {"role": "user", "content": "And?"}]
        assert begins(await of(prompts, CHAT, chat(more)), hashes(prompt))


# -- ids, adapters, salts, media -------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.LEARN, Mode.TOKENIZE])
@on_loop
async def test_token_ids_need_no_tokenizer(mode: Mode) -> None:
    async with door(mode) as (prompts, engine):
        ids = list(range(1, 31))
        for prompt in (ids, [ids]):
            assert is_exactly(await of(prompts, TEXT, text(prompt)), ids)
        assert engine.asked("/tokenize") == []


def asks_of(part: dict[str, Any]) -> bytes:
    content = [{"type": "text", "text": "What is it?"}, part]
    return chat([*MESSAGES, {"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("path", "body", "why_not"),
    [
        ("/v1/embeddings", b'{"model":"m","input":"Hello"}', NO_PROMPT),
        *((TEXT, text(each), SEVERAL) for each in (["one", "two"], [[1, 2], [3, 4]])),
        *(
            (TEXT, text(each), UNKNOWN_FORM)
            for each in ([1, -2], [1, 2**32], [], [1, "a"], {"a": 1}, 7, None, [[1, 2.5]])
        ),
        *(
            (TEXT, text("one", **{name: "1"}), Unknown(Why.CHANGED, f"`{name}` changes the prompt"))
            for name in ("suffix", "truncate_prompt_tokens", "prompt_embeds")
        ),
        (CHAT, asks_of({"type": "image_url", "image_url": {"url": "data:image/png,AA"}}), MEDIA),
        (CHAT, asks_of({"type": "input_audio", "input_audio": {"format": "wav"}}), MEDIA),
        (CHAT, asks_of({"type": "video_url", "video_url": {"url": "http://v"}}), MEDIA),
        *((CHAT, each, None) for each in (chat("Hello"), b'{"model":"m"}', chat({"role": "user"}))),
    ],
)
@on_loop
async def test_what_goes_by_load_says_why_and_is_sent_as_it_came(
    path: str, body: bytes, why_not: Unknown | None
) -> None:
    """None: for any reason."""
    async with door(Mode.TOKENIZE) as (prompts, engine):
        routed = await of(prompts, path, body)
        assert routed.why_not is not None
        assert is_load_only(routed, why_not or routed.why_not)
        assert routed.body is body
        assert why_not is None or engine.asked("/tokenize") == []


@on_loop
async def test_fields_that_are_null_and_texts_that_speak_of_images_change_nothing() -> None:
    async with door(Mode.TOKENIZE) as (prompts, _):
        messages = [{"role": "user", "content": 'What is {"type": "image_url"}?'}]
        nulls = dict.fromkeys(("suffix", "truncate_prompt_tokens", "prompt_embeds"))
        for path, body in ((CHAT, chat(messages)), (TEXT, text("one two three", **nulls))):
            assert (await of(prompts, path, body)).why_not is None


@on_loop
async def test_a_name_that_is_an_adapter_goes_to_the_workers_that_have_it() -> None:
    async with talking_engine() as one, talking_engine() as other:
        other.adapters = []
        prompts = Prompts(
            PromptSettings(mode=Mode.TOKENIZE),
            fleet_of({1: one.url, 2: other.url}),
            OutboundClient(Resolver().resolve),
        )
        body = json.dumps({"model": ADAPTER, "messages": MESSAGES}).encode()
        routed = await of(prompts, CHAT, body)
        assert (routed.model_name, routed.worker_ids) == (MODEL, frozenset({1}))
        tokens = chat_tokens({"messages": MESSAGES})
        assert routed.prompt.lora_name == ADAPTER
        assert routed.prompt.local_hashes == hashes(tokens, ADAPTER)
        assert [asked["model"] for asked in one.asked("/tokenize")] == [ADAPTER]
        assert other.asked("/tokenize") == []
        base = await of(prompts, CHAT, chat())
        assert base.worker_ids is None
        assert base.prompt.local_hashes == hashes(tokens)
        await prompts.close()


@on_loop
async def test_a_salt_is_marked_so_that_the_engines_events_tell_it() -> None:
    async with door(Mode.TOKENIZE) as (prompts, _):
        routed = await of(prompts, CHAT, chat(cache_salt="pepper"))
        assert json.loads(routed.body)["cache_salt"] == "dynamo-cache-salt:pepper"
        assert json.loads(routed.body)["messages"] == MESSAGES
        tokens = chat_tokens({"messages": MESSAGES})
        assert routed.prompt.local_hashes == hashes(tokens, salt="pepper")
        assert routed.why_not is None
        body = chat(cache_salt="dynamo-cache-salt:pepper")
        marked = await of(prompts, CHAT, body)
        assert marked.body is body
        assert marked.prompt.local_hashes == routed.prompt.local_hashes
        mark = await of(prompts, CHAT, chat(cache_salt="dynamo-cache-salt:"))
        assert mark.prompt.local_hashes == hashes(tokens, salt="dynamo-cache-salt:")


@on_loop
async def test_where_a_salt_cannot_be_marked_its_blocks_are_those_without_one() -> None:
    """So the engine's events tell them, and so they are found."""
    async with door(Mode.TOKENIZE) as (prompts, _):
        body = chat(cache_salt="pepper")
        routed = await of(prompts, CHAT, body, forwards=False)
        assert routed.why_not == UNMARKED
        assert routed.body is body
        assert routed.prompt.local_hashes == hashes(chat_tokens({"messages": MESSAGES}))


@on_loop
async def test_a_salt_that_the_engine_would_refuse_when_marked_goes_by_load() -> None:
    async with door(Mode.TOKENIZE) as (prompts, _):
        for salt in ("s" * 111, "a/b", "a@b", "a\\b"):
            routed = await of(prompts, CHAT, chat(cache_salt=salt))
            assert routed.why_not == UNMARKABLE
            assert json.loads(routed.body)["cache_salt"] == salt


@on_loop
async def test_an_image_counts_as_an_image_not_as_the_text_that_it_is_written_in() -> None:
    async with door(Mode.TOKENIZE) as (prompts, _):
        url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
        body = chat([{"role": "user", "content": [url, {"type": "text", "text": "a" * 400}, url]}])
        assert (await of(prompts, CHAT, body)).prompt.isl_tokens == 100 + 2 * 1024


# -- fields for engines ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ENGINE_FIELDS))
@on_loop
async def test_a_field_that_engines_set_for_each_other_is_refused_by_name(name: str) -> None:
    async with door(Mode.LEARN) as (prompts, _):
        for forwards in (True, False):
            for value in ({}, {"do_remote_prefill": True}, 7, "text", False):
                for path, body in ((CHAT, chat), (TEXT, lambda **more: text("x", **more))):
                    with pytest.raises(BadRequest, match=f"^{name}: .*--pass-engine-fields"):
                        await of(prompts, path, body(**{name: value}), forwards=forwards)
        assert (await of(prompts, CHAT, chat(**{name: None}))).prompt.isl_tokens
        with pytest.raises(BadRequest, match=f"^vllm_xargs.{name}: "):
            await of(prompts, CHAT, chat(vllm_xargs={"other": 1, name: "text"}))
        with pytest.raises(BadRequest, match=r"^kv_transfer_params: "):
            await of(prompts, CHAT, chat().replace(b"{", b'{"kv\\u005ftransfer_params":1,', 1))
        other: list[object] = [None, {}, {"other": name}, {name: None}, [name], name]
        for given in other:
            await of(prompts, CHAT, chat(vllm_xargs=given, metadata={name: 1}))


@on_loop
async def test_nothing_is_learned_of_requests_with_fields_for_engines() -> None:
    async with door(Mode.LEARN, passes_engine_fields=True) as (prompts, _):
        given = chat(kv_transfer_params={"prompt_token_ids": [1, 2, 3]})
        routed = await of(prompts, CHAT, given)
        assert is_load_only(
            routed, Unknown(Why.CHANGED, "`kv_transfer_params` may change the prompt")
        )
        assert (routed.is_sent_once, routed.on_lengths) == (True, None)
        assert routed.bars_pair == "engine_fields"
        assert not routed.additions.change_answer
        assert json.loads(routed.body) == json.loads(given)
        plain = await of(prompts, CHAT, chat())
        assert (plain.is_sent_once, plain.additions.change_answer) == (False, True)
