"""Batches read in slices: the same outcome as at once, and bounded work whatever the bytes."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import EventCounts, KvIngest
from lean_selector.core.index.shapes import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPart,
    StoredRun,
)
from lean_selector.wire import kv_events
from lean_selector.wire.kv_events import NotABatch, batch_slices, decode_small
from lean_selector.wire.messagepack import WINDOW_BYTES
from tests.support.kv_batches import decode_batch, small_windows
from tests.support.kv_records import hashes_of

encode = msgspec.msgpack.encode
HEX = "a1b2c3d4e5f60718" + 48 * "0"


def slices(payload: bytes) -> list[EventBatch]:
    return [batch for batch in batch_slices(payload) if batch is not None]


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
    return stored(
        draw(st.integers(1, 60)),
        blocks,
        draw(st.none() | st.integers(1, 60)),
        form=draw(st.sampled_from(("array", "map", "bin map"))),
        tokens=draw(st.none() | st.integers(0, 2 * blocks + 3)),
        eagle=draw(st.booleans()),
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
    payload = encode(batch) + b"\xc1 and what comes after it"
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


def test_of_a_large_event_with_a_fault_only_parts_before_it_stand() -> None:
    """A token that cannot be read, and a name that comes twice."""
    for field, at, value, reason, stands in (
        (3, 40, "x", "malformed", 20),
        (1, 29, 1, "self_reference", 0),
    ):
        event: Any = stored(1, 30)
        event[field][at] = value
        with small_windows(240):
            runs, counts = outcome(encode([1.5, [event], 0]))
        assert sum(len(run.block_hashes) for run in runs) == stands  # of whole parts
        assert (counts.skipped, counts.stored) == ({("stored", reason): 1}, 0)


def test_a_large_removal_comes_in_parts_and_counts_once() -> None:
    names = [2**40 + name for name in range(30)]
    as_map = {"type": "BlockRemoved", "block_hashes": names, "medium": None}
    for form in (["BlockRemoved", names, None], as_map):
        with small_windows(240):
            batches = slices(encode([1.5, [form], 0]))
        removals: list[Any] = [record for batch in batches for record in batch.events]
        assert [type(each) for each in removals] == [BlockRemoved] * 8
        assert [name for each in removals for name in hashes_of(each)] == names
        assert [len(each.names) >> 3 for each in removals] == [4] * 7 + [2]
        assert [each.events for each in removals] == [0] * 7 + [1]


# Bounds


def test_a_large_event_of_too_many_fields_is_skipped() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [5], **{f"x{n}": n for n in range(1023)}}
    for count, skipped in ((1025, {("unknown", "malformed"): 1}), (1024, {})):
        fields = dict([*event.items()][:count])
        with small_windows(240):
            assert outcome(encode([1.5, [fields], 0]))[1].skipped == skipped


def test_a_block_of_too_many_tokens_is_skipped() -> None:
    event = ["BlockStored", [1], None, [5] * 70_000, 70_000, None]
    (skipped,) = decode_batch(encode([1.5, [event], 0])).skipped
    assert (skipped.event_type, skipped.reason) == ("stored", "oversize_block")


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
    few, many = (encode([1.5, [junk] * count, 0]) for count in (2_000, 8_000))
    assert decode_small(few) is None
    for payload, count in ((few, 2_000), (many, 8_000)):
        batches = slices(payload)
        handled = [
            sum(skipped.count for skipped in batch.skipped)
            + sum(record.events for record in batch.events if isinstance(record, BlockRemoved))
            for batch in batches
        ]
        assert max(handled) <= kv_events.SLICE_EVENTS
        assert sum(handled) == count
        assert len(handled) <= count // kv_events.SLICE_EVENTS + 8
        assert all(len(batch.skipped) <= 1 for batch in batches)


def test_a_part_of_an_event_has_a_bounded_number_of_blocks() -> None:
    batches = slices(encode([1.5, vllm(), 0]))
    records: list[Any] = [record for batch in batches for record in batch.events]
    assert {type(record) for record in records} == {BlockStored}
    assert all(len(record.names) >> 3 <= kv_events.PART_BLOCKS for record in records)
    assert all(len(record.tokens) >> 2 <= kv_events.PART_TOKENS for record in records)
    parts = [record.part for record in records]
    assert parts == [EventPart.FIRST, *[EventPart.MIDDLE] * (len(parts) - 2), EventPart.LAST]


def array_of(count: int, value: bytes) -> msgspec.Raw:
    return msgspec.Raw(b"\xdd" + count.to_bytes(4, "big") + value * count)


FULL = kv_events.MAX_BATCH_BYTES - 4096
NAMES = list(range(2**40, 2**40 + 4096))
HEAVY: dict[str, Callable[[], object]] = {
    "events of nothing": lambda: [1.5, array_of(65_536, b"\xc0")],
    "more events than may be": lambda: [1.5, array_of(FULL, b"\x90")],
    "events of a window": lambda: [1.5, [array_of(65_000, b"\x90")] * 8],
    "fields without end": lambda: [1.5, [array_of(FULL, b"\x90")]],
    "pairs without end": lambda: [
        1.5, [msgspec.Raw(b"\xdf" + (FULL // 2).to_bytes(4, "big") + b"\x01" * (FULL // 2 * 2))]
    ],
    "a batch of junk": lambda: array_of(FULL, b"\x90"),
    "time": lambda: [array_of(FULL, b"\x90"), []],
    "rank": lambda: [1.5, [], array_of(FULL, b"\x90")],
    "tokens": lambda: [1.5, [["BlockStored", NAMES, None, array_of(FULL // 2, b"\x01"), 16]]],
    "pairs of tokens": lambda: [
        1.5, [["BlockStored", NAMES, None, array_of(FULL // 4, b"\x92\x01\x01"), 16]]
    ],
    "blocks of one token": lambda: [
        1.5, [["BlockStored", list(range(65_536)), None, array_of(65_536, b"\x01"), 1]]
    ],
    "names as bytes": lambda: [
        1.5, [["BlockRemoved", array_of(65_536, b"\xc4\x20" + bytes(32))]]
    ],
    "keys": lambda: [
        1.5, [["BlockStored", NAMES, None, [1] * 4096, 1, None, None, None,
               [array_of(800, b"\x90")] * 512]]
    ],
    "one key": lambda: [
        1.5, [["BlockStored", NAMES, None, [1] * 4096, 1, None, None, None,
               [array_of(FULL // 2, b"\x90")]]]
    ],
    "an adapter": lambda: [
        1.5, [["BlockStored", NAMES, None, [1] * 4096, 1, array_of(FULL // 2, b"\x90"), None]]
    ],
}  # fmt: skip


@pytest.mark.parametrize("content", HEAVY)
def test_no_step_of_reading_grows_with_the_message(
    content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes objects sees two windows between two slices, or the names of 64 Ki blocks; what
    only passes over values, and makes at most 64 Ki raw ones, sees the message."""
    payload = encode(HEAVY[content]())
    assert len(payload) <= kv_events.MAX_BATCH_BYTES
    seen = {"windows": 0, "names": 0, "passes": 0}

    def watch(name: str, kind: str) -> None:
        decode = getattr(kv_events, name)

        def watched(data: bytes) -> object:
            seen[kind] += len(data)
            return decode(data)

        monkeypatch.setattr(kv_events, name, watched)

    for name in ("_array_event_list", "_map_event_list", "_tokens", "_keys", "_infos", "_untyped"):
        watch(name, "windows")
    watch("_hashes", "names")
    for name in ("_raw_list", "_raw_map", "_raw_map_of_bin"):
        watch(name, "passes")
    slices = batch_slices(payload)
    for _ in range(100_000):
        try:
            part = next(slices)
        except (StopIteration, NotABatch):
            break
        assert seen["windows"] <= 3 * WINDOW_BYTES
        assert seen["passes"] <= 2 * len(payload)
        if part is not None:
            records = [event for event in part.events if isinstance(event, BlockStored)]
            assert sum(len(event.names) for event in records) >> 3 <= WINDOW_BYTES
            assert sum(len(event.tokens) for event in records) >> 2 <= WINDOW_BYTES
        seen.update(windows=0, names=0, passes=0)


@given(st.binary(max_size=400), st.integers(40, 80))
def test_any_bytes_are_slices_or_no_batch(payload: bytes, window: int) -> None:
    with small_windows(window):
        told = []
        try:
            for batch in batch_slices(payload):
                told += [batch] if batch is not None else []
        except NotABatch:
            assert not told, "refused before anything was told"
