"""Golden values are those that the reference computed (tests/data/hash_vectors.json, and its
events).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_selector.core.hashing import (
    block_hashes,
    common_prefix,
    hash_seed,
    local_hashes,
    sequence_hashes,
    sequence_hashes_bytes,
)

VECTORS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "hash_vectors.json").read_text()
)["vectors"]
U64 = 2**64


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vectors_of_the_reference_hold(vector: dict[str, Any]) -> None:
    lora_name, cache_salt = vector["lora_name"], vector["cache_salt"]
    assert hash_seed(lora_name, cache_salt) == vector["block_hash_seed"]
    local = block_hashes(
        vector["tokens"],
        vector["block_size"],
        lora_name,
        cache_salt,
        vector["mm_hashes_per_block"],
        vector["is_eagle"],
    )
    assert local == vector["local_block_hashes"]
    assert sequence_hashes(local) == vector["sequence_hashes"]


def test_a_long_prompt_hashes_block_by_block() -> None:
    tokens = range(1000, 1000 + 4 * 200 + 3)
    alone = [block_hashes(tokens[start : start + 4], 4)[0] for start in range(0, 800, 4)]
    assert block_hashes(tokens, 4) == alone


def test_a_salt_changes_the_seed_as_the_newer_reference_does() -> None:
    expected = [5728354201622468629, 3103195633695993164]
    assert block_hashes(range(1, 9), 4, cache_salt="s") == expected
    assert hash_seed("", "") == hash_seed(None, None) == 1337
    added = hash_seed("ad") + hash_seed(None, "s") - 1337
    assert hash_seed("ad", "s") == added % U64


@pytest.mark.parametrize("token", [-1, 2**32, 1.0, "1", None])
def test_tokens_outside_u32_are_refused(token: Any) -> None:
    with pytest.raises(ValueError, match="token ids"):
        local_hashes([1, 2, 3, token], 4)


@pytest.mark.parametrize("value", [-1, U64])
def test_hashes_outside_u64_are_refused(value: int) -> None:
    with pytest.raises(ValueError, match="hashes must be"):
        sequence_hashes([1, value])


def test_a_block_holds_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="block_size"):
        local_hashes([1], 0)


def test_no_block_no_hash() -> None:
    assert sequence_hashes_bytes(b"") == local_hashes([], 4) == b""
    assert sequence_hashes([]) == []


def test_a_common_prefix_is_counted_in_whole_blocks() -> None:
    blocks = b"".join(number.to_bytes(8, "little") for number in range(1, 13))
    label = bytearray(blocks)
    for same in range(12):
        other = blocks[: same << 3] + b"\xff" * 8 + blocks[same + 1 << 3 :]
        assert common_prefix(label, 0, other, 0) == same << 3
    assert common_prefix(label, 8, blocks, 8) == len(blocks) - 8
    assert common_prefix(label, 8, blocks[8:24], 0) == 16
