"""What is exchanged with the selection service: a call, and what its answers hold.

Shapes follow spec selection.md 1.3 and 1.5; only the fields that the clients use are read.
Knows nothing of httpx.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import msgspec

from lean_selector.client.encoding import encode_json, encode_msgpack

T = TypeVar("T")


class Call(msgspec.Struct, Generic[T], frozen=True):
    """One request. `waits`: the service may hold the answer back until a worker is free.

    `has_prompt`: the route takes MessagePack too, and hash lists in `fields` are bytes.
    """

    method: str
    path: str
    read: Callable[[bytes], T]
    fields: Mapping[str, object] | None = None
    waits: bool = False
    has_prompt: bool = False

    def json(self) -> bytes | None:
        """The body as any service takes it: hashes are signed integers there."""
        if self.fields is None:
            return None
        return encode_json(
            {
                name: _signed(value) if isinstance(value, bytes) else value
                for name, value in self.fields.items()
            }
        )

    def msgpack(self) -> bytes:
        """The body of a prompt as this project's service takes it, with nothing to decode."""
        assert self.has_prompt
        return encode_msgpack(self.fields)


def _signed(hashes: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(hashes) // 8}q", hashes)


class Overlap(msgspec.Struct, frozen=True):
    """Cached tokens of the chosen worker; `dp` by rank, as decimal text."""

    longest_matched: int
    gpu: int
    dp: dict[str, int]
    cpu: int
    disk: int


class Selected(msgspec.Struct, frozen=True):
    """The answer to a selection."""

    worker_id: int
    dp_rank: int
    endpoint: str
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int

    @property
    def overlap_blocks(self) -> int:
        """Device blocks of the prompt that the chosen rank holds."""
        return self.overlap.dp.get(str(self.dp_rank), 0) // self.block_size


class Worker(msgspec.Struct, frozen=True):
    """The part of a worker's record that routing needs."""

    worker_id: int
    model_name: str
    lifecycle: str
    block_size: int | None = None
    is_eagle: bool | None = None


class Scope(msgspec.Struct, frozen=True):
    """Which workers are meant, and how their blocks are cut; block_size None: not known."""

    model_name: str
    tenant_id: str
    block_size: int | None = None
    is_eagle: bool = False
