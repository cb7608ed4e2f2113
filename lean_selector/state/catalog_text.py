"""The file `catalog` of either service: one JSON object, each worker on a line of its own."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec

from lean_selector.state.seal import Damaged, OtherVersion
from lean_selector.state.shapes import CatalogFile, CatalogHead

T = TypeVar("T")

VERSION: Final = 1


_decode_head = msgspec.json.Decoder(CatalogHead).decode
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(CatalogFile).decode
_NO_WORKERS = b"[]}"


def catalog_text(head: CatalogFile, workers: Sequence[bytes]) -> bytes:
    """`head` has no workers; they are its last field."""
    text = _encode(head)
    assert text.endswith(_NO_WORKERS)
    return b"%b[\n%b\n]}" % (text[: -len(_NO_WORKERS)], b",\n".join(workers))


def read_catalog(text: bytes) -> CatalogFile:
    """Raises Damaged, or OtherVersion."""
    try:
        return _decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            version = _decode_head(text).version
            if version != VERSION:
                raise OtherVersion(
                    f"it has version {version}, and this release reads version {VERSION}"
                ) from None
        raise Damaged(str(error)) from None


def read_rows(
    rows: Sequence[msgspec.Raw], decode: Callable[[bytes], T], problems: list[str]
) -> list[T]:
    """Those that can be read; what is wrong with the others is added to `problems`."""
    found: list[T] = []
    for row in rows:
        try:
            found.append(decode(bytes(row)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            problems.append(f"a worker: {error}")
    return found
