"""Made-up multi-turn conversations, the same for the same seed.

Owns what is asked, in which order, and the pauses between; not who answers. A turn's prompt is
the whole conversation so far, so its prefix was computed by whichever engine had the turn before.
"""

from collections.abc import Iterator
from random import Random

from lean_selector.demo.records import Turn
from lean_selector.demo.request import make_request

BLOCK_SIZE = 16  # tokens
VOCABULARY = range(32_000)
SYSTEM_PROMPTS = 4  # shared by all conversations
SYSTEM_TOKENS = 256
TURNS = (4, 12)
USER_TOKENS = (60, 400)
OUTPUT_TOKENS = (32, 160)
THINKING_S = (0.1, 0.6)


def conversations(seed: int, user: int) -> Iterator[Turn]:
    """Endless turns of one user: conversation after conversation, independent of other users."""
    number = 0
    while True:
        rng = Random(f"{seed}/{user}/{number}")
        history = _system_prompt(seed, rng.randrange(SYSTEM_PROMPTS))
        for turn in range(rng.randint(*TURNS)):
            history += rng.choices(VOCABULARY, k=rng.randint(*USER_TOKENS))
            isl_tokens = len(history)
            history += rng.choices(VOCABULARY, k=rng.randint(*OUTPUT_TOKENS))
            filled = len(history) // BLOCK_SIZE - isl_tokens // BLOCK_SIZE
            name = f"demo-{user}-{number}-{turn}"
            request = make_request(name, history.copy(), isl_tokens, filled, BLOCK_SIZE)
            yield Turn(rng.uniform(*THINKING_S), request)
        number += 1


def _system_prompt(seed: int, which: int) -> list[int]:
    return Random(f"{seed}/system/{which}").choices(VOCABULARY, k=SYSTEM_TOKENS)
