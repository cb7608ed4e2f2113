"""What several bodies share, as typed structs: the partition that they name, and the prompt.

Which forms of a prompt there are, and which decides, is in spec selection.md 1.4.
"""

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from lean_selector.wire.hash_lists import ABSENT, HashList, check_ignored
from lean_selector.wire.scalars import U32, NonNegative, check_u64
from lean_selector.wire.scope import DEFAULT_GROUP, group_of

if TYPE_CHECKING:
    _HashListField = HashList
    _Tokens = list[int] | bytes  # bytes: those of a long JSON body, 4 each
else:
    _HashListField = Raw  # of a long JSON body; the other forms have types of their own
    _Tokens = list[U32]


class Scoped(msgspec.Struct, kw_only=True):
    """The partition that a body names."""

    model_name: str = DEFAULT_GROUP
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET

    def group(self) -> str:
        return group_of(self.tenant_id, self.routing_group)


class MmObject(msgspec.Struct, frozen=True):
    """An image, or another object that a prompt holds."""

    mm_hash: NonNegative
    offsets: list[Annotated[list[NonNegative], Meta(min_length=2, max_length=2)]]

    def __post_init__(self) -> None:
        check_u64("mm_hash", self.mm_hash)
        for offset in self.offsets:
            check_u64("offsets[...]", max(offset))


class BlockMmInfo(msgspec.Struct, frozen=True):
    """The multimodal objects in one block."""

    mm_objects: list[MmObject]


class MmRoutingInfo(msgspec.Struct, frozen=True):
    """A prompt as it is routed, where it holds multimodal objects."""

    routing_token_ids: list[U32]
    block_mm_infos: list[BlockMmInfo | None] = []


class PromptFields(Scoped, kw_only=True):
    """The prompt part that the bodies of five routes share. `null` is the same as absent."""

    token_ids: _Tokens | None = None
    mm_routing_info: MmRoutingInfo | None = None
    block_mm_infos: list[BlockMmInfo | None] | None = None
    block_hashes: _HashListField = ABSENT
    sequence_hashes: _HashListField = ABSENT
    isl_tokens: NonNegative | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    is_eagle: bool | None = None

    def check_shape(self) -> None:
        """Raises msgspec.ValidationError for what decoding leaves unchecked, because a request
        that succeeds meets it anyway: the hash lists, and integers beyond 2**64 - 1."""
        check_ignored(self, "block_hashes")
        check_ignored(self, "sequence_hashes")
        if self.isl_tokens is not None:
            check_u64("isl_tokens", self.isl_tokens)
