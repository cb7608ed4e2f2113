"""The forms in which a request may state its prompt, and their normalisation to one.

Order and texts of the checks follow spec selection.md 1.4: multimodal routing info, then token
ids, then hashes with `isl_tokens`; the first form present decides, the others are checked for
their shape and otherwise ignored. Knows nothing of workers.
"""

import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from lean_selector.core.errors import BadRequest
from lean_selector.core.hashing import hash_seed, local_hashes, sequence_hashes_bytes
from lean_selector.core.limits import MAX_ISL_TOKENS, U64_MAX
from lean_selector.core.selection.prompt import Prompt
from lean_selector.wire.hash_lists import check_ignored, is_absent, packed
from lean_selector.wire.prompt_fields import PromptFields
from lean_selector.wire.scalars import HashListHead, check_u64

# Above this JSON numbers lose exactness in many clients, and sums could leave the range of a u64.
T = TypeVar("T")

_BLOCK_HASHES_KEY = b'"block_hashes":'
_LONG_BODY_BYTES = 4096  # below, cutting costs more than it saves
_CUT = b'"%b"' % secrets.token_hex(16).encode()
_SHORT_LIST_BYTES = 1024  # some 50 hashes: decoding so few costs less than putting it off


def binary_form(body_type: type[Any]) -> type[Any]:
    """The same body as MessagePack: hash lists are arrays of integers of either sign, or `bin`."""
    return _with_hash_lists(body_type, "Binary", bytes | tuple[int, ...] | None)


def _with_hash_lists(body_type: type[Any], prefix: str, hashes: object) -> type[Any]:
    return msgspec.defstruct(
        f"{prefix}{body_type.__name__}",
        [("block_hashes", hashes, None), ("sequence_hashes", hashes, None)],
        bases=(body_type,),
        kw_only=True,
    )


def prompt_decoder(body_type: type[T]) -> Callable[[bytes | bytearray], T]:
    """A JSON decoder for PromptFields that does what suits the length of the body.

    The lists of a short one are decoded with it. The block hashes of a long one are cut out of the
    text before the rest is parsed, and decoded when the prompt is made; otherwise the parser walks
    over half of the body only to find its end. What stands in their place is known to this process
    alone, so that nothing else can be taken for it.
    """
    decode = msgspec.json.Decoder(body_type).decode
    short_type: type[T] = _with_hash_lists(body_type, "Short", list[int] | None)
    decode_short = msgspec.json.Decoder(short_type).decode

    def decode_cut(body: bytes | bytearray) -> T:
        if len(body) < _LONG_BODY_BYTES:
            return decode_short(body)
        start = body.find(_BLOCK_HASHES_KEY) + len(_BLOCK_HASHES_KEY)
        if start < len(_BLOCK_HASHES_KEY):
            return decode(body)
        if body.startswith(b" ", start):  # unlike an index, right at the end of a cut body too
            start += 1
        end = body.find(b"]", start) + 1
        if not end or not body.startswith(b"[", start):
            return decode(body)
        try:
            fields = decode(b"".join((body[:start], _CUT, body[end:])))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return decode(body)  # raises the same with the positions that the client knows
        assert isinstance(fields, PromptFields)
        assert isinstance(fields.block_hashes, Raw)
        if bytes(fields.block_hashes) != _CUT:
            return decode(body)  # it was another field's part, or the key stands there again
        fields.block_hashes = Raw(bytes(body[start:end]))
        return fields

    return decode_cut


def prompt_to_select(
    fields: PromptFields, block_size: int, is_eagle: bool, *, whole: bool = False
) -> Prompt:
    """The prompt of a route that matches it against the index.

    `whole` decodes the sequence hashes at once instead of on demand. Raises BadRequest in the
    documented words; msgspec.ValidationError for a wrong shape.
    """
    if fields.token_ids is not None or fields.mm_routing_info is not None:
        prompt = _from_tokens(fields, block_size, is_eagle)
        if prompt is not None:
            if prompt.isl_tokens == 0:
                raise BadRequest("isl_tokens must be greater than 0")
            return prompt
    hashes = fields.block_hashes
    if is_absent(hashes):
        check_ignored(fields, "sequence_hashes")
        raise BadRequest("block_hashes is required without token_ids")
    local = packed("block_hashes", hashes)
    prompt = _hash_prompt(fields, local, whole)
    if prompt.isl_tokens == 0:
        raise BadRequest("isl_tokens must be greater than 0")
    if len(local) != 8 * prompt.sequence_count:
        raise BadRequest(
            f"block_hashes length {len(local) // 8} "
            f"must match sequence_hashes length {prompt.sequence_count}"
        )
    return prompt


def prompt_to_book(fields: PromptFields, block_size: int, is_eagle: bool) -> Prompt:
    """The prompt of `/reservations`: block hashes are not looked at, and it may be empty."""
    prompt = _from_tokens(fields, block_size, is_eagle)
    if prompt is not None:
        return prompt
    check_ignored(fields, "block_hashes")
    return _hash_prompt(fields, b"", whole=True)


def _hash_prompt(fields: PromptFields, local: bytes, whole: bool) -> Prompt:
    """The prompt of the hash form, with its sequence hashes decoded or to be decoded."""
    hashes = fields.sequence_hashes
    if is_absent(hashes):
        raise BadRequest("sequence_hashes is required without token_ids")
    if whole or not isinstance(hashes, Raw) or len(memoryview(hashes)) < _SHORT_LIST_BYTES:
        sequence = packed("sequence_hashes", hashes)
        isl_tokens = _checked_isl_tokens(fields.isl_tokens)
        return Prompt(
            isl_tokens, local, len(sequence) // 8, sequence[:8], sequence, fields.lora_name
        )
    head = HashListHead("sequence_hashes", hashes)
    isl_tokens = _checked_isl_tokens(fields.isl_tokens)
    return Prompt(isl_tokens, local, head.count, head.first, head.packed, fields.lora_name)


def _checked_isl_tokens(isl_tokens: int | None) -> int:
    if isl_tokens is None:
        raise BadRequest("isl_tokens is required without token_ids")
    if isl_tokens > MAX_ISL_TOKENS:
        if isl_tokens > U64_MAX:
            raise msgspec.ValidationError(f"Expected `int` <= {U64_MAX} - at `$.isl_tokens`")
        raise BadRequest(f"isl_tokens ({isl_tokens}) exceeds the maximum {MAX_ISL_TOKENS}")
    return isl_tokens


def _from_tokens(fields: PromptFields, block_size: int, is_eagle: bool) -> Prompt | None:
    """The prompt when it is stated by tokens, else None."""
    info = fields.mm_routing_info
    if info is not None and info.routing_token_ids:
        tokens, mm_infos = info.routing_token_ids, info.block_mm_infos
    elif fields.token_ids is not None:
        tokens, mm_infos = fields.token_ids, fields.block_mm_infos or []
    else:
        return None
    check_ignored(fields, "block_hashes")
    check_ignored(fields, "sequence_hashes")
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
