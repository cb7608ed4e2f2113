"""A prompt as the core sees it: block hashes, sequence hashes, and length in tokens.

Hash lists are `bytes`, 8 per block, little-endian. `isl_tokens` need not match the number of hashes
(spec selection.md 1.4). If a prompt was given as tokens, its sequence hashes are computed only when
needed, because most selections need only the first one."""

from collections.abc import Callable


class Prompt:
    __slots__ = (
        "_sequence",
        "first_sequence_hash",
        "isl_tokens",
        "known_blocks",
        "local_hashes",
        "lora_name",
        "sequence_count",
    )

    def __init__(
        self,
        isl_tokens: int,
        local_hashes: bytes,
        sequence_count: int,
        first_sequence_hash: bytes,
        sequence: bytes | Callable[[], bytes],
        lora_name: str | None = None,
        known_blocks: int | None = None,
    ) -> None:
        """`known_blocks`: how many leading blocks have hashes of the prompt; the hashes of the
        others are random. None: all."""
        self.known_blocks = sequence_count if known_blocks is None else known_blocks
        self.isl_tokens = isl_tokens
        self.local_hashes = local_hashes
        self.sequence_count = sequence_count
        self.first_sequence_hash = first_sequence_hash  # 8 bytes; empty if the prompt is empty
        self.lora_name = lora_name
        self._sequence = sequence

    def to_book(self, keeps_blocks: bool) -> "Prompt":
        """Return a copy to book later. Without `keeps_blocks`, the copy has no `local_hashes`."""
        return Prompt(
            self.isl_tokens,
            self.local_hashes if keeps_blocks else b"",
            self.sequence_count,
            self.first_sequence_hash,
            self._sequence,
            self.lora_name,
            self.known_blocks,
        )

    def forget_likeness(self, draw: Callable[[int], bytes]) -> None:
        """Unless the sequence hashes were given, replace them by random hashes, which match no
        other prompt. `draw` returns as many random bytes as requested."""
        if not isinstance(self._sequence, bytes):
            self._sequence = draw(8 * self.sequence_count)
            self.first_sequence_hash = self._sequence[:8]

    def blocks(self, block_size: int) -> int:
        """Return the number of blocks for all tokens, or the number of hashes if that is higher."""
        return max(self.sequence_count, -(-self.isl_tokens // block_size))

    def sequence_hashes(self) -> bytes:
        """Return the prompt's chained block hashes, 8 bytes per block. Computed on first use."""
        sequence = self._sequence
        if not isinstance(sequence, bytes):
            sequence = self._sequence = sequence()
        return sequence
