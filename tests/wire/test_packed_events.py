"""The reader of ordinary batches against the one that reads all of them."""

import contextlib
import random
from struct import pack
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lean_selector.core.index.shapes import BlockRemoved, BlockStored, EventPart
from lean_selector.wire.kv_event_records import PART_BLOCKS
from lean_selector.wire.kv_events import NotABatch
from lean_selector.wire.packed_events import packed_batch
from tests.support.kv_batches import decode_batch, told

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
    *(0, "text", {"a": [1]}, "t" * 300)
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


# Headers of MessagePack more often than other bytes.
BYTES = [0x90, 0xC0, 0xC4, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD9, 0xDC, 0xDD] * 20 + [*range(256)]


@settings(max_examples=150)
@given(PLAIN, st.integers(0, 2**32))
# One of its damages makes the session id (position 14) no UTF-8.
@example([0.5, [["BlockStored", [], None, [], 1, *[None] * 8, 0, "text", {"a": [1]}]]], 1)
def test_a_batch_is_read_as_by_the_other_reader_and_if_it_is_damaged_so_or_not_taken(
    batch: list[object], seed: int
) -> None:
    whole = encode(batch)
    assert is_read_alike(whole)
    draws = random.Random(seed)
    for _ in range(10):
        damaged = bytearray(whole)
        for _ in range(draws.randint(1, 3)):
            damaged[draws.randrange(len(damaged))] = draws.choice(BYTES)
        end = draws.choice([len(damaged), draws.randint(0, len(damaged))])
        is_read_alike(bytes(damaged[:end]))


def is_read_alike(payload: bytes) -> bool:
    """Whether it is taken; `decode_batch` holds it against the other reader."""
    with contextlib.suppress(NotABatch):
        decode_batch(payload)
    return packed_batch(payload) is not None


PLAIN_EVENT: list[Any] = ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None, None, 0]
PLAIN_EVENT += ["full_attention", None, None]


MAP: dict[str, Any] = dict(zip(STORED, PLAIN_EVENT, strict=True))
REMOVED_MAP = encode({"type": "BlockRemoved", "block_hashes": [1]})
TWICE = msgspec.Raw(b"\x83" + REMOVED_MAP[1:] + encode("block_hashes") + encode([2]))
NO_TEXT = msgspec.Raw(b"\xd9\x28" + b"\xff" * 40)
WIDE = [-1, -32, -33, -128, -129, -(2**15) - 1, -(2**31) - 1, -(2**63)]


def with_field(position: int, value: object) -> list[object]:
    return [*PLAIN_EVENT[:position], value, *PLAIN_EVENT[position + 1 :]]


MORE: dict[str, object] = {
    **{"locality": "REMOTE", "block_mm_infos": [], "a name of more than thirty-one bytes": 1},
    **{"ownership": msgspec.msgpack.Ext(1, b"abc"), "owner": msgspec.msgpack.Ext(1, b"")},
    "session_id": "x" * 70_000,
}
TAKEN: list[object] = [
    *([0.5, []], [0.5, [PLAIN_EVENT], 0], [0.5, [MAP]], [0.5, [msgspec.Raw(REMOVED_MAP)]]),
    [0.5, [MAP | {f"field {at}": at for at in range(20)}]],
    *([0.5, [{"type": "BlockRemoved", "block_hashes": [n], "group_idx": 0}]] for n in WIDE),
    *([0.5, [[*PLAIN_EVENT, None, text]]] for text in ("short", "s" * 300, [{"a": "s" * 40}])),
]
# What goes into a hash, contradicts, or is unusual. Values of all kinds are in test_kv_events.py.
LEFT: list[object] = [
    *({"ts": 0.5, "events": []}, [0.5], [1, []], [0.5, [], -1], [0.5, [], 0, 0]),
    [0.5, [["AllBlocksCleared"]] * 257],
    *(
        [0.5, [with_field(position, value)]]
        for position, value in [
            *((0, "BlockMoved"), (1, [1, b"1234567"]), (1, [1, 1]), (2, 2), (2, b"1234567")),
            *((3, [1, 2, 3, 2**32]), (3, [1, 2, 3, -1]), (3, [(1, 2), (2, 3)]), (4, 0), (4, 2**31)),
            *((5, "seven"), (7, {"cache_salt": "s"}), (8, [["a1b2c3d4e5f60718" * 4], None])),
            *((8, [None, [["image", 0]]]), (8, [[None]]), (12, "REMOTE"), (9, [])),
        ]
    ),
    *(
        [0.5, [event]]
        for event in [
            *({"type": "AllBlocksCleared", "group_idx": 0}, ["AllBlocksCleared", 1], TWICE),
            *({"block_hashes": [1], "type": "BlockRemoved"}, {"type": "BlockRemoved"}),
            {"type": "BlockRemoved", "block_hashes": [1], "kv_cache_spec_kind": "mamba"},
            {"type": "BlockStored", "block_hashes": [1], "token_ids": [1]},
            *(["BlockRemoved"], ["BlockRemoved", [1], "GPU", 0, "REMOTE"]),
            *(["BlockRemoved", [1], "x" * 300], ["BlockRemoved", [1], 5]),
            ["BlockStored", [1], None, [1, 2]],
            *([*PLAIN_EVENT, None, NO_TEXT], [*PLAIN_EVENT, None, [{"a": NO_TEXT}]]),
        ]
    ),
    *([0.5, [{**MAP, name: value}]] for name, value in MORE.items()),
]


@pytest.mark.parametrize(("batches", "is_taken"), [(TAKEN, True), (LEFT, False)])
def test_the_plain_is_taken_and_the_odd_left_to_the_other_reader(
    batches: list[object], is_taken: bool
) -> None:
    for batch in batches:
        assert is_read_alike(encode(batch)) is is_taken, batch


def test_removals_in_a_row_come_in_records_of_bounded_length() -> None:
    removals = [["BlockRemoved", list(range(at, at + 300))] for at in range(0, 30_000, 300)]
    batch = packed_batch(encode([0.5, removals, 0]))
    assert batch is not None
    records = [event for event in batch.events if isinstance(event, BlockRemoved)]
    assert {record.events for record in records} == {2}  # the second fills it
    assert b"".join(record.engine_hashes for record in records) == pack("<30000Q", *range(30_000))


@pytest.mark.parametrize("more", [0, 1, PART_BLOCKS, PART_BLOCKS + 1])
def test_a_long_chain_comes_in_parts(more: int) -> None:
    names = [name << 40 for name in range(1, PART_BLOCKS + more + 1)]
    tokens = list(range(2 * len(names)))
    payload = encode([0.5, [["BlockStored", names, 7, tokens, 2]], 0])
    packed = packed_batch(payload)
    assert packed is not None
    parts = [event for event in packed.events if isinstance(event, BlockStored)]
    assert len(parts) == -(-len(names) // PART_BLOCKS)
    assert all(len(part.engine_hashes) >> 3 <= PART_BLOCKS for part in parts)
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


def test_a_text_that_is_cut_is_left_to_the_other_reader() -> None:
    payload = encode([1.5, [{**MAP, "medium": "GPU"}], None])
    assert packed_batch(payload) is not None
    assert packed_batch(payload[: payload.index(b"GPU") + 1]) is None
