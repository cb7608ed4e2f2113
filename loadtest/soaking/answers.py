"""What came back on a connection, judged: whole answers, in order, and nothing beside them."""

import re

import msgspec

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
