"""The forms of a prompt: which one counts, what is checked, in which order and words."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lean_selector.core.errors import BadRequest
from lean_selector.core.hashing import block_hashes
from lean_selector.core.numbers import MAX_ISL_TOKENS
from lean_selector.core.selection.prompt import Prompt
from lean_selector.wire.prompt_forms import prompt_to_book, prompt_to_select
from lean_selector.wire.scalars import packed
from lean_selector.wire.selection_bodies import PromptFields

I64_MIN, I64_MAX, U64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
decode = msgspec.json.Decoder(PromptFields).decode


def signed(hashes: bytes) -> list[int]:
    at = range(0, len(hashes), 8)
    return [int.from_bytes(hashes[i : i + 8], "little", signed=True) for i in at]


def unsigned(hashes: bytes) -> list[int]:
    return [value % 2**64 for value in signed(hashes)]


def select(body: dict[str, Any] | str, block_size: int = 4, is_eagle: bool = False) -> Prompt:
    text = body if isinstance(body, str) else json.dumps(body)
    return prompt_to_select(decode(text), block_size, is_eagle)


def book(body: dict[str, Any] | str, block_size: int = 4, is_eagle: bool = False) -> Prompt:
    text = body if isinstance(body, str) else json.dumps(body)
    return prompt_to_book(decode(text), block_size, is_eagle)


# -- the hash form ---------------------------------------------------------------------------------


TOO_LONG = "isl_tokens (9007199254740992) exceeds the maximum 9007199254740991"


@pytest.mark.parametrize(
    ("take", "body", "error"),
    [
        (
            select,
            {"block_hashes": None, "sequence_hashes": [1], "isl_tokens": 0},
            "block_hashes is required without token_ids",
        ),
        (
            select,
            {"block_hashes": [1], "sequence_hashes": [1, 2], "isl_tokens": 0},
            "isl_tokens must be greater than 0",
        ),
        (select, {"block_hashes": [], "sequence_hashes": [1], "isl_tokens": 2**53}, TOO_LONG),
        (
            select,
            {"block_hashes": [], "sequence_hashes": [], "isl_tokens": U64_MAX},
            f"isl_tokens ({U64_MAX}) exceeds the maximum {MAX_ISL_TOKENS}",
        ),
        (book, {"sequence_hashes": [1], "isl_tokens": 2**53}, TOO_LONG),
    ],
)
def test_a_prompt_is_checked_in_the_documented_order(
    take: Callable[[dict[str, Any]], Prompt], body: dict[str, Any], error: str
) -> None:
    """Also where the recordings of the reference have it not, as beyond the bound of D6."""
    with pytest.raises(BadRequest) as caught:
        take(body)
    assert caught.value.message == error


# -- tokens ----------------------------------------------------------------------------------------

TOKENS = list(range(10))


def test_lora_eagle_salt_and_multimodal_objects_all_change_the_hashes() -> None:
    mm = [None, {"mm_objects": [{"mm_hash": 9, "offsets": [[0, 1]]}]}]
    variants: list[dict[str, Any]] = [
        *({}, {"lora_name": "a"}, {"lora_name": "b"}, {"cache_salt": "s"}, {"is_eagle": True}),
        {"block_mm_infos": mm},
    ]
    prompts = [select({"token_ids": TOKENS, **extra}) for extra in variants]
    assert len({prompt.local_hashes for prompt in prompts}) == len(variants)
    assert unsigned(prompts[-1].local_hashes) == block_hashes(TOKENS, 4, mm_hashes=[None, [9]])
    assert select({"token_ids": TOKENS, "lora_name": ""}).local_hashes == prompts[0].local_hashes
    assert prompts[1].lora_name == "a"


def test_multimodal_routing_tokens_go_before_tokens_with_their_own_objects() -> None:
    objects = [{"mm_objects": [{"mm_hash": U64_MAX, "offsets": []}]}]
    prompt = select(
        {
            "token_ids": TOKENS,
            "block_mm_infos": [{"mm_objects": [{"mm_hash": 5, "offsets": []}]}],
            "mm_routing_info": {"routing_token_ids": TOKENS[:4], "block_mm_infos": objects},
        }
    )
    assert unsigned(prompt.local_hashes) == block_hashes(TOKENS[:4], 4, mm_hashes=[[U64_MAX]])
    without = select({"mm_routing_info": {"routing_token_ids": TOKENS}, "block_mm_infos": objects})
    assert unsigned(without.local_hashes) == block_hashes(TOKENS, 4)


def test_empty_tokens_are_refused_to_select_and_taken_to_book() -> None:
    with pytest.raises(BadRequest, match="token_ids is empty: isl_tokens must"):  # D7
        select({"token_ids": [], "block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 5})
    prompt = book({"token_ids": []})
    assert (prompt.isl_tokens, prompt.sequence_count, prompt.sequence_hashes()) == (0, 0, b"")


@pytest.mark.parametrize("of_partition", [False, True])
def test_a_request_overrides_whether_its_blocks_are_eagle_blocks(of_partition: bool) -> None:
    eagle = block_hashes(TOKENS, 4, is_eagle=True)
    plain = block_hashes(TOKENS, 4)
    stated = select({"token_ids": TOKENS, "is_eagle": not of_partition}, is_eagle=of_partition)
    silent = select({"token_ids": TOKENS}, is_eagle=of_partition)
    expected = (plain, eagle) if of_partition else (eagle, plain)
    assert (unsigned(stated.local_hashes), unsigned(silent.local_hashes)) == expected


# -- shapes ----------------------------------------------------------------------------------------

BAD_LISTS = [
    *("{}", "[1e2]", "[null]", "[true]", "[{}]", f"[{2**64}]", f"[{-(2**63) - 1}]"),
    f"[{'1' * 5000}]",
]


@pytest.mark.parametrize("field", ["block_hashes", "sequence_hashes"])
def test_a_hash_list_of_the_wrong_shape_is_named_where_it_is_read(field: str) -> None:
    good = {"block_hashes": "[1]", "sequence_hashes": "[1]", "isl_tokens": "4"}
    for bad in BAD_LISTS:
        body = {**good, field: bad}
        text = "{" + ",".join(f'"{name}":{value}' for name, value in body.items()) + "}"
        for normalise in (select, book) if field == "sequence_hashes" else (select,):
            with pytest.raises(msgspec.ValidationError, match=field):
                normalise(text)


def test_other_fields_of_the_wrong_shape_are_refused_at_decoding() -> None:
    """More of them stand in the recordings of the reference."""
    objects = (
        *('{"mm_hash":-1,"offsets":[]}', f'{{"mm_hash":{2**64},"offsets":[]}}'),
        *('{"mm_hash":1,"offsets":[[1]]}', f'{{"mm_hash":1,"offsets":[[0,{2**64}]]}}'),
    )
    for text in (
        '{"mm_routing_info":[[1]]}',
        '{"mm_routing_info":{"routing_token_ids":[1],"block_mm_infos":null}}',
        *(f'{{"block_mm_infos":[{{"mm_objects":[{each}]}}]}}' for each in objects),
    ):
        with pytest.raises(msgspec.ValidationError):
            decode(text)


def test_a_length_beyond_u64_is_a_wrong_shape() -> None:
    for value in (2**64, 10**40):
        for rest in (',"token_ids":[1]', ',"block_hashes":[1],"sequence_hashes":[1]'):
            fields = decode(f'{{"isl_tokens":{value}{rest}}}')
            with pytest.raises(msgspec.ValidationError, match="isl_tokens"):
                prompt_to_select(fields, 4, False)


def test_a_booking_that_teaches_takes_both_hash_lists_as_a_selection_does() -> None:
    body = {"block_hashes": [5, -6], "sequence_hashes": [7, 8], "isl_tokens": 8}
    fields = decode(json.dumps(body))
    prompt = prompt_to_book(fields, 4, False, is_learned=True)
    assert signed(prompt.local_hashes) == [5, -6]
    assert signed(prompt.sequence_hashes()) == [7, 8]


def test_packed_hashes_are_whole_hashes() -> None:
    assert packed("block_hashes", bytes(16)) == bytes(16)
    with pytest.raises(msgspec.ValidationError, match=r"got 7 bytes - at `\$.block_hashes`"):
        packed("block_hashes", bytes(7))
