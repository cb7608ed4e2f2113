"""The reader of ordinary batches against the one that reads all of them."""

import random
from collections.abc import Callable
from struct import pack
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lean_selector.core.index.shapes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventPart,
)
from lean_selector.wire.kv_events import MAX_EVENT_BLOCKS, NotABatch
from lean_selector.wire.packed_events import PART_BLOCKS, packed_batch
from tests.support.kv_batches import decode_batch
from tests.support.kv_records import hashes_of, tokens_of

encode = msgspec.msgpack.encode

NUMBERS = [0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1]
U64 = st.sampled_from([*NUMBERS, 2**32, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
U32 = st.sampled_from(NUMBERS) | st.integers(0, 2**32 - 1)
# A name as the engine's own number, as a signed one, or as a digest, which ends in it.
NAMES = st.lists(U64, max_size=12, unique=True)
FORMS = st.sampled_from(["unsigned", "signed", "digest"])
SALT = "dynamo-cache-salt:"
ADAPTER = st.sampled_from([None, None, "", "adapter", "x" * 70, SALT + "t"])


def formed(name: int, form: str) -> int | bytes:
    if form == "digest":
        return bytes(24) + name.to_bytes(8, "big")
    return name - 2**64 if form == "signed" and name >= 2**63 else name


MEDIUM = st.sampled_from([None, "GPU", "cpu", "DISK", "tape", "x" * 40])
GROUP = st.none() | st.integers(0, 300)


STORED = (
    *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
    *("medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind"),
    *("kv_cache_spec_sliding_window", "locality"),
)
REMOVED = ("type", "block_hashes", "medium", "group_idx", "locality")
BEHIND = [
    0,
    "text",
    {"a": [1]},
    "t" * 300,
]  # what an array may have behind its last field that is known
# Of maps alone: what they say besides, and is not read.
VALUES = [None, True, -7, 300, 70_000, -70_000, 2**64 - 1, 0.5, "text" * 20, b"x" * 300, "y" * 300]
BESIDES = st.dictionaries(
    st.sampled_from(["session_id", "what comes next"]),
    st.sampled_from([*VALUES, VALUES, {"a": VALUES}, [[1, 2], []], [list(range(20))] * 17]),
    max_size=2,
)


@st.composite
def laid_out(draw: st.DrawFn, event: list[object], names: tuple[str, ...], least: int) -> object:
    """As an array, which may end early, or as a map, whose fields may come in any order."""
    if draw(st.booleans()):
        return [*event, *BEHIND][: draw(st.integers(least, len(event) + 3))]
    fields = list(zip(names, event, strict=True))[1:]
    needed = {"block_hashes", "token_ids", "block_size"}
    fields = [each for each in fields if each[0] in needed or draw(st.booleans())]
    fields = draw(st.permutations(fields))
    salt = draw(st.sampled_from([{}, {}, {"cache_salt": "s"}, {"cache_salt": SALT + "s"}]))
    return {"type": event[0], **dict(fields), **salt, **draw(BESIDES)}


@st.composite
def stored(draw: st.DrawFn) -> object:
    names = draw(NAMES)
    parent = draw(st.none() | U64.filter(lambda name: name not in names))
    form = draw(FORMS)
    size = draw(st.integers(1, 4))
    tokens = draw(st.lists(U32, max_size=4 * len(names) + 3))
    adapter = draw(ADAPTER)
    key = st.sampled_from(["adapter", "", "k" * 63, SALT, SALT + "t", SALT + "u" * 50])
    keys = draw(st.none() | st.lists(st.none() | st.lists(key, max_size=3), max_size=len(names)))
    kind = draw(st.sampled_from([None, "full_attention", "mamba"]))
    window = draw(st.none() | st.integers(0, 4096))
    tail = [draw(st.none() | st.integers(0, 9)), draw(MEDIUM), adapter, keys, draw(GROUP), kind]
    given = [formed(name, form) for name in names]
    above = None if parent is None else formed(parent, form)
    here = draw(st.sampled_from([None, "LOCAL", "local"]))
    event: list[object] = ["BlockStored", given, above, tokens, size, *tail, window, here]
    return draw(laid_out(event, STORED, 5))


@st.composite
def removed(draw: st.DrawFn) -> object:
    form = draw(FORMS)
    given = [formed(name, form) for name in draw(NAMES)]
    here = draw(st.sampled_from([None, "LOCAL", "local"]))
    event: list[object] = ["BlockRemoved", given, draw(MEDIUM), draw(GROUP), here]
    return draw(laid_out(event, REMOVED, 2))


CLEARED = st.sampled_from([["AllBlocksCleared"], {"type": "AllBlocksCleared"}])
EVENTS = st.lists(stored() | removed() | CLEARED, max_size=8)
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
        is_part = isinstance(event, BlockStored) and event.part > EventPart.FIRST
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
    if isinstance(event, BlockStored):
        assert (event.is_eagle, event.is_remote, event.unknown_keys) == (False, False, None)
        assert not any(event.mm_hashes or ())
        assert event.fault is None
        size, hashes, tokens = event.block_size, hashes_of(event), tokens_of(event)
        blocks = min(len(hashes), len(tokens) // size)
        names, tokens_in = tuple(hashes[:blocks]), tuple(tokens[: blocks * size])
        hashed = event.lora_name, event.cache_salt
        rest = size, event.tier, event.group_idx, event.kind, hashed
        return "stored", names, event.parent_hash, tokens_in, *rest
    if isinstance(event, BlockRemoved):
        assert not event.is_remote
        removed = tuple(hashes_of(event))
        return "removed", removed, event.tier, event.group_idx, event.kind, event.events
    assert isinstance(event, AllBlocksCleared)
    return ("cleared",)


# Headers of MessagePack more often than other bytes.
BYTES = [0x90, 0xC0, 0xC4, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD9, 0xDC, 0xDD] * 20 + [*range(256)]


@settings(max_examples=150)
@given(PLAIN, st.binary(max_size=3), st.integers(0, 2**32))
# One of its damages makes the session id (position 14) no UTF-8.
@example([0.5, [["BlockStored", [], None, [], 1, *[None] * 8, 0, "text", {"a": [1]}]]], b"", 1)
def test_a_batch_is_read_as_by_the_other_reader_and_if_it_is_damaged_so_or_not_taken(
    batch: list[object], behind: bytes, seed: int
) -> None:
    whole = encode(batch)
    assert is_read_alike(whole + behind)
    draws = random.Random(seed)
    for _ in range(10):
        damaged = bytearray(whole)
        for _ in range(draws.randint(1, 3)):
            damaged[draws.randrange(len(damaged))] = draws.choice(BYTES)
        end = draws.choice([len(damaged), draws.randint(0, len(damaged))])
        is_read_alike(bytes(damaged[:end]))


def is_read_alike(payload: bytes) -> bool:
    """Whether it is taken; then the other reader says the same."""
    packed = packed_batch(payload)
    if packed is None:
        return False
    try:
        other = decode_batch(payload)
    except NotABatch:
        pytest.fail(f"the other reader takes it for no batch: {payload.hex()}")
    assert not other.skipped
    assert packed.dp_rank == other.dp_rank
    assert told(packed) == told(other)
    return True


PLAIN_EVENT: list[Any] = ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 0]
PLAIN_EVENT += ["full_attention", None, None]


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, "BlockMoved"),
        (1, [1, b"1234567"]),
        (1, [1, 1]),
        (2, 2),
        (2, b"1234567"),
        (3, [1, 2, 3, 2**32]),
        (3, [1, 2, 3, -1]),
        (3, [(1, 2), (2, 3)]),
        (4, 0),
        (4, 2**16),
        (5, "seven"),
        (7, {"cache_salt": "s"}),
        (8, [["a1b2c3d4e5f60718" * 4], None]),
        (8, [None, [["image", 0]]]),
        (8, [[None]]),
        (12, "REMOTE"),
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
        [0.5, [{"type": "AllBlocksCleared", "group_idx": 0}]],
        [0.5, [{"block_hashes": [1], "type": "BlockRemoved"}]],
        [0.5, [{"type": "BlockRemoved"}]],
        [0.5, [{"type": "BlockRemoved", "block_hashes": [1], "kv_cache_spec_kind": "mamba"}]],
        [0.5, [{"type": "BlockStored", "block_hashes": [1], "token_ids": [1]}]],
        [0.5, [["AllBlocksCleared", 1]]],
        [0.5, [["BlockRemoved"]]],
        [0.5, [["BlockRemoved", [1], "GPU", 0, "REMOTE"]]],
        [0.5, [["BlockRemoved", [1], "x" * 300]]],
        [0.5, [["BlockRemoved", [1], 5]]],
        [0.5, [["BlockStored", [1], None, [1, 2]]]],
    ],
)
def test_an_unusual_batch_is_left_to_the_other_reader(batch: object) -> None:
    assert packed_batch(encode(batch)) is None


@pytest.mark.parametrize("name", [-1, -32, -33, -128, -129, -(2**15) - 1, -(2**31) - 1, -(2**63)])
def test_hashes_below_zero_are_the_same_bits_unsigned(name: int) -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [name, name + 2**64], "group_idx": 0}
    batch = packed_batch(encode([0.5, [removed]]))
    assert batch is not None
    assert [told_of(event)[1] for event in batch.events] == [(name + 2**64,) * 2]


MAP: dict[str, Any] = dict(zip(STORED, PLAIN_EVENT, strict=True))


def test_a_map_may_have_more_fields_than_are_known() -> None:
    more = {f"field {at}": at for at in range(20)}
    packed = packed_batch(encode([0.5, [{**MAP, **more}]]))
    assert packed is not None
    assert told(packed) == told(decode_batch(encode([0.5, [MAP]])))


@pytest.mark.parametrize(
    "other",
    [
        {"locality": "REMOTE"},
        {"block_mm_infos": []},
        {"a name of more than thirty-one bytes": 1},
        {"ownership": msgspec.msgpack.Ext(1, b"")},
        {"ownership": msgspec.msgpack.Ext(1, b"abc")},
        {"ownership": "x" * 70_000},
    ],
)
def test_a_map_that_says_more_is_left_to_the_other_reader(other: dict[str, Any]) -> None:
    assert packed_batch(encode([0.5, [MAP]])) is not None
    assert packed_batch(encode([0.5, [{**MAP, **other}]])) is None


def test_a_field_that_comes_twice_is_left_to_the_other_reader() -> None:
    removed = encode({"type": "BlockRemoved", "block_hashes": [1]})
    twice = msgspec.Raw(b"\x83" + removed[1:] + encode("block_hashes") + encode([2]))
    assert packed_batch(encode([0.5, [msgspec.Raw(removed)]])) is not None
    assert packed_batch(encode([0.5, [twice]])) is None


def test_an_event_beyond_the_bound_is_left_to_the_other_reader() -> None:
    for blocks, is_taken in ((MAX_EVENT_BLOCKS, True), (MAX_EVENT_BLOCKS + 1, False)):
        names = list(range(1, blocks + 1))
        for event in (["BlockStored", names, None, names, 1], ["BlockRemoved", names]):
            assert (packed_batch(encode([0.5, [event], 0])) is not None) is is_taken


def test_removals_in_a_row_come_in_records_of_bounded_length() -> None:
    removals = [["BlockRemoved", list(range(at, at + 300))] for at in range(0, 30_000, 300)]
    batch = packed_batch(encode([0.5, removals, 0]))
    assert batch is not None
    records = [event for event in batch.events if isinstance(event, BlockRemoved)]
    assert {record.events for record in records} == {2}  # the second fills it
    assert b"".join(record.names for record in records) == pack("<30000Q", *range(30_000))


@pytest.mark.parametrize("more", [0, 1, PART_BLOCKS, PART_BLOCKS + 1])
def test_a_long_chain_comes_in_parts(more: int) -> None:
    names = [name << 40 for name in range(1, PART_BLOCKS + more + 1)]
    tokens = list(range(2 * len(names)))
    payload = encode([0.5, [["BlockStored", names, 7, tokens, 2]], 0])
    packed = packed_batch(payload)
    assert packed is not None
    parts = [event for event in packed.events if isinstance(event, BlockStored)]
    assert len(parts) == -(-len(names) // PART_BLOCKS)
    assert all(len(part.names) >> 3 <= PART_BLOCKS for part in parts)
    assert [part.part for part in parts[1:-1]] == [EventPart.MIDDLE] * (len(parts) - 2)
    ends = parts[0].part, parts[-1].part
    assert ends == (
        (EventPart.FIRST, EventPart.LAST) if more else (EventPart.WHOLE, EventPart.WHOLE)
    )
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


@pytest.mark.parametrize("text", ["short", "s" * 40, "s" * 300])
@pytest.mark.parametrize("wrap", [lambda text: text, lambda text: [{"a": text}]])
def test_a_text_that_is_no_utf_8_is_left_to_the_other_reader_though_it_is_not_used(
    text: str, wrap: Callable[[str], object]
) -> None:
    payload = encode([0.5, [[*PLAIN_EVENT, None, wrap(text)]], 0])
    assert is_read_alike(payload)
    assert not is_read_alike(payload.replace(text.encode(), b"\xff" * len(text)))


def test_a_text_that_is_cut_is_left_to_the_other_reader() -> None:
    payload = encode([1.5, [{**MAP, "medium": "GPU"}], None])
    assert packed_batch(payload) is not None
    assert packed_batch(payload[: payload.index(b"GPU") + 1]) is None
