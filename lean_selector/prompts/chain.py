"""A prompt as a chain: one key for each beginning of it, so that what two prompts share is found.

A key stands for all that comes before it and for whatever else makes the prompt what it is: the
model, the adapter, the salt, the tools. Links end with messages, and within long ones.
"""

from collections.abc import Iterator
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from lean_selector.core.hashing import hash_seed
from lean_selector.prompts.model_request import CHAT_FIELDS, TEXT_FIELDS, Kind, ModelRequest
from lean_selector.prompts.served import Served

# A link of a long message. Some 250 to 500 tokens: prompts that differ within one are compared by
# their blocks when both are known.
LINK_BYTES: Final = 2048


class Chain:
    """`keys[n]` stands for the first `ends[n]` bytes of the prompt; the first for none of its own,
    but for the tools. Both have at least one item."""

    __slots__ = ("block_size", "ends", "is_eagle", "keys", "model", "seed")

    def __init__(self, served: Served, lora_name: str | None, request: ModelRequest) -> None:
        self.seed: Final = hash_seed(lora_name, request.salt)  # of the block hashes
        self.block_size: Final = served.block_size
        self.is_eagle: Final = served.is_eagle
        self.model: Final = f"{served.model_name}\0{lora_name or ''}"
        names = CHAT_FIELDS if request.kind is Kind.CHAT else TEXT_FIELDS
        rendering = [(name, request.fields[name]) for name in names if name in request.fields]
        key = xxh3_64_intdigest(
            msgspec.json.encode(
                (self.model, request.kind.value, self.block_size, self.is_eagle, rendering)
            ),
            self.seed,
        )
        end = len(request.fields.get("tools", b""))
        self.keys = [key]
        self.ends = [end]
        for link in _links(request):
            key = xxh3_64_intdigest(link, key)
            end += len(link)
            self.keys.append(key)
            self.ends.append(end)

    @property
    def size(self) -> int:
        """Bytes of the whole prompt, as it was written."""
        return self.ends[-1]


def _links(request: ModelRequest) -> Iterator[bytes]:
    parts = map(bytes, request.messages) if request.kind is Kind.CHAT else [request.text]
    for part in parts:
        for at in range(0, len(part), LINK_BYTES):
            yield part[at : at + LINK_BYTES]
