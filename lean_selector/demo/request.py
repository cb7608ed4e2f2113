"""One generation request of the simulated traffic: its tokens and their hashes.

Owns the shape that engines, the player and the comparison share. The hashes are those of
"Block Hashing": local per block, sequence chained, both in the signed form that HTTP takes.
"""

import struct
from collections.abc import Sequence

import msgspec

from lean_selector.core.hashing import local_hashes, sequence_hashes_bytes


class Request(msgspec.Struct, frozen=True):
    """A prompt and what is generated for it.

    tokens: prompt, then the output as far as it is known beforehand. The hash lists have one
    entry per full block of tokens, signed 64 bits; the first isl_tokens // block_size are the
    prompt's. output_blocks: blocks that decoding fills.
    """

    request_id: str
    tokens: Sequence[int]
    isl_tokens: int
    prompt_blocks: int
    output_blocks: int
    block_hashes: Sequence[int]
    sequence_hashes: Sequence[int]


def make_request(
    request_id: str, tokens: list[int], isl_tokens: int, output_blocks: int, block_size: int
) -> Request:
    """Hash the tokens, of which the first isl_tokens are the prompt."""
    local = local_hashes(tokens, block_size)
    layout = f"<{len(local) // 8}q"
    return Request(
        request_id=request_id,
        tokens=tokens,
        isl_tokens=isl_tokens,
        prompt_blocks=isl_tokens // block_size,
        output_blocks=output_blocks,
        block_hashes=struct.unpack(layout, local),
        sequence_hashes=struct.unpack(layout, sequence_hashes_bytes(local)),
    )
