"""Block hashes: local hashes of single blocks, and sequence hashes of a prompt's prefixes.

The byte layout is that of engines, clients and Dynamo (docs/spec/indexer.md, section 2): XXH3-64
over tokens as u32 little-endian. Inside this program a list of hashes is `bytes`, 8 per block,
little-endian, so that prompts compare at memcmp speed."""

import functools
import struct
from collections.abc import Iterable, Sequence
from itertools import repeat
from types import FunctionType
from typing import Final

from xxhash import xxh3_64_digest, xxh3_64_intdigest

BASE_SEED = 1337
# Prefix of a salt sent to an engine. vLLM's events list the salt, as sent, among the extra keys.
ENGINE_SALT_PREFIX = "dynamo-cache-salt:"
_U64_MASK = (1 << 64) - 1
# One unpack call slices this many blocks; with 64, the slices stay in the first-level cache.
_BLOCKS_PER_STEP = 64


def unmarked_salt(salt: str) -> str:
    """Return a salt without the prefix that it had for the engine. The prefix alone is a salt, too:
    the engine keeps its blocks apart from those without a salt."""
    return salt.removeprefix(ENGINE_SALT_PREFIX) or salt


def hash_seed(lora_name: str | None = None, cache_salt: str | None = None) -> int:
    """Return the seed (u64) of local hashes, which depends on the LoRA adapter and cache salt."""
    seed = BASE_SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(), 1)
    return seed & _U64_MASK


def local_hashes(
    tokens: Sequence[int],
    block_size: int,
    seed: int = BASE_SEED,
    mm_hashes: Sequence[Sequence[int] | None] | None = None,
    is_eagle: bool = False,
) -> bytes:
    """Return the local hash (8 bytes) of each complete block of `tokens`.

    `mm_hashes` has, per block, the u64 hashes of the block's multimodal objects, in any order. It
    may omit blocks at the end. With `is_eagle`, a block's hash also covers the next token. Raises
    ValueError for a block size below 1, tokens outside u32 and mm hashes outside u64."""
    return any_local_hashes(packed_tokens(tokens), block_size, seed, mm_hashes, is_eagle)


def packed_tokens(tokens: Sequence[int]) -> bytes:
    """Pack tokens to 4 bytes each, little-endian. Raises ValueError for tokens outside u32."""
    try:
        return _tokens(len(tokens)).pack(*tokens)
    except struct.error as error:
        raise ValueError("token ids must be integers from 0 to 4294967295") from error


def any_local_hashes(
    data: bytes,
    block_size: int,
    seed: int = BASE_SEED,
    mm_hashes: Sequence[Sequence[int] | None] | None = None,
    is_eagle: bool = False,
) -> bytes:
    """Like `local_hashes`, for tokens that are packed to 4 bytes each, little-endian."""
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    if not (is_eagle or mm_hashes):
        return packed_local_hashes(data, block_size, seed)
    blocks = max(0, (len(data) >> 2) - is_eagle) // block_size
    used = blocks * block_size + is_eagle if blocks else 0
    slices = _odd_slices(data[: 4 * used], 4 * block_size, 4 * is_eagle, mm_hashes or ())
    return _pack(xxh3_64_intdigest(block, seed) for block in slices)


def packed_local_hashes(data: bytes, block_size: int, seed: int) -> bytes:
    """Return each full block's local hash. `data` has 4 bytes per token; block_size must be > 0."""
    width, digests = 4 * block_size, list[int]()
    if len(data) == width:  # one block, as a decoding engine usually sends
        return xxh3_64_intdigest(data, seed).to_bytes(8, "little")
    blocks = len(data) // width
    for start in range(0, blocks, _BLOCKS_PER_STEP):
        step = _step(width, min(_BLOCKS_PER_STEP, blocks - start))
        digests += map(xxh3_64_intdigest, step.unpack_from(data, start * width), repeat(seed))
    return u64s(blocks).pack(*digests)


@functools.lru_cache(maxsize=256)  # prompts have any length, but events usually one of a few
def _tokens(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


@functools.lru_cache(maxsize=256)
def u64s(count: int) -> struct.Struct:
    """Return a cached struct.Struct that packs `count` hashes as little-endian u64."""
    return struct.Struct(f"<{count}Q")


@functools.lru_cache(maxsize=256)  # by block size (a fleet has one or two) and count
def _step(width: int, count: int) -> struct.Struct:
    return struct.Struct(f"{width}s" * count)


_eights: Final = struct.Struct("8s").iter_unpack


def sequence_hashes_bytes(local: bytes) -> bytes:
    """Return the sequence hash of each prefix that ends with a block, from the blocks' local
    hashes. Argument and result have 8 bytes per block.

    The first sequence hash is the first local hash. The seed of the others is always 1337, even if
    the local hashes have another seed."""
    previous = local[:8]
    chain = [previous]
    for (block,) in _eights(local[8:]):
        previous = xxh3_64_digest(previous + block, BASE_SEED)[::-1]
        chain.append(previous)
    return b"".join(chain)


def block_hashes(
    tokens: Sequence[int],
    block_size: int,
    lora_name: str | None = None,
    cache_salt: str | None = None,
    mm_hashes: Sequence[Sequence[int] | None] | None = None,
    is_eagle: bool = False,
) -> list[int]:
    """Return the local hash of each full block, as an unsigned integer. See `local_hashes`."""
    seed = hash_seed(lora_name, cache_salt)
    return _unpack(local_hashes(tokens, block_size, seed, mm_hashes, is_eagle))


def sequence_hashes(block_hashes: Sequence[int]) -> list[int]:
    """Hash each prefix that ends with a block. Raises ValueError if a block hash is not a u64."""
    return _unpack(sequence_hashes_bytes(_pack(block_hashes)))


def _odd_slices(
    data: bytes, stride: int, extra: int, mm_hashes: Sequence[Sequence[int] | None]
) -> Iterable[bytes]:
    for index, start in enumerate(range(0, len(data) - extra, stride)):
        block = data[start : start + stride + extra]
        objects = mm_hashes[index] if index < len(mm_hashes) else None
        yield block + _pack(sorted(objects)) if objects else block


def _pack(hashes: Iterable[int]) -> bytes:
    values = tuple(hashes)
    try:
        return struct.pack(f"<{len(values)}Q", *values)
    except struct.error as error:
        raise ValueError("hashes must be integers from 0 to 18446744073709551615") from error


def _unpack(hashes: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(hashes) // 8}Q", hashes))


def common_prefix(label: bytes | bytearray, at: int, hashes: bytes, start: int) -> int:
    """Compare `label` from byte `at` on with `hashes` from byte `start` on. Return the length of
    the common prefix in bytes, rounded down to whole blocks. Uses a binary search: for 815 blocks,
    10 comparisons by memcmp."""
    low, high = 0, min(len(label) - at, len(hashes) - start) & ~7
    if label[at : at + high] == hashes[start : start + high]:
        return high
    while high - low > 8:  # equal up to `low`, and differ before `high`
        middle = low + high >> 4 << 3
        if label[at + low : at + middle] == hashes[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low


def unpack_signed(hashes: bytes) -> tuple[int, ...]:
    """Unpack hashes of 8 bytes each to signed integers, as in JSON."""
    return struct.unpack(f"<{len(hashes) // 8}q", hashes)


# -- whether the core runs compiled ----------------------------------------------------------------
# Whether the core runs compiled. Some code is fast compiled and slow interpreted, or the reverse.


def _probe() -> None:
    """Does nothing. IS_COMPILED is found by testing whether mypyc has compiled this function."""


IS_COMPILED = not isinstance(_probe, FunctionType)
