"""Batches read in slices: the same outcome as at once, and bounded work whatever the bytes."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import EventCounts, KvIngest
from lean_selector.core.index.shapes import BlockRemoved, EventBatch, EventPart, StoredRun, Tier
from lean_selector.wire import kv_events
from lean_selector.wire.kv_event_records import PART_BLOCKS
from lean_selector.wire.kv_event_shapes import SLICE_EVENTS
from lean_selector.wire.kv_events import NotABatch, batch_slices, decode_small
from tests.support.blocks import store_blocks
from tests.support.kv_batches import small_windows

encode = msgspec.msgpack.encode
HEX = "a1b2c3d4e5f60718" + 48 * "0"


def slices(payload: bytes) -> list[EventBatch]:
    return list(batch_slices(payload))


# The same outcome


def stored(
    first: int,
    blocks: int,
    parent: int | None = None,
    *,
    form: str = "array",
    tokens: int | None = None,
    eagle: bool = False,
    **fields: object,
) -> object:
    """An event of blocks of two tokens."""
    hashes = list(range(first, first + blocks))
    count = 2 * blocks if tokens is None else tokens
    plain = [100_000 + first * 2 + at for at in range(count)]
    told: object = [[token, token + 1] for token in plain] if eagle else plain
    names: dict[str, object] = {
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": told,
        "block_size": 2,
        **fields,
    }
    if form == "map":
        return {"type": "BlockStored", **names}
    if form == "bin map":
        return {b"type": b"BlockStored", **{name.encode(): names[name] for name in names}}
    tail = [names.get("extra_keys")]
    if "block_mm_infos" in names:
        tail.append(names["block_mm_infos"])
    tail += [names.get("group_idx"), names.get("kv_cache_spec_kind"), None, names.get("locality")]
    head = ["BlockStored", hashes, parent, told, 2, "lora id", names.get("medium")]
    salt = names.get("cache_salt")
    return [*head, {"cache_salt": salt} if salt else names.get("lora_name"), *tail]


@st.composite
def stored_events(draw: st.DrawFn) -> object:
    blocks = draw(st.integers(0, 30))
    fields: dict[str, object] = {}
    if draw(st.booleans()):
        key = st.sampled_from((HEX, [HEX, 3], "dynamo-cache-salt:s", "ad", None, 1.5, [], {"a": 1}))
        keys = st.none() | st.lists(key, max_size=2)
        fields["extra_keys"] = draw(st.lists(keys, max_size=blocks + 1))
    if draw(st.booleans()):
        info = st.none() | st.builds(
            lambda mm_hash: {"mm_objects": [{"mm_hash": mm_hash, "offsets": [[0, 2]]}]},
            st.integers(0, 2**64 - 1),
        )
        fields["block_mm_infos"] = draw(st.lists(info, max_size=blocks))
    for name, values in {
        "medium": ("GPU", "CPU", "FOO"),
        "lora_name": ("ad",),
        "cache_salt": ("s", ""),
        "group_idx": (0, 1),
        "kv_cache_spec_kind": ("full_attention", "mamba"),
        "locality": ("LOCAL", "REMOTE"),
    }.items():
        if draw(st.integers(0, 3)) == 0:
            fields[name] = draw(st.sampled_from(values))
    eagle = draw(st.booleans())
    first = draw(st.integers(1, 60))
    if eagle or fields:
        # Of one name for two contents, later parts go on below the newer one.
        first += 1000 * draw(st.integers(1, 2**40))
    return stored(
        first,
        blocks,
        draw(st.none() | st.integers(1, 60)),
        form=draw(st.sampled_from(("array", "map", "bin map"))),
        tokens=draw(st.none() | st.integers(0, 2 * blocks + 3)),
        eagle=eagle,
        **fields,
    )


REMOVED = st.builds(
    lambda names, medium, form: (
        ["BlockRemoved", names, medium]
        if form
        else {"type": "BlockRemoved", "block_hashes": names, "medium": medium}
    ),
    st.lists(st.integers(1, 90), max_size=40),
    st.sampled_from((None, "CPU", "FOO")),
    st.booleans(),
)
JUNK = st.sampled_from(
    [
        *(None, 7, "x" * 300, [], {}, [b"\xff"] * 200),
        *(["Moved"] * 90, {"type": "Moved", "x": [0] * 300}),
        ["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, None, *[None] * 300],
        ["BlockStored", None, None, [0] * 300, 2],
        {"type": "BlockStored", "token_ids": [0] * 300},
        {"type": "BlockStored", "block_hashes": [[0] * 300], "token_ids": [], "block_size": 2},
        *(["AllBlocksCleared", "x" * 300], {"type": "Ignored", "more": ["x"] * 300}),
    ]
)


def outcome(payload: bytes) -> tuple[list[StoredRun], EventCounts]:
    index = KvIndex(2)
    ingest = KvIngest(index, 1, 0)
    small = decode_small(payload)
    for batch in [small] if small is not None else slices(payload):
        ingest.apply(batch)
    return [run for runs in index.dump() for run in runs], ingest.counts


@settings(deadline=None)
@given(
    st.lists(stored_events() | REMOVED | JUNK, max_size=6),
    st.sampled_from(([1.5], ["now" * 100])),
    st.sampled_from(((), (3,), (None, [0] * 300))),
    st.booleans(),
)
def test_a_batch_in_slices_has_the_outcome_of_one_at_once(
    events: list[object], time: list[object], after: tuple[object, ...], is_map: bool
) -> None:
    batch: object = [*time, events, *after]
    if is_map:
        batch = {"ts": time, "events": events, "dp_rank": 3, "x" * 300: [0] * 300}
    payload = encode(batch)
    at_once = outcome(payload)
    with small_windows(240):
        in_slices = outcome(payload)
    assert in_slices[0] == at_once[0]
    assert sorted(in_slices[1].results()) == sorted(at_once[1].results())
    assert in_slices[1].blocks_stored == at_once[1].blocks_stored
    assert in_slices[1].blocks_removed == at_once[1].blocks_removed


def test_what_hangs_below_a_refused_part_is_left_out_and_counted_once() -> None:
    known = stored(1, 30)
    orphan = stored(5, 30, parent=99)  # its later parts hang below blocks that are held
    with small_windows(240):
        index = KvIndex(2)
        ingest = KvIngest(index, 1, 0)
        for batch in slices(encode([1.5, [known, orphan], 0])):
            ingest.apply(batch)
    assert index.total_blocks == 30
    assert ingest.counts.skipped == {("stored", "unknown_parent"): 1}


def test_a_large_event_with_a_fault_is_skipped_whole() -> None:
    """A token that cannot be read, and a name that comes twice."""
    for field, at, value, reason in ((3, 40, "x", "malformed"), (1, 29, 1, "self_reference")):
        event: Any = stored(1, 30)
        event[field][at] = value
        with small_windows(240):
            runs, counts = outcome(encode([1.5, [event], 0]))
        assert (runs, counts.skipped, counts.stored) == ([], {("stored", reason): 1}, 0)


@pytest.mark.parametrize(
    "lookahead", [None, [[7]] * 29, [[at] for at in range(100_004, 100_064, 2)]]
)
@pytest.mark.parametrize("eagle", [False, True])
def test_the_parts_of_an_event_say_what_it_says(lookahead: object, eagle: bool) -> None:
    event = stored(1, 30, 99, form="map", eagle=eagle, lookahead_token_ids=lookahead)
    told = []
    for blocks in (30, 4):
        index = KvIndex(2)
        ingest = KvIngest(index, 1, 0, is_eagle=eagle or lookahead is not None)
        store_blocks(index, (1, 0), Tier.DEVICE, None, [99], bytes(8))
        with small_windows(240, blocks=blocks):
            for batch in slices(encode([1.5, [event], 0])):
                ingest.apply(batch)
        told.append([run.tokens_hashes for runs in index.dump() for run in runs])
    assert told[0] == told[1]
    assert sum(map(len, told[0])) == 31


BLOCKS = 15_625  # of 16 tokens: a prompt of 250 000


def vllm() -> list[object]:
    hashes = [2**63 + block for block in range(BLOCKS)]
    return [["BlockStored", hashes, None, list(range(16 * BLOCKS)), 16, None, "GPU", None, None]]


def sglang() -> Iterator[object]:
    for block in range(BLOCKS):
        yield {
            "type": "BlockStored",
            "block_hashes": [2**62 + block],
            "parent_block_hash": 2**62 + block - 1 if block else None,
            "token_ids": list(range(100_000 + 16 * block, 100_016 + 16 * block)),
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
        }


@pytest.mark.parametrize("events", [vllm, sglang])
def test_a_prompt_of_250_000_tokens_passes(events: "type[Iterator[object]]") -> None:
    payload = encode([1.5, list(events()), None])
    assert len(payload) <= kv_events.MAX_BATCH_BYTES
    index = KvIndex(16)
    ingest = KvIngest(index, 1, 0)
    for batch in slices(payload):
        ingest.apply(batch)
    assert (index.total_blocks, ingest.counts.skipped) == (BLOCKS, {})
    assert ingest.counts.stored in (1, BLOCKS)


# Bounded work


@pytest.mark.parametrize(
    "junk", [None, 1, [], {}, [1], ["BlockMoved"], ["BlockRemoved", [5]], "", [[[]]]], ids=repr
)
def test_a_slice_has_a_bounded_number_of_events(junk: object) -> None:
    for count in (2_000, 8_000):
        payload = encode([1.5, [junk] * count, 0])
        assert decode_small(payload) is None
        batches = slices(payload)
        handled = [
            sum(skipped.count for skipped in batch.skipped)
            + sum(record.events for record in batch.events if isinstance(record, BlockRemoved))
            for batch in batches
        ]
        assert max(handled) <= SLICE_EVENTS
        assert sum(handled) == count
        assert all(len(batch.skipped) <= 1 for batch in batches)


def test_a_part_of_an_event_has_a_bounded_number_of_blocks() -> None:
    batches = slices(encode([1.5, vllm(), 0]))
    records: list[Any] = [record for batch in batches for record in batch.events]
    assert [len(batch.events) for batch in batches] == [1] * len(batches)
    assert all(len(record.engine_hashes) >> 3 <= PART_BLOCKS for record in records)
    assert all(len(record.tokens) >> 2 <= 16 * PART_BLOCKS for record in records)
    parts = [record.part for record in records]
    assert parts == [EventPart.FIRST, *[EventPart.MIDDLE] * (len(parts) - 2), EventPart.LAST]


@given(st.binary(max_size=400), st.integers(40, 80))
def test_any_bytes_are_slices_or_no_batch(payload: bytes, window: int) -> None:
    with small_windows(window):
        told: list[EventBatch] = []
        try:
            told.extend(batch_slices(payload))
        except NotABatch:
            assert not told, "refused before anything was told"
