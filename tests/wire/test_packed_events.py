"""The reader of ordinary batches against the one that reads all of them."""

from struct import pack, unpack
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.index.shapes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    PackedRemoved,
    PackedStored,
    Part,
)
from lean_selector.wire.kv_events import MAX_EVENT_BLOCKS, NotABatch
from lean_selector.wire.packed_events import PART_BLOCKS, packed_batch
from tests.support.kv_batches import decode_batch

encode = msgspec.msgpack.encode

NUMBERS = [0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1]
U64 = st.sampled_from([*NUMBERS, 2**32, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
U32 = st.sampled_from(NUMBERS) | st.integers(0, 2**32 - 1)
NAMES = st.lists(U64, max_size=12, unique=True)
MEDIUM = st.sampled_from([None, "GPU", "cpu", "DISK", "tape", "x" * 40])
GROUP = st.none() | st.integers(0, 300)


@st.composite
def stored(draw: st.DrawFn) -> list[object]:
    names = draw(NAMES)
    parent = draw(st.none() | U64.filter(lambda name: name not in names))
    size = draw(st.integers(1, 4))
    tokens = draw(st.lists(U32, max_size=4 * len(names) + 3))
    keys = draw(st.sampled_from([None, [], [None] * len(names)]))
    kind = draw(st.sampled_from([None, "full_attention", "mamba"]))
    window = draw(st.none() | st.integers(0, 4096))
    tail = [draw(st.none() | st.integers(0, 9)), draw(MEDIUM), None, keys, draw(GROUP), kind]
    event: list[object] = ["BlockStored", names, parent, tokens, size, *tail, window, None]
    return event[: draw(st.integers(5, len(event)))]


@st.composite
def removed(draw: st.DrawFn) -> list[object]:
    event: list[object] = ["BlockRemoved", draw(NAMES), draw(MEDIUM), draw(GROUP), None]
    return event[: draw(st.integers(2, len(event)))]


EVENTS = st.lists(stored() | removed() | st.just(["AllBlocksCleared"]), max_size=8)
RANK = st.none() | st.integers(0, 2**31 - 1)
PLAIN = st.one_of(
    st.builds(lambda events: [0.5, events], EVENTS),
    st.builds(lambda events, rank: [0.5, events, rank], EVENTS, RANK),
)


def told(batch: EventBatch) -> list[tuple[Any, ...]]:
    """What the events say, in one form; blocks beyond names or tokens left out, parts joined."""
    told: list[tuple[Any, ...]] = []
    for event in batch.events:
        one = told_of(event)
        last = told[-1] if told else None
        is_part = isinstance(event, BlockStored | PackedStored) and event.part > Part.FIRST
        if is_part and last is not None:
            assert one[2] == last[1][-1], "the chain goes on"
            told[-1] = (last[0], last[1] + one[1], last[2], last[3] + one[3], *last[4:])
        elif last is not None and one[0] == last[0] == "removed" and one[2:-1] == last[2:-1]:
            # One reader joins removals by what their medium is, the other by its name.
            told[-1] = (*last[:1], last[1] + one[1], *last[2:-1], last[-1] + one[-1])
        else:
            told.append(one)
    return told


def told_of(event: Event) -> tuple[Any, ...]:
    if isinstance(event, PackedStored):
        names = unpack(f"<{len(event.names) // 8}Q", event.names)
        tokens = unpack(f"<{len(event.tokens) // 4}I", event.tokens)
        assert len(tokens) == len(names) * event.block_size
        rest = event.block_size, event.tier, event.group_idx, event.kind
        return "stored", names, event.parent_hash, tokens, *rest
    if isinstance(event, BlockStored):
        assert (event.lora_name, event.cache_salt, event.is_eagle) == (None, None, False)
        assert (event.is_remote, event.unknown_keys) == (False, None)
        assert not any(event.mm_hashes or ())
        size = event.block_size
        blocks = min(len(event.block_hashes), len(event.token_ids) // size)
        names, tokens = tuple(event.block_hashes[:blocks]), tuple(event.token_ids[: blocks * size])
        rest = size, event.tier, event.group_idx, event.kind
        return "stored", names, event.parent_hash, tokens, *rest
    if isinstance(event, PackedRemoved):
        names = unpack(f"<{len(event.names) // 8}Q", event.names)
        return "removed", names, event.tier, event.group_idx, event.kind, event.events
    if isinstance(event, BlockRemoved):
        assert not event.is_remote
        removed = tuple(event.block_hashes)
        return "removed", removed, event.tier, event.group_idx, event.kind, event.events
    assert isinstance(event, AllBlocksCleared)
    return ("cleared",)


@settings(max_examples=300)
@given(PLAIN, st.binary(max_size=3))
def test_an_ordinary_batch_is_taken_and_read_as_by_the_other_reader(
    batch: list[object], behind: bytes
) -> None:
    payload = encode(batch) + behind
    packed = packed_batch(payload)
    assert packed is not None
    other = decode_batch(payload)
    assert not other.skipped
    assert packed.dp_rank == other.dp_rank
    assert told(packed) == told(other)


@settings(max_examples=600)
@given(PLAIN, st.data())
def test_a_batch_with_other_bytes_in_it_is_read_as_by_the_other_reader_or_not_taken(
    batch: list[object], data: st.DataObject
) -> None:
    payload = bytearray(encode(batch))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1))
        # Headers of MessagePack more often than others.
        byte = st.sampled_from([0x90, 0xC0, 0xC4, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD9, 0xDC, 0xDD])
        payload[at] = data.draw(byte | st.integers(0, 255))
    payload = payload[: data.draw(st.just(len(payload)) | st.integers(0, len(payload)))]
    packed = packed_batch(bytes(payload))
    if packed is None:
        return
    try:
        other = decode_batch(bytes(payload))
    except NotABatch:
        pytest.fail("the other reader takes it for no batch")
    assert not other.skipped
    assert packed.dp_rank == other.dp_rank
    assert told(packed) == told(other)


PLAIN_EVENT: list[Any] = ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 0]


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, "BlockMoved"),
        (1, [1, -2]),
        (1, [1, b"12345678"]),
        (1, [1, 1]),
        (2, -5),
        (2, 2),
        (2, b"12345678"),
        (3, [1, 2, 3, 2**32]),
        (3, [1, 2, 3, -1]),
        (3, [(1, 2), (2, 3)]),
        (4, 0),
        (4, 2**16),
        (5, "seven"),
        (7, "adapter"),
        (7, {"cache_salt": "s"}),
        (8, [["salt"], None]),
        (9, []),
    ],
)
def test_what_goes_into_a_hash_or_contradicts_is_left_to_the_other_reader(
    position: int, value: object
) -> None:
    assert packed_batch(encode([0.5, [PLAIN_EVENT], 0])) is not None
    event = [*PLAIN_EVENT[:position], value, *PLAIN_EVENT[position + 1 :]]
    assert packed_batch(encode([0.5, [event], 0])) is None


@pytest.mark.parametrize(
    "batch",
    [
        {"ts": 0.5, "events": []},
        [0.5],
        [1, []],
        [0.5, [], -1],
        [0.5, [], 0, 0],
        [0.5, [["AllBlocksCleared"]] * 257],
        [0.5, [{"type": "AllBlocksCleared"}]],
        [0.5, [["AllBlocksCleared", 1]]],
        [0.5, [["BlockRemoved"]]],
        [0.5, [["BlockRemoved", [1], "GPU", 0, None, None]]],
        [0.5, [["BlockRemoved", [1], "GPU", 0, "REMOTE"]]],
        [0.5, [["BlockRemoved", [1], "x" * 300]]],
        [0.5, [["BlockRemoved", [1], 5]]],
        [0.5, [["BlockStored", [1], None, [1, 2]]]],
        [0.5, [["BlockStored", [1], None, [1, 2], 2, *[None] * 9]]],
        [0.5, [["BlockStored", [1], None, [1, 2], 2, 0, None, None, None, 0, None, None, "FAR"]]],
    ],
)
def test_an_unusual_batch_is_left_to_the_other_reader(batch: object) -> None:
    assert packed_batch(encode(batch)) is None


def test_an_event_beyond_the_bound_is_left_to_the_other_reader() -> None:
    for blocks, is_taken in ((MAX_EVENT_BLOCKS, True), (MAX_EVENT_BLOCKS + 1, False)):
        names = list(range(1, blocks + 1))
        for event in (["BlockStored", names, None, names, 1], ["BlockRemoved", names]):
            assert (packed_batch(encode([0.5, [event], 0])) is not None) is is_taken


def test_removals_in_a_row_come_in_records_of_bounded_length() -> None:
    removals = [["BlockRemoved", list(range(at, at + 300))] for at in range(0, 30_000, 300)]
    batch = packed_batch(encode([0.5, removals, 0]))
    assert batch is not None
    records = [event for event in batch.events if isinstance(event, PackedRemoved)]
    assert {record.events for record in records} == {2}  # the second fills it
    assert b"".join(record.names for record in records) == pack("<30000Q", *range(30_000))


@pytest.mark.parametrize("more", [0, 1, PART_BLOCKS, PART_BLOCKS + 1])
def test_a_long_chain_comes_in_parts(more: int) -> None:
    names = [name << 40 for name in range(1, PART_BLOCKS + more + 1)]
    tokens = list(range(2 * len(names)))
    payload = encode([0.5, [["BlockStored", names, 7, tokens, 2]], 0])
    packed = packed_batch(payload)
    assert packed is not None
    parts = [event for event in packed.events if isinstance(event, PackedStored)]
    assert len(parts) == -(-len(names) // PART_BLOCKS)
    assert all(len(part.names) >> 3 <= PART_BLOCKS for part in parts)
    assert [part.part for part in parts[1:-1]] == [Part.MIDDLE] * (len(parts) - 2)
    ends = parts[0].part, parts[-1].part
    assert ends == ((Part.FIRST, Part.LAST) if more else (Part.WHOLE, Part.WHOLE))
    assert told(packed) == told(decode_batch(payload))


@pytest.mark.parametrize("blocks", [8, 9, 100])
@pytest.mark.parametrize("name", [0, 5, 2**64 - 1])
def test_a_name_that_comes_twice_is_seen_wherever_it_stands(blocks: int, name: int) -> None:
    names = list(range(100, 100 + blocks))
    for first, second in ((0, blocks - 1), (blocks // 2, blocks // 2 + 1)):
        given = names.copy()
        given[first] = name
        once = ["BlockStored", given, None, [0] * blocks, 1]
        assert packed_batch(encode([0.5, [once], 0])) is not None
        below = ["BlockStored", given, name, [0] * blocks, 1]
        assert packed_batch(encode([0.5, [below], 0])) is None
        given[second] = name
        assert packed_batch(encode([0.5, [once], 0])) is None
