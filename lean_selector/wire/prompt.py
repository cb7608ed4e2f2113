"""The forms in which a request may state its prompt, and their normalisation to one.

Order and texts of the checks follow spec selection.md 1.4: multimodal routing info, then token
ids, then hashes with `isl_tokens`; the first form present decides, the others are checked for
their shape and otherwise ignored. Knows nothing of workers.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from lean_selector.core.errors import BadRequest
from lean_selector.core.hashing import hash_seed, local_hashes, sequence_hashes_bytes
from lean_selector.core.prompt import Prompt
from lean_selector.wire.scalars import (
    U32,
    U64_MAX,
    HashListHead,
    NonNegative,
    check_u64,
    hashes_from_json,
)
from lean_selector.wire.scope import Scoped

# Above this JSON numbers lose exactness in many clients, and sums could leave the range of a u64.
MAX_ISL_TOKENS = 2**53 - 1
_ABSENT = Raw(b"")


def _is_absent(raw: Raw) -> bool:
    return raw is _ABSENT or (len(memoryview(raw)) == 4 and bytes(raw) == b"null")


class MmObject(msgspec.Struct, frozen=True):
    mm_hash: NonNegative
    offsets: list[Annotated[list[NonNegative], Meta(min_length=2, max_length=2)]]

    def __post_init__(self) -> None:
        check_u64("mm_hash", self.mm_hash)
        for offset in self.offsets:
            check_u64("offsets[...]", max(offset))


class BlockMmInfo(msgspec.Struct, frozen=True):
    mm_objects: list[MmObject]


class MmRoutingInfo(msgspec.Struct, frozen=True):
    routing_token_ids: list[U32]
    block_mm_infos: list[BlockMmInfo | None] = []


class PromptFields(Scoped, kw_only=True):
    """The prompt part that the bodies of five routes share. `null` is the same as absent."""

    token_ids: list[U32] | None = None
    mm_routing_info: MmRoutingInfo | None = None
    block_mm_infos: list[BlockMmInfo | None] | None = None
    block_hashes: Raw = _ABSENT
    sequence_hashes: Raw = _ABSENT
    isl_tokens: NonNegative | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    is_eagle: bool | None = None

    def check_shape(self) -> None:
        """Raises msgspec.ValidationError for what decoding leaves unchecked, because a request
        that succeeds meets it anyway: the hash lists, and integers beyond 2**64 - 1."""
        _check_ignored(self, "block_hashes")
        _check_ignored(self, "sequence_hashes")
        if self.isl_tokens is not None:
            check_u64("isl_tokens", self.isl_tokens)


def prompt_to_select(fields: PromptFields, block_size: int, is_eagle: bool) -> Prompt:
    """The prompt of a route that matches it against the index.

    Raises BadRequest in the documented words; msgspec.ValidationError for a wrong shape.
    """
    prompt = _from_tokens(fields, block_size, is_eagle)
    if prompt is not None:
        if prompt.isl_tokens == 0:
            raise BadRequest("isl_tokens must be greater than 0")
        return prompt
    if _is_absent(fields.block_hashes):
        _check_ignored(fields, "sequence_hashes")
        raise BadRequest("block_hashes is required without token_ids")
    local = hashes_from_json("block_hashes", fields.block_hashes)
    isl_tokens, head = _sequence_part(fields)
    if isl_tokens == 0:
        raise BadRequest("isl_tokens must be greater than 0")
    if len(local) != 8 * head.count:
        raise BadRequest(
            f"block_hashes length {len(local) // 8} must match sequence_hashes length {head.count}"
        )
    return Prompt(isl_tokens, local, head.count, head.first, head.packed, fields.lora_name)


def prompt_to_book(fields: PromptFields, block_size: int, is_eagle: bool) -> Prompt:
    """The prompt of `/reservations`: block hashes are not looked at, and it may be empty."""
    prompt = _from_tokens(fields, block_size, is_eagle)
    if prompt is not None:
        return prompt
    _check_ignored(fields, "block_hashes")
    isl_tokens, head = _sequence_part(fields)
    return Prompt(isl_tokens, b"", head.count, head.first, head.packed, fields.lora_name)


def _sequence_part(fields: PromptFields) -> tuple[int, HashListHead]:
    if _is_absent(fields.sequence_hashes):
        raise BadRequest("sequence_hashes is required without token_ids")
    head = HashListHead("sequence_hashes", fields.sequence_hashes)
    isl_tokens = fields.isl_tokens
    if isl_tokens is None:
        raise BadRequest("isl_tokens is required without token_ids")
    if isl_tokens > MAX_ISL_TOKENS:
        if isl_tokens > U64_MAX:
            raise msgspec.ValidationError(f"Expected `int` <= {U64_MAX} - at `$.isl_tokens`")
        raise BadRequest(f"isl_tokens ({isl_tokens}) exceeds the maximum {MAX_ISL_TOKENS}")
    return isl_tokens, head


def _from_tokens(fields: PromptFields, block_size: int, is_eagle: bool) -> Prompt | None:
    """The prompt when it is stated by tokens, else None."""
    info = fields.mm_routing_info
    if info is not None and info.routing_token_ids:
        tokens, mm_infos = info.routing_token_ids, info.block_mm_infos
    elif fields.token_ids is not None:
        tokens, mm_infos = fields.token_ids, fields.block_mm_infos or []
    else:
        return None
    _check_ignored(fields, "block_hashes")
    _check_ignored(fields, "sequence_hashes")
    if fields.isl_tokens is not None:
        check_u64("isl_tokens", fields.isl_tokens)
    if fields.is_eagle is not None:
        is_eagle = fields.is_eagle
    mm_hashes = [
        None if block is None else [item.mm_hash for item in block.mm_objects] for block in mm_infos
    ]
    seed = hash_seed(fields.lora_name, fields.cache_salt)
    local = local_hashes(tokens, block_size, seed, mm_hashes or None, is_eagle)
    return Prompt(
        len(tokens),
        local,
        len(local) // 8,
        local[:8],
        lambda: sequence_hashes_bytes(local),
        fields.lora_name,
    )


def _check_ignored(fields: PromptFields, name: str) -> None:
    """A hash list that another form makes irrelevant must still be one."""
    raw: Raw = getattr(fields, name)
    if not _is_absent(raw):
        hashes_from_json(name, raw)
