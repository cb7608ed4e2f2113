"""Bodies with a prompt say the same whether their lists are cut out or decoded with the rest."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lean_selector.api.bodies import MSGPACK, BadBody, body_reader
from lean_selector.core.errors import BadRequest
from lean_selector.wire.body_text import LONG_PROMPT_BYTES, long_binary_reader, long_json_reader
from lean_selector.wire.prompt_forms import binary_form, prompt_to_select
from lean_selector.wire.selection_bodies import PromptFields
from tests.support.gates import request

Body = bytes | bytearray
Read = Callable[[Body], PromptFields | None]

I64_MIN, I64_MAX, U64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
BinaryFields: type[PromptFields] = binary_form(PromptFields)

read_long_json: Read = long_json_reader(PromptFields)
read_json = msgspec.json.Decoder(PromptFields).decode
read_long_binary: Read = long_binary_reader(BinaryFields)
read_binary = msgspec.msgpack.Decoder(BinaryFields).decode


def what_it_says(
    read: Read, otherwise: Callable[[Body], PromptFields], body: Body
) -> tuple[object, ...]:
    """The prompt of a body as the gate has it read, or how it is refused and in which words."""
    try:
        fields = read(body) or otherwise(body)
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


def nothing(body: Body) -> None:
    return None


def check_json(body: bytes) -> None:
    plain = what_it_says(nothing, read_json, body)
    assert what_it_says(read_long_json, read_json, body) == plain
    assert what_it_says(read_long_json, read_json, bytearray(body)) == plain


# -- JSON ------------------------------------------------------------------------------------------

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
    check_json(body)


def read_by_the_gate(content_type: bytes) -> Callable[[Body], PromptFields]:
    read = body_reader(PromptFields)

    def read_body(body: Body) -> PromptFields:
        try:
            return read(request("POST", "/", body, content_type=content_type))
        except BadBody as refused:
            raise BadRequest(str(refused)) from None

    return read_body


read_any_binary = read_by_the_gate(MSGPACK)


@pytest.mark.parametrize("pad", [0, LONG_PROMPT_BYTES])
@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        pytest.param([1.5], [2**60] * 16, 422, id="of the wrong shape"),
        pytest.param([7] * 3, [2**60] * 16, 5, id="of another length"),
        pytest.param([7], b"8 bytes." * 16, 5, id="a list before a bin"),
        pytest.param([2**60] * 16, [1.5], 422, id="the last of the wrong shape"),
        pytest.param([2**60] * 16, None, 400, id="the last absent"),
    ],
)
def test_of_a_repeated_list_of_messagepack_the_last_counts_too(
    first: object, last: object, says: int, pad: int
) -> None:
    parts = [("block_hashes", first), ("isl_tokens", 5), ("sequence_hashes", [2**60] * 16)]
    parts += [("block_hashes", last), ("pad", "x" * pad)]
    encode = msgspec.msgpack.encode
    body = bytes([0x80 + len(parts)]) + b"".join(encode(k) + encode(v) for k, v in parts)
    assert what_it_says(nothing, read_any_binary, body)[0] == says


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
        check_json(spaced.encode())


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


# -- MessagePack -----------------------------------------------------------------------------------


def check_binary(body: bytes) -> None:
    plain = what_it_says(nothing, read_binary, body)
    assert what_it_says(read_long_binary, read_binary, body) == plain
    assert what_it_says(read_long_binary, read_binary, bytearray(body)) == plain


wide = st.one_of(st.integers(I64_MIN, -(2**31) - 1), st.integers(2**32, U64_MAX))
arrays = st.one_of(
    st.lists(wide, min_size=16, max_size=20),
    st.lists(wide, min_size=10, max_size=10).map(lambda values: values * 30),
    st.lists(st.one_of(wide, st.integers(-5, 5)), min_size=16, max_size=20),
    st.lists(wide, max_size=4),
    st.binary(max_size=20),
    st.sampled_from([None, 5, "x", [1.5] * 20, [[2**60] * 20], [None] * 16]),
)
WIDE = list(range(2**60, 2**60 + 20))
pairs = st.tuples(st.sampled_from([*KEYS, "x", "¬block_hashes", "model_name"]), arrays)


@given(
    st.lists(st.one_of(pairs, st.just(("isl_tokens", 5))), max_size=5),
    st.integers(-3, 3),
    st.sampled_from([b"", b"\xc1", b"\xff" * 9]),
)
@example([("block_hashes", WIDE), ("sequence_hashes", WIDE), ("isl_tokens", 5)], 0, b"")
@example([("sequence_hashes", WIDE), ("block_hashes", WIDE), ("isl_tokens", 5)], 0, b"")
@example([("¬block_hashes", WIDE), ("sequence_hashes", WIDE)], 0, b"")
def test_a_messagepack_body_says_the_same_however_it_is_read(
    parts: list[tuple[str, Any]], cut: int, more: bytes
) -> None:
    encode = msgspec.msgpack.encode
    body = bytes([0x80 + len(parts)]) + b"".join(encode(k) + encode(v) for k, v in parts)
    check_binary((body[:cut] if cut < 0 else body) + more)


@given(st.lists(wide, min_size=16, max_size=16), st.binary(max_size=8), st.integers(0, 99))
def test_a_broken_array_is_no_array(values: list[int], noise: bytes, at: int) -> None:
    fields = {"isl_tokens": 5, "block_hashes": values, "sequence_hashes": values}
    body = bytearray(msgspec.msgpack.encode(fields))
    body[at : at + len(noise)] = noise
    check_binary(bytes(body))


def test_arrays_of_wide_integers_of_either_sign_are_cut_out() -> None:
    values = [-(2**63), -(2**31) - 1, 2**32, I64_MAX, I64_MAX + 1, U64_MAX - 2**40] * 3
    signed = [value - 2**64 if value > I64_MAX else value for value in values]
    for given_values in (values, signed):
        body = {"block_hashes": given_values, "sequence_hashes": given_values, "isl_tokens": 1}
        fields = read_long_binary(msgspec.msgpack.encode(body))
        assert fields is not None
        expected = b"".join(value.to_bytes(8, "little", signed=True) for value in signed)
        assert fields.block_hashes == fields.sequence_hashes == expected
