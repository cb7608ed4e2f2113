"""From events of odd form, untyped, to the fields that the layouts name."""

_TEXT_FIELDS = ("type", "medium", "lora_name", "kv_cache_spec_kind", "locality", "cache_salt")


def rearranged(event: object) -> dict[str, object]:
    """The fields of an untyped event, named as in the map form; raises ValueError if it has none.

    Names and texts may come as bin. In the tail of an array a field of the wrong type is left out.
    """
    if isinstance(event, list):
        fields = _by_position(event)
    elif isinstance(event, dict):
        fields = {_text(name) if type(name) is bytes else name: event[name] for name in event}
    else:
        raise ValueError("an event is a map or an array")
    for name in _TEXT_FIELDS:
        value = fields.get(name)
        if type(value) is bytes:
            fields[name] = _text(value)
    return fields


def _text(value: bytes) -> str:
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
    fields["locality"] = _word(tail, 3)
    return fields


def _group_idx(tail: list[object], position: int) -> int | None:
    value = tail[position] if position < len(tail) else None
    return value if type(value) is int and 0 <= value < 2**32 else None


def _word(tail: list[object], position: int) -> str | None:
    value = tail[position] if position < len(tail) else None
    if type(value) is bytes:
        return _text(value)
    return value if type(value) is str else None
