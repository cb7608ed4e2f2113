"""The largest of the integers that travel: ids, hashes and token counts are unsigned 64 bits."""

U64_MAX = 2**64 - 1
