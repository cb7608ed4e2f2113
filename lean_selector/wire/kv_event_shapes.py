"""KV events on the wire, as typed structs, in the layouts of all engines and of our publisher.

Only the fields that we use are declared. Decoding skips other keys of a map, and later positions of
an array. Positions in an array, from vLLM's and SGLang's history (spec: indexer.md 1.4):

    BlockStored   0 tag  1 block_hashes  2 parent  3 token_ids  4 block_size  5 lora_id (unused)
                  6 medium  7 lora_name, or a map with cache_salt (SGLang)  8 extra_keys
                  9 group_idx (or block_mm_infos, which moves the rest by one)  10 kind
                  11 sliding window  12 locality  13 ownership  14 session id
                  15 lookahead_token_ids
    BlockRemoved  0 tag  1 block_hashes  2 medium  3 group_idx  4 kind or locality  5 ownership"""

from typing import Annotated

from msgspec import Meta, Raw, Struct

Hash = int | bytes  # signed or unsigned; bytes if vLLM is configured not to send ints
Token = int | tuple[int, int]  # EAGLE workers send pairs (t[i], t[i + 1]); unchecked for u32
GroupIdx = Annotated[int, Meta(ge=0, le=2**32 - 1)]
BlockSize = Annotated[int, Meta(ge=0)]
MAX_BATCH_EVENTS = 1 << 16
# Events that are decoded and applied at once. Those that cannot be decoded take longest, some 8 us.
SLICE_EVENTS = 256


class MultimodalObject(Struct, gc=False):
    mm_hash: Annotated[int, Meta(ge=0)]
    offsets: object  # required by the layout, but not hashed


class MultimodalInfo(Struct, gc=False):
    mm_objects: list[MultimodalObject]


ExtraKeys = list[list[object] | None]
MultimodalInfos = list[MultimodalInfo | None]


class MapStored(Struct, tag_field="type", tag="BlockStored", gc=False):
    block_hashes: list[Hash]
    token_ids: list[Token]
    block_size: BlockSize
    parent_block_hash: Hash | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: ExtraKeys | None = None
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    locality: object = None
    ownership: object = None
    lookahead_token_ids: object = None
    cache_salt: str | None = None
    block_mm_infos: MultimodalInfos | None = None


class MapRemoved(Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    locality: object = None
    ownership: object = None


class MapCleared(Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class MapIgnored(Struct, tag_field="type", tag="Ignored", gc=False):
    pass


class ArrayStored(Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[Token]
    block_size: BlockSize
    lora_id: object = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: ExtraKeys | None = None
    group_idx: GroupIdx | None = None
    kv_cache_spec_kind: str | None = None
    sliding_window: object = None
    locality: object = None
    ownership: object = None
    session_id: object = None
    lookahead_token_ids: object = None


class ArrayRemoved(Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: GroupIdx | None = None
    kind_or_locality: str | None = None
    ownership: object = None


class ArrayCleared(Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class ArrayIgnored(Struct, array_like=True, tag="Ignored", gc=False):
    pass


ArrayEvent = ArrayStored | ArrayRemoved | ArrayCleared | ArrayIgnored
MapEvent = MapStored | MapRemoved | MapCleared | MapIgnored


class ArrayEvents(Struct, array_like=True, gc=False):
    """The usual batch of KV events, `[ts, events, rank]`; old vLLM and SGLang omit the rank."""

    ts: float
    events: Annotated[list[ArrayEvent], Meta(max_length=SLICE_EVENTS)]
    dp_rank: int | None = None


class MapEvents(Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[MapEvent], Meta(max_length=SLICE_EVENTS)]
    dp_rank: int | None = None


class RawArray(Struct, array_like=True):
    """Any batch in an array, with its events still encoded."""

    ts: Raw
    events: Annotated[list[Raw], Meta(max_length=MAX_BATCH_EVENTS)]
    dp_rank: object = None

    def rank(self) -> object:
        return self.dp_rank


class RawMap(Struct):
    """Any batch in a map."""

    events: Annotated[list[Raw], Meta(max_length=MAX_BATCH_EVENTS)]
    data_parallel_rank: object = None
    dp_rank: object = None
    attn_dp_rank: object = None

    def rank(self) -> object:
        ranks = self.data_parallel_rank, self.dp_rank, self.attn_dp_rank
        return next((rank for rank in ranks if rank is not None), None)
