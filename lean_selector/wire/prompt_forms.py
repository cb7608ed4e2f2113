"""The forms in which a request can give its prompt, and their conversion to a `Prompt`.

The order of the checks and the error texts follow spec selection.md 1.4: multimodal routing info,
then token ids, then hashes with `isl_tokens`. The first form that is present is used."""

from typing import Any

import msgspec

from lean_selector.core.errors import BadRequest
from lean_selector.core.hashing import (
    any_local_hashes,
    hash_seed,
    local_hashes,
    sequence_hashes_bytes,
)
from lean_selector.core.numbers import MAX_ISL_TOKENS, check_u64
from lean_selector.core.selection.prompt import Prompt
from lean_selector.wire.scalars import is_absent, packed
from lean_selector.wire.selection_bodies import PromptFields


def binary_form(body_type: type[Any]) -> type[Any]:
    """Return a subclass of `body_type` for MessagePack, with hash lists as int arrays or `bin`."""
    return _with_hash_lists(body_type, "Binary", bytes | tuple[int, ...] | None)


def short_form(body_type: type[Any]) -> type[Any]:
    """Return a subclass of `body_type` for short JSON bodies, with hash lists as Python lists."""
    return _with_hash_lists(body_type, "Short", list[int] | None)


def _with_hash_lists(body_type: type[Any], prefix: str, hashes: object) -> type[Any]:
    return msgspec.defstruct(
        f"{prefix}{body_type.__name__}",
        [("block_hashes", hashes, None), ("sequence_hashes", hashes, None)],
        bases=(body_type,),
        kw_only=True,
    )


def prompt_to_select(
    fields: PromptFields, block_size: int, is_eagle: bool, *, may_be_empty: bool = False
) -> Prompt:
    """Return a request's prompt in a form that can be looked up in the index. Raises BadRequest for
    an invalid prompt, and msgspec.ValidationError for a field of wrong type. `may_be_empty` allows
    an empty list of tokens."""
    if fields.token_ids is not None or fields.mm_routing_info is not None:
        prompt = _from_tokens(fields, block_size, is_eagle)
        if prompt is not None:
            if prompt.isl_tokens == 0 and not may_be_empty:
                raise BadRequest("token_ids is empty: isl_tokens must be greater than 0")
            return prompt
    return _from_hashes(fields, with_local=True)


def prompt_to_book(
    fields: PromptFields, block_size: int, is_eagle: bool, *, is_learned: bool = False
) -> Prompt:
    """Return the prompt, which may be empty, of a request to POST /reservations. Block hashes are
    read only if `is_learned`, which means that reserved prompts are assumed to be cached."""
    prompt = _from_tokens(fields, block_size, is_eagle)
    if prompt is not None:
        return prompt
    with_local = is_learned and not is_absent(fields.block_hashes)
    return _from_hashes(fields, with_local=with_local)


def _from_hashes(fields: PromptFields, *, with_local: bool) -> Prompt:
    """Return a prompt given as `sequence_hashes` and, if `with_local`, also as `block_hashes`."""
    local = b""
    if with_local:
        if is_absent(fields.block_hashes):
            raise BadRequest("block_hashes is required without token_ids")
        local = packed("block_hashes", fields.block_hashes)
    if is_absent(fields.sequence_hashes):
        raise BadRequest("sequence_hashes is required without token_ids")
    sequence, isl_tokens = packed("sequence_hashes", fields.sequence_hashes), fields.isl_tokens
    if isl_tokens is None:
        raise BadRequest("isl_tokens is required without token_ids")
    if isl_tokens > MAX_ISL_TOKENS:
        check_u64("isl_tokens", isl_tokens)
        raise BadRequest(f"isl_tokens ({isl_tokens}) exceeds the maximum {MAX_ISL_TOKENS}")
    count = len(sequence) // 8
    if with_local and isl_tokens == 0:
        raise BadRequest("isl_tokens must be greater than 0")
    if with_local and len(local) != len(sequence):
        raise BadRequest(
            f"block_hashes length {len(local) // 8} must match sequence_hashes length {count}"
        )
    return Prompt(isl_tokens, local, count, sequence[:8], sequence, fields.lora_name)


def _from_tokens(fields: PromptFields, block_size: int, is_eagle: bool) -> Prompt | None:
    """Return a prompt given as tokens, or None if the request has no tokens."""
    info = fields.mm_routing_info
    if info is not None and info.routing_token_ids:
        tokens: list[int] | bytes = info.routing_token_ids
        mm_infos = info.block_mm_infos
    elif fields.token_ids is not None:
        tokens, mm_infos = fields.token_ids, fields.block_mm_infos or []
    else:
        return None
    if fields.isl_tokens is not None:
        check_u64("isl_tokens", fields.isl_tokens)
    if fields.is_eagle is not None:
        is_eagle = fields.is_eagle
    mm_hashes = [
        None if block is None else [item.mm_hash for item in block.mm_objects] for block in mm_infos
    ]
    seed = hash_seed(fields.lora_name, fields.cache_salt)
    if isinstance(tokens, bytes):
        count = len(tokens) >> 2
        local = any_local_hashes(tokens, block_size, seed, mm_hashes or None, is_eagle)
    else:
        count = len(tokens)
        local = local_hashes(tokens, block_size, seed, mm_hashes or None, is_eagle)
    return Prompt(
        count,
        local,
        len(local) // 8,
        local[:8],
        lambda: sequence_hashes_bytes(local),
        fields.lora_name,
    )
