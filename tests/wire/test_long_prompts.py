"""Bodies with a prompt say the same whether their lists are cut out or decoded with the rest."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lean_selector.core.errors import BadRequest
from lean_selector.wire.body_text import long_json_reader
from lean_selector.wire.prompt_forms import prompt_to_select
from lean_selector.wire.selection_bodies import PromptFields

Body = bytes | bytearray
Read = Callable[[Body], PromptFields | None]

I64_MIN, I64_MAX = -(2**63), 2**63 - 1

read_long_json: Read = long_json_reader(PromptFields)
read_json = msgspec.json.Decoder(PromptFields).decode


def what_it_says(read: Read, body: Body) -> tuple[object, ...]:
    """The prompt of a body as the gate has it read, or how it is refused and in which words."""
    try:
        fields = read(body) or read_json(body)
        prompt = prompt_to_select(fields, 4, False)
    except msgspec.ValidationError as error:
        return 422, str(error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return 400, str(error)
    except BadRequest as error:
        return 400, error.message
    return (
        *(prompt.isl_tokens, prompt.local_hashes, prompt.sequence_count),
        *(prompt.first_sequence_hash, prompt.sequence_hashes(), prompt.lora_name),
    )


def check(body: bytes) -> None:
    plain = what_it_says(lambda _: None, body)
    assert what_it_says(read_long_json, body) == plain
    assert what_it_says(read_long_json, bytearray(body)) == plain


lists = st.one_of(
    st.lists(st.integers(I64_MIN, I64_MAX), max_size=5).map(json.dumps),
    st.lists(st.integers(0, 2**32 - 1), max_size=5).map(json.dumps),
    st.sampled_from(
        ["[]", "[1,2,3]", "[4,5,6]", "[ -5 , 7 ]", "[1,,2]", "[1", "null", '"[1]"', "[[1],2]"]
    ),
    st.sampled_from(
        ["[01]", "{}", "[1.0]", "[1e400]", f"[{2**63}]", f"[{2**32}]", '["]",1]', "[é]"]
    ),
)
KEYS = ("block_hashes", "sequence_hashes", "token_ids", "isl_tokens")
keys = st.sampled_from([*KEYS, *KEYS, "x", "block_hashe\\u0073", 'x\\"block_hashes', "model_name"])
members = st.one_of(
    st.builds('"{}":{}'.format, keys, lists),
    st.builds('"{}": {}'.format, keys, lists),
    st.builds('"{}" :\n{}'.format, keys, lists),
    st.builds('"x":{{"{}":{}}}'.format, keys, lists),
    st.builds('"x":"\\"{}\\":{}"'.format, keys, st.sampled_from(["[1]", "1"])),
    st.just('"isl_tokens":5'),
    st.just('"isl_tokens":"five"'),
    st.just('"x":"block_hashes"'),
    st.just('"x":1e400'),
    st.just('"lora_name":"é"'),
    st.builds('"x":{}'.format, st.sampled_from(["[" * 3000, "[" * 2000 + "]" * 2000])),
    st.just('"mm_routing_info":{"routing_token_ids":[1,2,3,4]}'),
    st.builds('"{}":"{}"'.format, st.just("pad"), st.sampled_from(["x" * 600, "x" * 5000])),
    st.builds('"x":[{}1]'.format, st.sampled_from(["1e99," * 3000, "1e-300," * 1001])),
    st.just(f'"x":"{"e" * 200_000}"'),
)
bodies = st.builds(
    lambda parts, end: ("{" + ",".join(parts) + end).encode(),
    st.lists(members, max_size=5),
    st.sampled_from(["}", "}", "}", "} ", "", "}x", "},", "\ufeff"]),
)


@given(bodies)
@example(b'{"block_hashes":[1],"sequence_hashes":[2],"isl_tokens":5}')
@example(b'{"sequence_hashes":[1],"isl_tokens":5,"block_hashes":[2]}')
@example(b'{"block_hashes":[1],"sequence_hashes":[2],"isl_tokens":5,"block_hashes":[3]}')
@example(b'{"block_hashes":[1],"sequence_hashes":[2],"isl_tokens":5,"block_hashes":"x"}')
@example(b'{"block_hashes":[1],"sequence_hashes":[2],"isl_tokens":5,"sequence_hashes":[3]}')
@example(b'{"block_hashes":"x","isl_tokens":5,"block_hashes":[1],"sequence_hashes":[2]}')
@example(b'{"x":{"block_hashes":[1]},"sequence_hashes":[2],"isl_tokens":5}')
@example(b'{"sequence_hashes":[1,"block_hashes":[2],"isl_tokens":5}')
@example(b'{"token_ids":[1,2,3,4],"block_hashes":[1],"sequence_hashes":[2]}')
@example(b'{"token_ids":[1,2,3,4],"token_ids":[1,2,3,4,5,6,7,8]}')
@example(b'{"token_ids":[4294967296]}')
@example(b'{"x":{"token_ids":[1]},"isl_tokens":5}')
def test_a_json_body_says_the_same_however_it_is_read(body: bytes) -> None:
    check(body)


HASHES = list(range(2**62, 2**62 + 300))


@pytest.mark.parametrize(
    ("body", "cut"),
    [
        pytest.param({"block_hashes": HASHES, "sequence_hashes": HASHES}, True, id="both lists"),
        pytest.param({"sequence_hashes": HASHES, "block_hashes": HASHES}, True, id="in any order"),
        pytest.param({"sequence_hashes": HASHES, "worker_id": 1}, True, id="one list"),
        pytest.param({"token_ids": HASHES}, False, id="what is no token"),
        pytest.param({"token_ids": [5] * 900}, True, id="tokens"),
        pytest.param({"x": "y" * 600, "token_ids": [5] * 900}, True, id="tokens further on"),
        pytest.param({"block_hashes": HASHES, "x": "y" * 5000}, True, id="much beside the lists"),
        pytest.param(
            {"block_hashes": HASHES, "allowed_worker_ids": HASHES}, True, id="another long list"
        ),
        pytest.param({"block_hashes": HASHES, "x": "y" * 2**17}, False, id="most beside the lists"),
        pytest.param({"block_hashes": HASHES, "x": [1e-300] * 1001}, False, id="slow to read"),
        pytest.param({"block_hashes": HASHES, "x": [1e-300] * 1000}, True, id="as slow as it may"),
        pytest.param({"x": [1e-300] * 1001, "token_ids": [5] * 900}, False, id="slow, and tokens"),
        pytest.param({"block_hashes": HASHES, "lora_name": "é"}, False, id="more than ASCII"),
        pytest.param({"x": {"block_hashes": HASHES}}, False, id="another field's part"),
        pytest.param({"block_hashes": [HASHES]}, False, id="a list in a list"),
        pytest.param({"block_hashes": [2**63]}, False, id="out of range"),
        pytest.param({"model_name": "m"}, False, id="no list"),
    ],
)
def test_the_lists_of_a_body_in_good_order_are_cut_out(body: dict[str, Any], cut: bool) -> None:
    text = json.dumps(body, ensure_ascii=False)
    for spaced in (text, text.replace(": ", ":")):
        fields = read_long_json(spaced.encode())
        assert (fields is not None) is cut
        check(spaced.encode())


def test_what_stands_in_a_lists_place_cannot_be_guessed_from_outside() -> None:
    """A body with the very same words in it is read plainly."""
    seen: list[bytes] = []

    class Listening(PromptFields, kw_only=True):
        def __post_init__(self) -> None:
            assert isinstance(self.block_hashes, msgspec.Raw)
            seen.append(bytes(self.block_hashes))

    assert long_json_reader(Listening)(b'{"block_hashes":[1]}') is not None
    assert seen[0] != b"[1]"
    assert len(seen[0]) == 34, "128 random bits, quoted"
    fields = read_long_json(b'{"block_hashes":%b,"sequence_hashes":[2],"isl_tokens":1}' % seen[0])
    assert fields is not None
    with pytest.raises(msgspec.ValidationError, match="block_hashes"):
        prompt_to_select(fields, 4, False)
