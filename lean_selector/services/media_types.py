"""Which form of a body a content-type or an accept header names."""

from lean_selector.http.response import JSON

MSGPACK = b"application/msgpack"


def names_msgpack(header: bytes | None) -> bool:
    return header is not None and MSGPACK in header.lower()


def is_json(content_type: bytes | None) -> bool:
    """`application/json` or `application/*+json`, in any case, parameters allowed."""
    if not content_type:
        return False
    media = content_type.partition(b";")[0].strip().lower()
    return media == JSON or (media.startswith(b"application/") and media.endswith(b"+json"))
