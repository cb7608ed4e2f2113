"""The prompts of a soak, and the answers on a connection, judged: whole, in order, and no more."""

import re
from random import Random

import msgspec

# -- prompts: families that share a beginning, the same in every process ---------------------------

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


# -- answers ---------------------------------------------------------------------------------------

_HEAD = re.compile(
    rb"HTTP/1\.1 (\d{3}) [ A-Za-z]+\r\n"
    rb"(?:[A-Za-z-]+: [^\r\n]*\r\n)*?(?i:content-length): *(\d+)\r\n"
    rb"(?:[A-Za-z-]+: [^\r\n]*\r\n)*\r\n"
)


class Malformed(Exception):
    """Bytes that begin no answer, or a body that is not what the route promises."""


class Placement(msgspec.Struct):
    """What a selection's answer must have."""

    reservation_id: str
    model_name: str
    worker_id: int
    dp_rank: int
    endpoint: str
    effective_prefill_tokens: int


class Refusal(msgspec.Struct):
    error: str


class Done(msgspec.Struct):
    status: str


decode_placement = msgspec.json.Decoder(Placement).decode
decode_refusal = msgspec.json.Decoder(Refusal).decode
decode_done = msgspec.json.Decoder(Done).decode


def answer_at(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Status, and where the body begins and ends; None while it is not whole. Raises Malformed."""
    head = _HEAD.match(data, at)
    if head is None:
        if b"\r\n\r\n" in data[at:]:
            raise Malformed(f"no answer begins with {data[at : at + 120]!r}")
        return None
    begin = head.end()
    end = begin + int(head[2])
    return (int(head[1]), begin, end) if end <= len(data) else None
