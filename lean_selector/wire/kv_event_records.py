"""Convert a decoded KV event of any layout into the record that the index applies.

Determines the tier, makes hashes unsigned, flattens the token pairs of EAGLE, and finds the cache
salt and the multimodal hashes among the extra keys. Spec: indexer.md 1.4 and 2.2; D26."""

import re
from typing import Final, cast

import msgspec
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from lean_selector.core.hashing import ENGINE_SALT_PREFIX, packed_tokens, unmarked_salt
from lean_selector.core.hashing import u64s as u64s_struct
from lean_selector.core.index.engine_hashes import is_chain
from lean_selector.core.index.shapes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventPart,
    Tier,
)
from lean_selector.core.numbers import U64_MAX
from lean_selector.wire.kv_event_shapes import (
    ArrayCleared,
    ArrayEvent,
    ArrayRemoved,
    ArrayStored,
    Hash,
    MapCleared,
    MapEvent,
    MapRemoved,
    MapStored,
    MultimodalInfos,
    Token,
)

# Blocks per record, which take some 0.15 ms to apply.
PART_BLOCKS: Final = 512
_MM_IDENTIFIER = re.compile(r"[0-9a-fA-F]{64}\Z")

# Types of extra keys that are not known -> the name under which they are counted.
_KINDS = {type(None): "nil", float: "float", dict: "map", list: "list"}
_UNKNOWN_KEY_SEED = 26  # a hash seed; any number that differs from the seed for tokens
_ANYWHERE = 2**63

# Names and texts that may be sent as MessagePack bin.
TEXT_FIELDS = (
    *("type", "medium", "lora_name", "kv_cache_spec_kind", "locality"),
    *("ownership", "cache_salt"),
)

_encode = msgspec.msgpack.Encoder().encode

# Names are compared in upper case. vLLM sends STORAGE for blocks offloaded to disk.
_TIERS: dict[str | None, Tier] = {
    **dict.fromkeys((None, "", "GPU", "DEVICE"), Tier.DEVICE),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), Tier.HOST_PINNED),
    **dict.fromkeys(("CPU_TIER2", "DISK", "NVME", "STORAGE"), Tier.DISK),
    **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), Tier.EXTERNAL),
}


def record_of(event: ArrayEvent | MapEvent) -> Event | None:
    """Return a KV event's record for the index; None for an ignored type. May raise ValueError."""
    if isinstance(event, ArrayStored):
        return stored_record(event)
    if isinstance(event, MapStored):
        return stored_record(event, event.cache_salt, event.block_mm_infos)
    if isinstance(event, MapRemoved | ArrayRemoved):
        return removal_record(event, event.block_hashes, 1)
    return AllBlocksCleared() if isinstance(event, MapCleared | ArrayCleared) else None


def removal_record(
    event: ArrayRemoved | MapRemoved, hashes: list[Hash], events: int
) -> BlockRemoved:
    """Return the record of several `events` that are like `event`, but for their blocks."""
    if isinstance(event, MapRemoved):
        locality, spec_kind = event.locality, event.kv_cache_spec_kind
    else:
        locality, spec_kind = None, event.kind_or_locality
        if spec_kind is not None and spec_kind.upper() in ("LOCAL", "REMOTE"):
            locality, spec_kind = spec_kind, None
    is_remote = _is_remote(locality, event.ownership)
    tier = tier_of(event.medium)
    return BlockRemoved(packed_names(hashes), tier, event.group_idx, spec_kind, is_remote, events)


def stored_record(
    event: ArrayStored | MapStored,
    salt: str | None = None,
    infos: MultimodalInfos | None = None,
) -> BlockStored:
    """Return a stored event's record. `salt`, `infos`: two fields that only map events have."""
    is_eagle = bool(event.token_ids) and type(event.token_ids[0]) is not int
    tokens = _flattened(event.token_ids) if is_eagle else cast("list[int]", event.token_ids)
    parent = event.parent_block_hash
    mm_hashes, unknown_keys, next_token = None, None, None
    # reported in its own field, but with the prefix that was given to the engine
    if salt is not None:
        salt = unmarked_salt(salt)
    if event.extra_keys:
        salt = salt or _salt_of(event.extra_keys[0], event.lora_name)
        mm_hashes, unknown_keys = _mm_hashes_of_keys(event)
    if event.lookahead_token_ids is not None:
        next_token = _token_behind(event.lookahead_token_ids, _blocks(event))
    if infos is not None:
        mm_hashes = _mm_hashes_of_infos(infos)
    if parent is not None and (isinstance(parent, bytes) or parent < 0):
        parent = _u64(parent)
    medium = event.medium
    hashes = u64s(event.block_hashes)
    count = len(hashes)
    fault: str | None = None
    # Without a block size, the event may have no tokens; which the index looks at.
    wanted = count * event.block_size + is_eagle if event.block_size else len(tokens)
    try:
        packed = packed_tokens(tokens if len(tokens) <= wanted else tokens[:wanted])
    except ValueError:
        packed, fault = b"", "bad_tokens"
    if fault is None and not is_chain(parent, hashes):
        fault = "self_reference"
    return BlockStored(
        u64s_struct(count).pack(*hashes),
        parent,
        packed,
        event.block_size,
        _TIERS[medium] if medium in _TIERS else tier_of(medium),
        event.lora_name or None,
        salt or None,
        mm_hashes,
        is_eagle,
        event.group_idx,
        event.kv_cache_spec_kind,
        (event.locality is not None or event.ownership is not None)
        and _is_remote(event.locality, event.ownership),
        EventPart.WHOLE,
        unknown_keys,
        next_token,
        fault,
    )


def parts_of(record: BlockStored) -> list[Event]:
    """Split the record of a long event into records of at most PART_BLOCKS blocks."""
    size, names, tokens, infos = (
        record.block_size,
        record.engine_hashes,
        record.tokens,
        record.mm_hashes,
    )
    blocks = min(len(names) >> 3, ((len(tokens) >> 2) - record.is_eagle) // size) if size else 0
    if blocks <= PART_BLOCKS or record.fault is not None:
        return [record]
    parts: list[Event] = []
    for at in range(0, blocks, PART_BLOCKS):
        end = min(at + PART_BLOCKS, blocks)
        behind = tokens[(end * size) << 2 : (end * size + 1) << 2]
        following = int.from_bytes(behind, "little") if end < blocks else record.next_token
        parts.append(
            replace(
                record,
                engine_hashes=names[at << 3 : end << 3],
                parent_hash=int.from_bytes(names[(at - 1) << 3 : at << 3], "little")
                if at
                else record.parent_hash,
                tokens=tokens[(at * size) << 2 : (end * size + record.is_eagle) << 2],
                mm_hashes=None if infos is None else infos[at:end],
                part=(EventPart.LAST if end == blocks else EventPart.MIDDLE)
                if at
                else EventPart.FIRST,
                unknown_keys=None if at else record.unknown_keys,
                next_token=None if record.next_token is None else following,
            )
        )
    return parts


def _token_behind(lookahead: object, blocks: int) -> int | None:
    """Return the token that follows the last of the blocks. lookahead[i]: those after block i."""
    following = lookahead[:blocks] if isinstance(lookahead, list) else []
    behind = following[-1] if len(following) == blocks > 0 else None
    token = behind[0] if isinstance(behind, list) and behind else None
    return token if type(token) is int else None


def _u64(value: Hash) -> int:
    """Return a hash as an unsigned 64-bit integer. A negative integer keeps its bits. A hash in
    bytes is reduced to its last eight bytes (big-endian), as in vLLM."""
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & U64_MAX


def _blocks(event: ArrayStored | MapStored) -> int:
    """Return how many blocks have a hash and `block_size` tokens (or token pairs of EAGLE)."""
    size = event.block_size
    return min(len(event.block_hashes), len(event.token_ids) // size) if size else 0


def u64s(values: list[Hash]) -> list[int]:
    numbers = cast("list[int]", values)
    try:
        if (min(numbers) if len(numbers) > 1 else numbers[0] if numbers else 0) >= 0:
            return numbers
        return [value & U64_MAX for value in numbers]
    except TypeError:  # bytes among the hashes
        return [_u64(value) for value in values]


def packed_names(values: list[Hash]) -> bytes:
    """Pack hashes to 8 bytes each, little-endian."""
    hashes = u64s(values)
    return u64s_struct(len(hashes)).pack(*hashes)


def _flattened(pairs: list[Token]) -> list[int]:
    """Flatten the token pairs of EAGLE: [(a, b), (b, c), ...] -> [a, b, c, ...]."""
    tokens: list[int] = []
    second = 0
    for pair in pairs:
        if not isinstance(pair, tuple):
            raise ValueError("token pairs and plain tokens are mixed")
        first, second = pair
        tokens.append(first)
    tokens.append(second)
    return tokens


def tier_of(medium: str | None) -> Tier | None:
    """Return the tier for `medium`, an engine's name of a tier; None if it is unknown."""
    tier = _TIERS.get(medium)
    return _TIERS.get(medium.upper()) if tier is None and medium is not None else tier


def _is_remote(locality: object, ownership: object) -> bool:
    """Whether an event's blocks are outside of the worker (D26). If `locality` is a non-empty text,
    every text except LOCAL means yes. Otherwise, any non-empty text in `ownership` means yes."""
    if isinstance(locality, str) and locality:
        return locality.upper() != "LOCAL"
    return isinstance(ownership, str) and ownership != ""


def _beside_adapter(keys: list[object], lora_name: str | None) -> list[object]:
    """Return a block's extra keys but for the adapter's name, which is one of them, whatever text
    it is. The same text may come once more, as a salt or an image."""
    if not lora_name or lora_name not in keys:
        return keys
    at = keys.index(lora_name)
    return keys[:at] + keys[at + 1 :]


def _salt_of(keys: list[object] | None, lora_name: str | None) -> str | None:
    for key in _beside_adapter(keys, lora_name) if keys else ():
        if isinstance(key, str) and key.startswith(ENGINE_SALT_PREFIX):
            return unmarked_salt(key)
    return None


def _mm_hashes_of_keys(
    event: ArrayStored | MapStored,
) -> tuple[list[list[int] | None] | None, dict[str, int] | None]:
    """Return each block's multimodal hashes, which are among its extra keys, and the number of
    extra keys of each unknown kind. An unknown key becomes a hash that no prompt has, so that no
    prompt matches the block or its descendants (D26)."""
    extra_keys = event.extra_keys[: _blocks(event)] if event.extra_keys else []
    if not any(extra_keys):
        return None, None
    unknown: dict[str, int] = {}
    # An object may begin behind the block, in tokens that the engine's hash looks ahead to.
    end = event.block_size if event.lookahead_token_ids is not None else _ANYWHERE
    mm_hashes = [
        _mm_hashes_of_block(_beside_adapter(keys, event.lora_name), end, unknown) if keys else None
        for keys in extra_keys
    ]
    return mm_hashes, unknown or None


def _mm_hashes_of_block(keys: list[object], end: int, unknown: dict[str, int]) -> list[int] | None:
    """Return hashes of the objects (images etc.) in a block's extra keys; None if there are none.
    An object's key is [identifier, offset < `end`], or 64 hex digits. The first 16 of 64 hex digits
    are the hash; identifiers of another form are hashed. Other texts, integers and bytes are
    skipped. All other keys get one hash; `unknown` counts them by kind."""
    hashes = []
    others = []
    for key in keys:
        name = key
        if isinstance(key, list):
            if not key:
                continue
            offset = key[1] if len(key) > 1 else None
            name = key[0] if type(offset) is int else None
            if type(offset) is int and offset >= end:
                continue
        if isinstance(name, str):
            if _MM_IDENTIFIER.match(name):
                hashes.append(int(name[:16], 16))
            elif name is not key and name:
                hashes.append(xxh3_64_intdigest(name.encode()))
        elif not isinstance(name, int | bytes):
            kind = _KINDS.get(type(key), "other")
            unknown[kind] = unknown.get(kind, 0) + 1
            others.append(key)
    if others:
        hashes.append(xxh3_64_intdigest(_encode(others), _UNKNOWN_KEY_SEED))
    return hashes or None


def _mm_hashes_of_infos(infos: MultimodalInfos) -> list[list[int] | None]:
    return [[o.mm_hash for o in info.mm_objects] or None if info else None for info in infos]


def rearranged(event: object) -> dict[str, object]:
    """Return name -> value of the fields of an event that was decoded without types. Names and
    texts may be MessagePack bin. Optional fields at the end of an array are left out if their type
    is wrong. Raises ValueError if `event` is neither a map nor an array."""
    if isinstance(event, list):
        fields = _by_position(event)
    elif isinstance(event, dict):
        fields = {_decoded(name) if type(name) is bytes else name: event[name] for name in event}
    else:
        raise ValueError("an event is a map or an array")
    for name in TEXT_FIELDS:
        value = fields.get(name)
        if type(value) is bytes:
            fields[name] = _decoded(value)
    return fields


def _decoded(value: bytes) -> str:
    return value.decode("utf-8")


def _by_position(event: list[object]) -> dict[str, object]:
    tag = event[0] if event else None
    if tag in ("BlockStored", b"BlockStored"):
        return _stored_by_position(event)
    fields: dict[str, object] = {"type": tag}
    if tag in ("BlockRemoved", b"BlockRemoved"):
        fields.update(zip(("block_hashes", "medium"), event[1:3], strict=False))
        tail = event[3:]
        fields["group_idx"] = _group_idx(tail, 0)
        word = _word(tail, 1)
        is_locality = word is not None and word.upper() in ("LOCAL", "REMOTE")
        fields["locality" if is_locality else "kv_cache_spec_kind"] = word
        fields["ownership"] = _word(tail, 2)
    return fields


def _stored_by_position(event: list[object]) -> dict[str, object]:
    names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
    fields: dict[str, object] = dict(zip(names, event, strict=False))
    fields.update(zip(("medium", "lora_name", "extra_keys"), event[6:9], strict=False))
    metadata = fields.get("lora_name")
    if isinstance(metadata, dict):
        fields["lora_name"] = None
        fields["cache_salt"] = metadata.get("cache_salt", metadata.get(b"cache_salt"))
    tail = event[9:]
    if tail and isinstance(tail[0], list):
        fields["block_mm_infos"] = tail.pop(0)
    fields["group_idx"] = _group_idx(tail, 0)
    fields["kv_cache_spec_kind"] = _word(tail, 1)
    fields["locality"], fields["ownership"] = _word(tail, 3), _word(tail, 4)
    if len(tail) > 6 and isinstance(tail[6], list):
        fields["lookahead_token_ids"] = tail[6]
    return fields


def _group_idx(tail: list[object], position: int) -> int | None:
    value = tail[position] if position < len(tail) else None
    return value if type(value) is int and 0 <= value < 2**32 else None


def _word(tail: list[object], position: int) -> str | None:
    value = tail[position] if position < len(tail) else None
    if type(value) is bytes:
        return _decoded(value)
    return value if type(value) is str else None
