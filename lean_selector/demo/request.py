"""One generation request of the simulated traffic: its tokens and their hashes.

The hashes are those of "Block Hashing": local per block, sequence chained, both in the signed form
that HTTP takes.
"""

import struct

from lean_selector.core.hashing import local_hashes, sequence_hashes_bytes
from lean_selector.demo.records import Request


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
