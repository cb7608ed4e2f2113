"""The prompts of a soak: families that share a beginning, the same in every process."""

from random import Random

BLOCK_SIZE = 16  # tokens
MODEL = "soak"
FAMILIES = 64
OF_A_FAMILY = 16
SHARED_BLOCKS = 4
OWN_BLOCKS = (1, 5)
FIRST_TOKENS = range(100_000)
# Tokens that make a prompt another than all before it; always seven digits, so that a request's
# bytes can be prepared but for them.
FRESH_TOKENS = range(1_000_000, 10_000_000)


def families(seed: int) -> list[list[list[int]]]:
    """FAMILIES lists of OF_A_FAMILY prompts, as tokens: SHARED_BLOCKS alike, then their own."""
    drawn = Random(f"soak/{seed}")

    def tokens(blocks: int) -> list[int]:
        return drawn.choices(FIRST_TOKENS, k=blocks * BLOCK_SIZE)

    found = list[list[list[int]]]()
    for _ in range(FAMILIES):
        shared = tokens(SHARED_BLOCKS)
        found.append([shared + tokens(drawn.randint(*OWN_BLOCKS)) for _ in range(OF_A_FAMILY)])
    return found
