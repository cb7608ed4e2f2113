"""The forms in which a body may give a list of hashes, and their normalisation to packed bytes."""

import msgspec
from msgspec import Raw

from lean_selector.wire.scalars import hashes_from_integers, hashes_from_json, hashes_from_signed

ABSENT = Raw(b"")

# How a body's form gives a hash list: as JSON text, a JSON list, MessagePack's array, or its bin.
# A Raw, list[int], tuple[int, ...], bytes or None. No union says so: msgspec's types take a Raw for
# a kind of bytes, which it is not.
HashList = object


def packed(name: str, hashes: HashList) -> bytes:
    """The hashes, 8 bytes each; raises msgspec.ValidationError for what is no list of them."""
    if isinstance(hashes, Raw):
        return hashes_from_json(name, hashes)
    if isinstance(hashes, bytes):
        if len(hashes) % 8:
            raise msgspec.ValidationError(
                f"Expected 8 bytes for each hash, got {len(hashes)} bytes - at `$.{name}`"
            )
        return hashes
    if isinstance(hashes, list):
        return hashes_from_signed(name, hashes)
    assert isinstance(hashes, tuple)
    return hashes_from_integers(name, hashes)


def is_absent(hashes: HashList) -> bool:
    if not isinstance(hashes, Raw):
        return hashes is None
    return hashes is ABSENT or (len(memoryview(hashes)) == 4 and bytes(hashes) == b"null")


def check_ignored(fields: msgspec.Struct, name: str) -> None:
    """A hash list that another form makes irrelevant must still be one."""
    hashes: HashList = getattr(fields, name)
    if not is_absent(hashes):
        packed(name, hashes)
