"""How large the numbers that travel may be (D6)."""

U64_MAX = 2**64 - 1  # ids, hashes and token counts are unsigned 64 bits
MAX_ISL_TOKENS = 2**53 - 1  # what a float holds exactly
MAX_RANKS = 4096  # of a worker; every rank has a row of its own
RANK_LIMIT = 2**32 - 1  # ranks are u32, and the first plus their number must be one too
