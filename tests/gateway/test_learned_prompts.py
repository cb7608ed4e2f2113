"""What is remembered of prompts, held against what a tokenizer says of them."""

import json
import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.hashing import local_hashes
from lean_selector.gateway.learned_prompts import Averages, Chain, Known, PromptMemory
from lean_selector.gateway.model_request import ModelRequest
from lean_selector.gateway.prompt_shapes import Served
from tests.gateway.talking_engine import chat_tokens, tokens_of

BLOCK_SIZE, CHAT = 4, "/v1/chat/completions"
SERVED = Served("m", "default", BLOCK_SIZE, False, {})
Message = dict[str, Any]


def packed(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def chain_of(messages: list[Message], **fields: Any) -> Chain:
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return Chain(SERVED, None, ModelRequest(CHAT, body))


def truth(messages: list[Message], **fields: Any) -> bytes:
    """The block hashes by the tokenizer."""
    return local_hashes(chat_tokens({"messages": messages, **fields}), BLOCK_SIZE)


class Engine:
    """Answers, and has what was learned of it."""

    def __init__(self, most_bytes: int = 1 << 20) -> None:
        self.memory = PromptMemory(most_bytes)
        self.cached: list[bytes] = []  # block hashes of each prompt with its answer

    def answer(self, messages: list[Message], output: list[int], **fields: Any) -> None:
        prompt = chat_tokens({"messages": messages, **fields})
        self.memory.learn(chain_of(messages, **fields), packed(prompt), packed(output))
        self.cached.append(local_hashes(prompt + output, BLOCK_SIZE))

    def known(self, messages: list[Message], **fields: Any) -> Known:
        return self.memory.find(chain_of(messages, **fields))

    def cached_blocks(self, messages: list[Message], **fields: Any) -> int:
        """How many blocks of a prompt were computed before."""
        hashes = truth(messages, **fields)
        return max((common(hashes, each) for each in self.cached), default=0)


def common(one: bytes, other: bytes) -> int:
    count = 0
    while count * 8 < min(len(one), len(other)):
        if one[count * 8 : count * 8 + 8] != other[count * 8 : count * 8 + 8]:
            break
        count += 1
    return count


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


WORD = st.text("abc", min_size=1, max_size=3).map(lambda letters: f" {letters}")
TEXT = st.lists(WORD, min_size=1, max_size=30).map("".join)
TURNS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6)


@given(system=TEXT, turns=TURNS, asks_again=st.booleans())
def test_a_conversation_that_goes_on_is_predicted_as_tokenize_says(
    system: str, turns: list[tuple[str, str]], asks_again: bool
) -> None:
    """All that the engine has of the prompt is predicted, and nothing that is not in it."""
    engine = Engine()
    messages = [said("system", system)]
    for number, (question, answer) in enumerate(turns):
        messages.append(said("user", question))
        hashes, known = truth(messages), engine.known(messages)
        assert not known.is_whole
        if number:
            assert len(known.hashes) // 8 == engine.cached_blocks(messages)
            assert hashes.startswith(known.hashes)
        engine.answer(messages, tokens_of(answer))
        if asks_again:
            known = engine.known(messages)
            assert (known.is_whole, known.hashes) == (True, hashes)
            assert known.tokens == len(chat_tokens({"messages": messages}))
        messages.append(said("assistant", answer))


CUT_WORD = st.text("abc ", min_size=1, max_size=3)
CUT_TEXT = st.lists(CUT_WORD, min_size=1, max_size=30)


@given(
    sessions=st.lists(
        st.lists(st.tuples(TEXT, CUT_TEXT), min_size=1, max_size=5), min_size=1, max_size=4
    ),
    forgets=st.booleans(),
)
def test_whatever_the_answers_a_prompt_asked_before_is_known_and_others_never_too_long(
    sessions: list[list[tuple[str, list[str]]]], forgets: bool
) -> None:
    """Answers whose tokens are not those that their text has later; templates that cut them."""
    arguments = {"chat_template_kwargs": {"forgets_thoughts": forgets}}
    engine = Engine()
    asked: list[list[Message]] = []
    for turns in sessions:
        messages = [said("system", " one system prompt for all")]
        for question, answer in turns:
            messages.append(said("user", question))
            known = engine.known(messages, **arguments)
            assert len(known.hashes) <= 8 * known.tokens // BLOCK_SIZE
            output = [token for word in answer for token in tokens_of(word)]
            engine.answer(messages, output, **arguments)
            asked.append([*messages])
            messages.append(said("assistant", "".join(["a</think>" * forgets, *answer])))
    for before in asked:
        known = engine.known(before, **arguments)
        assert known.is_whole
        assert known.hashes == truth(before, **arguments)


@given(system=TEXT, questions=st.lists(TEXT, min_size=3, max_size=3, unique=True))
def test_what_two_sessions_share_is_known_for_the_third(system: str, questions: list[str]) -> None:
    engine = Engine()
    one, two, three = ([said("system", system), said("user", each)] for each in questions)
    engine.answer(one, [])
    engine.answer(two, [])
    known = engine.known(three)
    assert known.hashes == truth(one)[: 8 * common(truth(one), truth(two))]
    assert not known.is_whole


def test_of_one_session_the_share_of_a_system_prompt_is_guessed() -> None:
    system = said("system", " word" * 400)
    engine = Engine()
    engine.answer([system, said("user", " first")], [])
    known = engine.known([system, said("user", " second question")])
    shared = common(truth([system, said("user", " first")]), truth([system]))
    assert 0.9 * shared <= len(known.hashes) // 8 <= shared + 2


def test_a_model_whose_prompts_do_not_go_on_with_its_answers_is_found_out() -> None:
    """A template that leaves thoughts out: the answer's tokens are no part of the next prompt."""
    arguments = {"chat_template_kwargs": {"forgets_thoughts": True}}
    engine, errors = Engine(), []
    messages = [said("system", " be brief")]
    for number in range(8):
        messages.append(said("user", f" question {number}"))
        blocks = len(engine.known(messages, **arguments).hashes) // 8
        errors.append(abs(blocks - engine.cached_blocks(messages, **arguments)))
        thought = " hm" * 40 + "</think>" + f" answer {number}"
        engine.answer(messages, tokens_of(thought), **arguments)
        messages.append(said("assistant", thought))
    assert errors[1] >= 10  # the first answer was taken for the beginning of the next prompt
    assert max(errors[4:]) <= 1


def test_a_long_text_is_known_up_to_where_another_parts_from_it() -> None:
    """Within a message, too: a document before each question."""
    document = " ".join(f"line{n} of it" for n in range(2_000))
    engine = Engine()
    for question in ("who", "when"):
        engine.answer([said("user", f"{document} {question}")], [])
    shared = common(*(truth([said("user", f"{document} {each}")]) for each in ("who", "when")))
    known = engine.known([said("user", f"{document} where")])
    assert shared - 2048 // BLOCK_SIZE <= len(known.hashes) // 8 <= shared


def test_tools_salts_and_arguments_keep_prompts_apart() -> None:
    engine, messages = Engine(), [said("user", " hello" * 20)]
    engine.answer(messages, [])
    assert engine.known(messages).is_whole
    apart: list[dict[str, Any]] = [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"cache_salt": "s"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"reasoning_effort": "low"},
        {"add_generation_prompt": False},
    ]
    for fields in apart:
        assert engine.known(messages, **fields).hashes == b"", fields
    together: list[dict[str, Any]] = [{"temperature": 0.5}, {"stream": True}, {"max_tokens": 3}]
    for fields in together:
        assert engine.known(messages, **fields).is_whole, fields


@pytest.mark.parametrize("forgets", [False, True])
def test_a_conversation_is_kept_once_also_if_each_turn_is_put_differently_later(
    forgets: bool,
) -> None:
    arguments = {"chat_template_kwargs": {"forgets_thoughts": forgets, "enable_thinking": forgets}}
    engine, messages = Engine(), list[Message]()
    for number in range(40):
        messages.append(said("user", f" question {number}" * 20))
        thought = f" think {number}</think> answer"
        engine.answer(messages, tokens_of(thought), **arguments)
        messages.append(said("assistant", thought))
    for turn in range(1, 80, 2):
        known = engine.known(messages[:turn], **arguments)
        assert (known.is_whole, known.hashes) == (True, truth(messages[:turn], **arguments))
    blocks = len(truth(messages, **arguments)) // 8
    assert engine.memory._hash_bytes < 8 * (2 * blocks + 40)


@given(
    bound=st.integers(min_value=0, max_value=20_000),
    sessions=st.lists(st.lists(TEXT, min_size=1, max_size=6), min_size=1, max_size=8),
)
def test_memory_is_bounded_and_what_is_left_of_it_true(
    bound: int, sessions: list[list[str]]
) -> None:
    engine = Engine(bound)
    for questions in sessions:
        messages: list[Message] = []
        for question in questions:
            messages.append(said("user", question))
            engine.answer(messages, [])
            assert engine.memory.used_bytes <= bound
            known = engine.known(messages)
            assert not known.is_whole or known.hashes == truth(messages)
    runs = {id(entry.run): entry.run for entry in engine.memory._entries.values()}
    tails = sum(len(entry.tail) for entry in engine.memory._entries.values())
    assert engine.memory._hash_bytes == tails + sum(len(run.hashes) for run in runs.values())


def test_what_was_used_last_stays() -> None:
    engine = Engine(40_000)
    kept = [said("user", " kept" * 40)]
    engine.answer(kept, [])
    for number in range(500):
        engine.answer([said("user", f" other{number}" * 40)], [])
        assert engine.known(kept).is_whole
    assert not engine.known([said("user", " other0" * 40)]).is_whole


def test_a_prompt_that_became_other_tokens_is_known_by_the_newest() -> None:
    """Also one that others were seen to go on from: a template may change."""
    memory, first = PromptMemory(1 << 20), [said("user", " one")]
    longer = [*first, said("assistant", " two"), said("user", " three")]
    old, new = list(range(100, 140)), list(range(500, 550))
    memory.learn(chain_of(first), packed(old))
    memory.learn(chain_of(longer), packed([*old, *range(200, 220)]))
    memory.learn(chain_of(first), packed(new))
    known = memory.find(chain_of(first))
    assert (known.is_whole, known.tokens) == (True, len(new))
    assert known.hashes == local_hashes(new, BLOCK_SIZE)


def test_a_long_prompt_keeps_its_hashes_when_what_goes_on_from_it_has_none_of_them() -> None:
    memory, first = PromptMemory(1 << 20), [said("user", " one")]
    longer = [*first, said("assistant", " two")]
    old, new = list(range(1_000, 1_400)), list(range(5_000, 5_500))  # 100 blocks, and 125
    memory.learn(chain_of(first), packed(old))
    memory.learn(chain_of(longer), packed(new))
    for messages, tokens in ((first, old), (longer, new)):
        known = memory.find(chain_of(messages))
        assert (known.is_whole, known.hashes) == (True, local_hashes(tokens, BLOCK_SIZE))


def test_a_prompt_of_no_bytes_says_nothing_of_tokens_per_byte() -> None:
    memory, other = PromptMemory(1 << 20), chain_of([said("user", " word" * 400)])
    before = memory.find(other).tokens
    memory.learn(chain_of([]), packed([1, 2, 3, 4, 5, 6, 7, 8]))
    assert memory.find(chain_of([])).is_whole
    assert memory.find(other).tokens == before + 8  # those that any prompt begins with


@pytest.mark.parametrize("long_ones", [0, 3])
def test_many_short_prompts_and_a_wrong_count_hardly_change_the_estimate_of_a_long_one(
    long_ones: int,
) -> None:
    """The tokens of a short prompt are mostly those of the chat template."""
    averages = Averages()
    for _ in range(long_ones):
        averages.had(12_000, 3_036, 5)
    for _ in range(100):
        averages.had(30, 37, 5)
    averages.had(400, 160_000, 160_000)
    averages.had(12_000, 160_000, 5)
    assert 12_000 * averages.tokens_per_byte == pytest.approx(3_036, rel=0.2)
    assert averages.output_tokens < 300
    for _ in range(20):
        averages.had(8_000, 4_000, 2_000)  # another tokenizer, and longer answers
    assert averages.tokens_per_byte > 0.3
    assert averages.output_tokens == pytest.approx(2_000, rel=0.1)


def test_of_a_thousand_models_the_first_ones_averages_are_forgotten() -> None:
    body = json.dumps({"messages": [said("user", " word" * 100)]}).encode()

    def estimate(model: str) -> int:
        served = Served(model, "default", BLOCK_SIZE, False, {})
        return memory.find(Chain(served, None, ModelRequest(CHAT, body))).tokens

    memory = PromptMemory(1 << 20)
    default = estimate("m")
    for number in range(8):
        memory.learn(chain_of([said("user", f"{number}" * 4_000)]), packed([number] * 4_000))
    assert estimate("m") > 3 * default
    for number in range(1023):
        estimate(f"m{number}")
    assert estimate("m") > 3 * default
    estimate("one more")
    assert estimate("m") == default


def test_a_prompt_that_shares_a_key_with_another_by_chance_is_looked_up_all_the_same() -> None:
    """Keys are hashes of 64 bits; then the ones before it are nobody's."""
    memory, known = PromptMemory(1 << 20), chain_of([said("user", " one")])
    memory.learn(known, packed(list(range(40))))
    other = chain_of([said("user", " two")])
    other.keys[:] = [123, known.keys[-1]]
    assert memory.find(other).hashes == local_hashes(list(range(40)), BLOCK_SIZE)


def test_its_memory_is_what_it_says() -> None:
    engine = Engine(1 << 30)
    chains = []
    for session in range(30):
        messages: list[Message] = []
        for turn in range(20):
            messages.append(said("user", f" word{session}-{turn}" * 60))
            chains.append((chain_of(messages), packed(chat_tokens({"messages": messages}))))
    tracemalloc.start()
    before, _peak = tracemalloc.get_traced_memory()
    for chain, prompt in chains:
        engine.memory.learn(chain, prompt)
    after, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.6 < (after - before) / engine.memory.used_bytes < 1.4


SAME_VALUES = {
    "blanks": '{"messages": [ {"role": "user", "content" : %s} ], "tools": [ {"type": "f"} ]}',
    "another order": '{"tools":[{"type":"f"}],"messages":[{"content":%s,"role":"user"}]}',
    "a part of text": '{"messages":[{"role":"user","content":[{"type":"text","text":%s}]}],'
    '"tools":[{"type":"f"}]}',
    "a part with blanks": '{"messages":[{"role":"user","content":[ {"text":%s, "type":"text"} ]}],'
    '"tools":[{"type":"f"}]}',
    "fields that are null": '{"messages":[{"role":"user","content":%s,"name":null}],'
    '"tools":[{"type":"f"}],"tool_choice":null}',
}


@pytest.mark.parametrize("body", SAME_VALUES.values(), ids=SAME_VALUES)
@pytest.mark.parametrize(
    "text", ['"a/é \\"b\\" \\n"', '"a\\/é \\"b\\" \\n"', '"a/\\u00e9 \\"b\\" \\u000A"']
)
def test_a_prompt_is_known_however_its_values_are_written(body: str, text: str) -> None:
    compact = '{"messages":[{"role":"user","content":"a/é \\"b\\" \\n"}],"tools":[{"type":"f"}]}'
    chains = [
        Chain(SERVED, None, ModelRequest(CHAT, each.encode())) for each in (compact, body % text)
    ]
    assert chains[0].keys == chains[1].keys
    assert chains[0].ends[1] - chains[0].ends[0] == chains[1].ends[1] - chains[1].ends[0]


def test_a_turn_with_calls_is_known_however_it_is_written() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "/"}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    spaced = json.dumps({"messages": [turn]}).encode()
    moved = {each: turn[each] for each in ("tool_calls", "role")}
    compact = json.dumps({"messages": [moved]}, separators=(",", ":")).replace("/", r"\/").encode()
    keys = [Chain(SERVED, None, ModelRequest(CHAT, each)).keys for each in (spaced, compact)]
    assert keys[0] == keys[1]


def test_a_mark_of_caching_that_moves_on_leaves_the_turns_before_as_they_were() -> None:
    def keys(*texts: str) -> list[int]:
        turns: list[Any] = [
            {"role": "user", "content": [{"type": "text", "text": each}] * 2} for each in texts
        ]
        turns[-1]["content"][-1] |= {"cache_control": {"type": "ephemeral"}}
        body = json.dumps({"system": "Be brief.", "messages": turns}).encode()
        return Chain(SERVED, None, ModelRequest("/v1/messages", body)).keys

    assert keys("one", "two")[:3] == keys("one")


@given(one=st.text(max_size=20), other=st.text(max_size=20))
def test_texts_have_one_key_exactly_where_they_are_equal(one: str, other: str) -> None:
    bodies = [
        json.dumps({"prompt": one}, ensure_ascii=True),
        json.dumps({"prompt": [other]}, ensure_ascii=False, separators=(",", ":")),
    ]
    keys = [
        Chain(SERVED, None, ModelRequest("/v1/completions", each.encode())).keys for each in bodies
    ]
    assert (keys[0] == keys[1]) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"role":"user","content":"a"}', '{"role":"user","content":"a","name":"b"}'),
        ('{"role":"user","content":"a"}', '{"role":"system","content":"a"}'),
        (
            '{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}',
            '{"role":"user","content":"ab"}',
        ),
        # Templates write a tool's parameters in their order.
        ('],"tools":[{"parameters":{"a":1,"b":2}}', '],"tools":[{"parameters":{"b":2,"a":1}}'),
    ],
)
def test_other_values_have_other_keys(one: str, other: str) -> None:
    keys = [
        Chain(SERVED, None, ModelRequest(CHAT, f'{{"messages":[{each}]}}'.encode())).keys[-1]
        for each in (one, other)
    ]
    assert keys[0] != keys[1]
