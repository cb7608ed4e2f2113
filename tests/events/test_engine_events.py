"""What engines of today send, in bytes that their own classes made, and what the index learns.

`.ci/record_engine_events.py` wrote the bytes. Both readers read them.
"""

import json
from pathlib import Path
from struct import unpack

import pytest

from lean_selector.core.hashing import hash_seed, packed_local_hashes
from lean_selector.core.index.kv_cursor import KvCursor
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.shapes import Tier
from lean_selector.events.batch_work import BatchWork
from lean_selector.wire.packed_events import packed_batch

DATA = Path(__file__).parents[1] / "data" / "engine_events.json"
SIZE = 4
TOKENS = list(range(1, 9))  # of two blocks
SIGNED = [-(2**63) + 11, -12]  # SGLang's names of them
NAMES = [name % 2**64 for name in SIGNED]
RECORDED: dict[str, str] = json.loads(DATA.read_text(encoding="utf-8"))
Held = set[tuple[Tier, int, int]]  # tier, name and hash of the tokens
Counts = dict[tuple[str, str], int]


def blocks(
    *names: int, tier: Tier = Tier.DEVICE, adapter: str | None = None, salt: str | None = None
) -> Held:
    """Of the two blocks of the recorded prompt those with these names, under what is hashed."""
    tokens = b"".join(token.to_bytes(4, "little") for token in TOKENS)
    local = packed_local_hashes(tokens, SIZE, hash_seed(adapter, salt))
    hashes = dict(zip(NAMES, unpack("<2Q", local), strict=True))
    return {(tier, name, hashes[name]) for name in names}


BOTH = blocks(*NAMES)
FIRST = blocks(NAMES[0])
ON_HOST = blocks(*NAMES, tier=Tier.HOST_PINNED)
SALTED = blocks(*NAMES, salt="s")
ADAPTED = blocks(*NAMES, adapter="adapter")
ONCE, TWICE = {("stored", "applied"): 1}, {("stored", "applied"): 2}
REMOVED, CLEARED = {("removed", "applied"): 1}, {("cleared", "applied"): 1}
# For each row what is held in the end, and what was counted.
VLLM: dict[str, tuple[Held, Counts]] = {
    "stored": (BOTH, ONCE),
    "all fields": (BOTH, ONCE),
    "digests": (FIRST, ONCE | REMOVED),
    "child of a digest": (BOTH, TWICE),
    "adapter": (ADAPTED, ONCE),
    "cache salt": (SALTED, ONCE),
    "cache salt of its own": (BOTH, ONCE),
    "lookahead": (BOTH, ONCE),
    "other group": (set(), {("stored", "other_kind"): 1}),
    "host": (BOTH | ON_HOST, TWICE),
    "storage elsewhere": (set(), {("stored", "remote"): 1}),
    "removed": (FIRST, ONCE | REMOVED),
    "removed block by block": (set(), ONCE | {("removed", "applied"): 2}),
    "removed elsewhere": (BOTH, ONCE | {("removed", "remote"): 1}),
    "cleared": (FIRST, TWICE | CLEARED),
    "a part of a block": (set(), {("stored", "partial"): 1}),
    "names alone": (BOTH | ON_HOST, TWICE),
}
SGLANG: dict[str, tuple[Held, Counts]] = {
    "stored": (BOTH, ONCE),
    "block by block": (BOTH, TWICE),
    "adapter": (ADAPTED, ONCE),
    "cache salt": (SALTED, ONCE),
    "host": (ON_HOST, ONCE),
    "removed": (FIRST, ONCE | REMOVED),
    "cleared": (set(), ONCE | CLEARED),
}
EFFECTS = {
    **{f"vllm 0.33.0, maps: {name}": effect for name, effect in VLLM.items()},
    **{f"vllm 0.33.0, arrays: {name}": effect for name, effect in VLLM.items()},
    **{f"sglang 0.5.23, maps: {name}": effect for name, effect in SGLANG.items()},
    "sglang 0.5.23, load": (set(), {("message", "not_a_batch"): 1}),
}
# Where the packed reader leaves a batch to the other one.
LEFT = ("image", "lookahead", "storage elsewhere", "removed elsewhere", "names alone", "load")


def learnt(payload: bytes, *, packed: bool) -> tuple[Held, Counts]:
    index = KvIndex(SIZE)
    ingest = KvIngest(index, 1, 0)
    cursor = KvCursor(can_replay=False)
    work = BatchWork(ingest, cursor, lambda *line: None, packed_batch if packed else None)
    work.take(payload)
    while work.is_under_way:
        work.go_on(0.0)
    held = {
        (run.tier, name, local)
        for runs in index.dump()
        for run in runs
        for name, local in zip(run.block_hashes, run.tokens_hashes, strict=True)
    }
    results = ingest.counts.results()
    return held, {(event, result): count for event, result, count in results if count}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("row", EFFECTS)
def test_what_an_engine_sends_is_learnt(row: str, packed: bool) -> None:
    payload = bytes.fromhex(RECORDED[row])
    assert learnt(payload, packed=packed) == EFFECTS[row]
    assert (packed_batch(payload) is None) == row.endswith(LEFT)


def test_of_an_image_only_the_block_that_has_it_is_hashed_otherwise() -> None:
    for form in ("maps", "arrays"):
        payload = bytes.fromhex(RECORDED[f"vllm 0.33.0, {form}: image"])
        for packed in (False, True):
            held, counts = learnt(payload, packed=packed)
            assert (held & BOTH, len(held), counts) == (blocks(NAMES[1]), 2, ONCE)


def test_each_recorded_batch_is_learnt_in_some_test() -> None:
    assert {row for row in RECORDED if "image" not in row} == EFFECTS.keys()
