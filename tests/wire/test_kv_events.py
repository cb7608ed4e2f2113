"""Golden payloads of the producers' layouts, and what becomes of everything else."""

from typing import Any

import msgspec
import pytest

from lean_selector.core.hashing import packed_tokens
from lean_selector.core.index.shapes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Tier,
)
from lean_selector.wire.kv_events import NotABatch
from tests.support.kv_batches import decode_batch
from tests.support.kv_records import hashes_of, removed_blocks, stored_blocks

encode = msgspec.msgpack.encode

STORED = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
}
ARRAY = ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2]
REMOVED = {"type": "BlockRemoved", "block_hashes": [11]}
CLEARED = {"type": "AllBlocksCleared"}
HEX = "a1b2c3d4e5f60718" + 48 * "0"
MM_HASH = 0xA1B2C3D4E5F60718
PLAIN = stored_blocks([11, 12], None, [1, 2, 3, 4], 2, Tier.DEVICE)


def decode(*events: object, rank: object = 0) -> EventBatch:
    return decode_batch(encode([1.5, events, rank]))


def stored(event: object) -> BlockStored:
    batch = decode(event)
    assert not batch.skipped
    (record,) = batch.events
    assert isinstance(record, BlockStored)
    return record


def test_an_odd_array_has_what_follows_its_blocks_too() -> None:
    tail = [None, None, None, 0, "full_attention", None, "LOCAL", None, None]
    fields = ["BlockStored", [1], None, [*range(16)], 16, None, "GPU", *tail[1:]]
    plain, odd = stored([*fields[:15], [[7]]]), stored([b"BlockStored", *fields[1:15], [[7]]])
    assert plain == odd


def removed(event: object) -> BlockRemoved:
    (record,) = decode(event).events
    assert isinstance(record, BlockRemoved)
    return record


# vLLM 0.11, USE_INT_BLOCK_HASHES=1, as its publisher's encoder writes it.
VLLM_ARRAY = bytes.fromhex(
    "93cb3ff80000000000009199ab426c6f636b53746f726564920b0cc0940102030402c0a3475055c0c000"
)


def test_vllm_array_payload_is_read() -> None:
    assert decode_batch(VLLM_ARRAY) == EventBatch(0, [PLAIN], [])


@pytest.mark.parametrize(
    ("batch", "rank"),
    [
        pytest.param([1.5, [STORED], 3], 3, id="three"),
        pytest.param([1.5, [STORED], 3, "x"], 3, id="four"),
        pytest.param([1, [STORED], 3], 3, id="integer time"),
        pytest.param(["now", [STORED], 3], 3, id="text for a time"),
        pytest.param([None, [STORED], 3], 3, id="no time"),
        pytest.param({"ts": 1.5, "events": [STORED], "data_parallel_rank": 3}, 3, id="map"),
        pytest.param({"events": [STORED], "dp_rank": 3}, 3, id="map with dp_rank"),
        pytest.param({"events": [STORED], "attn_dp_rank": 3}, 3, id="map with attn_dp_rank"),
        pytest.param([1.5, [ARRAY]], None, id="two"),
        pytest.param([1.5, [ARRAY], None], None, id="nil"),
        pytest.param({"events": [ARRAY]}, None, id="map without rank"),
        pytest.param([1.5, [ARRAY], 2**31 - 1], 2**31 - 1, id="largest"),
        pytest.param([1.5, [ARRAY], -1], None, id="negative"),
        pytest.param([1.5, [ARRAY], -(2**31)], None, id="least"),
    ],
)
def test_every_form_of_a_batch_is_read(batch: Any, rank: int | None) -> None:
    assert decode_batch(encode(batch)) == EventBatch(rank, [PLAIN], [])
    if isinstance(batch, list):
        batch = [batch[0], ["odd", *batch[1]], *batch[2:]]
        assert decode_batch(encode(batch)).dp_rank == rank


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(b'{"hello":1}', id="json"),
        pytest.param(VLLM_ARRAY[:-4], id="cut short"),
        pytest.param(VLLM_ARRAY + b"\1", id="bytes after the batch"),
        pytest.param(encode([]), id="empty array"),
        pytest.param(encode([1.5]), id="no events"),
        pytest.param(encode({"ts": 1.5}), id="map without events"),
        pytest.param(encode([1.5, None, 0]), id="events nil"),
        pytest.param(encode([1.5, {"a": 1}, 0]), id="events a map"),
        pytest.param(encode([1.5, [ARRAY], "0"]), id="rank a text"),
        pytest.param(encode([1.5, [ARRAY], 0.0]), id="rank a float"),
        pytest.param(encode([1.5, [ARRAY], True]), id="rank a bool"),
        pytest.param(encode([1.5, [ARRAY], 2**31]), id="rank beyond i32"),
        pytest.param(encode([1.5, [ARRAY], -(2**31) - 1]), id="rank below i32"),
        pytest.param(encode([1.5, ["odd", ARRAY], 2**31]), id="rank beyond i32, odd event"),
        pytest.param(encode([1.5, [], [0] * 300]), id="rank a long list"),
        pytest.param(encode({"events": [ARRAY], "dp_rank": "0" * 300}), id="rank a long text"),
        pytest.param(encode([1.5, [ARRAY], 0, 0])[:-1], id="cut after the rank"),
        pytest.param(encode(7), id="an integer"),
        pytest.param(b"\x91" * 100_000, id="nested too deep"),
        pytest.param(b"\x93\x01\x90\xa2\xff\xff", id="rank no utf-8"),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(NotABatch):
        decode_batch(payload)


WRONG_VALUES: dict[str, list[object]] = {
    "block_hashes": [None, [11.0], ["11"], [True]],
    "parent_block_hash": ["x"],
    "token_ids": [None, b"1234", [1.0], [[1, 2], 3], [[1, 2, 3]], [True]],
    "block_size": [None, -4, 4.0],
    "medium": [1],
    "lora_name": [7],
    "cache_salt": [7],
    "group_idx": [-1, 2**32],
    "kv_cache_spec_kind": [3],
    "extra_keys": [["x"], [{"a": 1}]],
    "block_mm_infos": [
        *({"a": 1}, [{"x": 1}], [{"mm_objects": [{"mm_hash": 9}]}]),
        [{"mm_objects": [{"mm_hash": -1, "offsets": []}]}],
    ],
}


@pytest.mark.parametrize(
    ("event", "event_type", "reason"),
    [
        pytest.param("AllBlocksCleared", "unknown", "malformed", id="text"),
        pytest.param(None, "unknown", "malformed", id="nil"),
        pytest.param([], "unknown", "malformed", id="empty array"),
        pytest.param({}, "unknown", "malformed", id="no type"),
        pytest.param({"type": 3}, "unknown", "malformed", id="type an integer"),
        pytest.param({"type": b"\xff"}, "unknown", "malformed", id="type no utf-8"),
        pytest.param({"type": "BlockMoved"}, "unknown", "unknown_type", id="new type, map"),
        pytest.param(["BlockMoved", [1]], "unknown", "unknown_type", id="new type, array"),
        pytest.param(ARRAY[:4], "stored", "malformed", id="four fields"),
        pytest.param(["BlockStored"], "stored", "malformed", id="one field"),
        pytest.param(["BlockRemoved"], "removed", "malformed", id="remove nothing"),
        pytest.param({**REMOVED, "block_hashes": [None]}, "removed", "malformed", id="nil hash"),
        pytest.param({**REMOVED, "medium": 1}, "removed", "malformed", id="medium, remove"),
        pytest.param([*ARRAY, None, 5], "stored", "malformed", id="medium by position"),
        pytest.param([*ARRAY, None, "GPU", 5], "stored", "malformed", id="lora by position"),
        pytest.param([*ARRAY, None, "GPU", None, "x"], "stored", "malformed", id="keys a text"),
        *(
            pytest.param({**STORED, name: value}, "stored", "malformed", id=f"{name}={value!r}")
            for name, values in WRONG_VALUES.items()
            for value in values
        ),
    ],
)
def test_a_bad_event_is_skipped_alone(event: object, event_type: str, reason: str) -> None:
    batch = decode(STORED, event, CLEARED)
    assert batch.events == [PLAIN, AllBlocksCleared()]
    (skipped,) = batch.skipped
    assert (skipped.event_type, skipped.reason) == (event_type, reason)
    assert 0 < len(skipped.detail) <= 200


def test_unhashable_map_keys_cost_one_event() -> None:
    payload = encode([1.5, [STORED, "?", STORED], 0]).replace(encode("?"), b"\x81\x81\x01\x01\x01")
    batch = decode_batch(payload)
    assert (batch.events, len(batch.skipped)) == ([PLAIN, PLAIN], 1)


def test_ignored_is_neither_read_nor_skipped() -> None:
    for event in (
        *({"type": "Ignored"}, {"type": "Ignored", "x": 1}, ["Ignored"], [b"Ignored", 1, 2]),
    ):
        assert decode(event) == EventBatch(0, [], [])


@pytest.mark.parametrize(
    "event",
    [
        STORED,
        dict(reversed(STORED.items())),
        {
            **STORED,
            "bar": "s",
            "lora_id": "7",
            "num_block_tokens": [2, 2],
            "ownership": "fs",
            "locality": "LOCAL",
        },
        {**STORED, "kv_cache_spec_sliding_window": None, "lora_name": "", "cache_salt": ""},
        {name.encode(): value for name, value in STORED.items()},
        {**STORED, "type": b"BlockStored"},
        ARRAY,
        [b"BlockStored", *ARRAY[1:]],
        [*ARRAY, None],
        [*ARRAY, 7],
        [*ARRAY, "adapter"],
        [*ARRAY, None, "GPU"],
        [*ARRAY, None, "GPU", None],
        [*ARRAY, None, "GPU", None, None],
        [*ARRAY, None, "GPU", None, None, None, None, 128],
        [*ARRAY, None, "GPU", None, None, None, None, None, "LOCAL", "fs", "session", {}, []],
        [*ARRAY, None, "GPU", None, None, None, None, None, 4],
        [*ARRAY, None, "GPU", None, None, -1],
        [*ARRAY, None, "GPU", None, None, None, 0],
        [*ARRAY, None, "GPU", {}],
        [*ARRAY, None, "GPU", {"session_id": "q"}],
    ],
    ids=repr,
)
def test_every_form_of_a_plain_store_is_read_alike(event: object) -> None:
    assert stored(event) == PLAIN
    assert decode("odd", event).events == [PLAIN]  # the untyped way there


@pytest.mark.parametrize(
    ("hash_on_the_wire", "read"),
    [
        *((0, 0), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (-(2**63), 2**63), (b"\x07", 7)),
        *((b"", 0), (bytes(range(32)), 0x18191A1B1C1D1E1F)),
    ],
    ids=repr,
)
def test_hashes_become_unsigned(hash_on_the_wire: int | bytes, read: int) -> None:
    event = {**STORED, "block_hashes": [5, hash_on_the_wire], "parent_block_hash": hash_on_the_wire}
    assert hashes_of(stored(event)) == [5, read]
    assert stored(event).parent_hash == read
    assert hashes_of(removed(["BlockRemoved", [hash_on_the_wire]])) == [read]


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        *((name, Tier.DEVICE) for name in (None, "", "GPU", "gpu", "DEVICE")),
        *((name, Tier.HOST_PINNED) for name in ("CPU", "cpu", b"CPU", "CPU_PINNED", "CPU_TIER1")),
        *((name, Tier.DISK) for name in ("CPU_TIER2", "DISK", "disk", "NVME", "STORAGE")),
        *((name, Tier.EXTERNAL) for name in ("EXTERNAL", "NETWORK", "REMOTE", "SHARED")),
        *((name, None) for name in ("FOO", "GPU ")),
    ],
)
def test_media_are_tiers(medium: str | bytes | None, tier: Tier | None) -> None:
    assert stored({**STORED, "medium": medium}).tier is tier
    assert stored([*ARRAY, None, medium]).tier is tier
    assert removed({**REMOVED, "medium": medium}).tier is tier
    assert removed(["BlockRemoved", [11], medium]).tier is tier


ADAPTER = "dynamo-cache-salt:x"


@pytest.mark.parametrize(
    ("fields", "salt"),
    [
        ({"cache_salt": "s"}, "s"),
        ({"cache_salt": b"s"}, "s"),
        ({"cache_salt": ""}, None),
        ({"cache_salt": "dynamo-cache-salt:s"}, "s"),
        ({"extra_keys": [["x", "dynamo-cache-salt:s"], None]}, "s"),
        ({"extra_keys": [["dynamo-cache-salt:s"]], "cache_salt": "t"}, "t"),
        ({"extra_keys": [["dynamo-cache-salt:"]]}, "dynamo-cache-salt:"),
        ({"cache_salt": "dynamo-cache-salt:"}, "dynamo-cache-salt:"),
        # An adapter's name is a key of each of its blocks, before the salt.
        ({"extra_keys": [[ADAPTER]], "lora_name": ADAPTER}, None),
        ({"extra_keys": [[ADAPTER, ADAPTER]], "lora_name": ADAPTER}, "x"),
        ({"extra_keys": [[ADAPTER, "dynamo-cache-salt:s"]], "lora_name": ADAPTER}, "s"),
        ({"extra_keys": [["dynamo-cache-salt:s"]], "lora_name": ADAPTER}, "s"),
        ({"extra_keys": [["", "dynamo-cache-salt:s"]], "lora_name": ""}, "s"),
        ({"extra_keys": [None, ["dynamo-cache-salt:s"]]}, None),
        ({"extra_keys": [[["dynamo-cache-salt:s", 0]]]}, None),
        ({"extra_keys": []}, None),
    ],
    ids=repr,
)
def test_the_salt_is_the_field_or_a_key_of_the_first_block(
    fields: dict[str, object], salt: str | None
) -> None:
    assert stored({**STORED, **fields}).cache_salt == salt


@pytest.mark.parametrize(
    ("fields", "mm_hashes"),
    [
        ({"extra_keys": [[[HEX, 0]], None]}, [[MM_HASH], None]),
        ({"extra_keys": [[[HEX, -2, "more"]], []]}, [[MM_HASH], None]),
        ({"extra_keys": [[HEX.upper()]]}, [[MM_HASH]]),
        ({"extra_keys": [[HEX, 1, True, b"x", "hello", [], HEX]]}, [[MM_HASH, MM_HASH]]),
        ({"extra_keys": [[HEX[:-1] + "g", HEX[1:], HEX + "\n"], None]}, [None, None]),
        ({"extra_keys": [None, None]}, None),
        ({"block_mm_infos": [], "extra_keys": [[HEX]]}, []),
        ({"block_mm_infos": [None, None], "extra_keys": [[HEX]]}, [None, None]),
        ({"block_mm_infos": [{"mm_objects": []}, None]}, [None, None]),
        (
            {"block_mm_infos": [{"mm_objects": [{"mm_hash": 9, "offsets": [[0, 2]]}]}, None]},
            [[9], None],
        ),
    ],
    ids=repr,
)
def test_multimodal_hashes_come_per_block(
    fields: dict[str, object], mm_hashes: list[list[int] | None] | None
) -> None:
    assert stored({**STORED, **fields}).mm_hashes == mm_hashes


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        *((None, "nil"), (1.5, "float"), ({"a": 1}, "map"), ([HEX], "list"), ([HEX, "a"], "list")),
        *(([HEX, None], "list"), ([[HEX, 0]], "list"), ([[HEX, 0], 0], "list")),
        (msgspec.msgpack.Ext(5, b"x"), "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_key_of_an_unknown_kind_sets_its_block_apart(key: object, kind: str) -> None:
    record = stored({**STORED, "extra_keys": [None, [HEX, key]]})
    assert record.unknown_keys == {kind: 1}
    assert record.mm_hashes is not None
    before, (known, made) = record.mm_hashes[0], record.mm_hashes[1] or []
    assert (before, known) == (None, MM_HASH)
    again = stored({**STORED, "extra_keys": [[key], [key, key]]})
    assert again.unknown_keys == {kind: 3}
    assert again.mm_hashes is not None
    assert again.mm_hashes[0] == [made]
    assert again.mm_hashes[1] not in ([made], None)


def test_keys_of_blocks_that_are_not_there_are_not_read() -> None:
    record = stored({**STORED, "extra_keys": [None, None, [1.5]]})
    assert (record.unknown_keys, record.mm_hashes) == (None, None)
    record = stored({**STORED, "token_ids": [1, 2, 3], "extra_keys": [None, [1.5]]})
    assert (record.unknown_keys, record.mm_hashes) == (None, None)


INFOS = [{"mm_objects": [{"mm_hash": 9, "offsets": []}]}]


@pytest.mark.parametrize(
    ("event", "read"),
    [
        # SGLang puts the salt in a map in position 7.
        ([*ARRAY, None, "GPU", {"cache_salt": "s", "lora_name": "ad"}], {"cache_salt": "s"}),
        ([*ARRAY, None, "GPU", {b"cache_salt": "s"}], {"cache_salt": "s"}),
        ({**STORED, "lora_name": "ad"}, {"lora_name": "ad"}),
        ({**STORED, "lora_name": b"ad"}, {"lora_name": "ad"}),
        ([*ARRAY, 3, "GPU", "ad"], {"lora_name": "ad"}),
        (
            # Multimodal infos in position 9 shift the rest.
            [*ARRAY, None, "GPU", None, None, INFOS, 1, "mamba", None, "REMOTE"],
            {"mm_hashes": [[9]], "group_idx": 1, "kind": "mamba", "is_remote": True},
        ),
        (
            # Pairs of tokens mark an EAGLE worker.
            {**STORED, "token_ids": [[1, 2], [2, 3], [3, 9]]},
            {"tokens": packed_tokens([1, 2, 3, 9]), "is_eagle": True},
        ),
        (
            {**STORED, "group_idx": 2, "kv_cache_spec_kind": "mamba"},
            {"group_idx": 2, "kind": "mamba"},
        ),
        ([*ARRAY, None, "GPU", None, None, 2, "mamba", 64], {"group_idx": 2, "kind": "mamba"}),
    ],
    ids=repr,
)
def test_fields_are_read_by_name_and_position(event: object, read: dict[str, Any]) -> None:
    assert stored(event) == msgspec.structs.replace(PLAIN, **read)


def test_the_kind_of_a_removal_may_be_bytes() -> None:
    event = [b"BlockRemoved", [11], "GPU", 2, b"mamba"]
    assert removed(event) == removed_blocks([11], Tier.DEVICE, 2, "mamba")


@pytest.mark.parametrize(
    ("locality", "is_remote"),
    [("LOCAL", False), ("local", False), ("", False), (None, False), ("REMOTE", True), ("X", True)],
)
def test_blocks_elsewhere_are_marked(locality: str | None, is_remote: bool) -> None:
    assert stored({**STORED, "locality": locality}).is_remote is is_remote
    assert removed({**REMOVED, "locality": locality}).is_remote is is_remote
    tail = [None, "GPU", None, None, 0, "full_attention", None]
    assert stored([*ARRAY, *tail, locality]).is_remote is is_remote


def test_batches_of_any_length_are_read() -> None:
    for events in (1, 15, 16, 17, 2_000, 65_536):
        assert len(decode(*[["AllBlocksCleared"]] * events).events) == events


def test_removals_in_a_row_that_differ_in_their_blocks_alone_are_one_record() -> None:
    others = ["BlockRemoved", [9], None, 1], ["BlockRemoved", [9], "CPU"], ARRAY
    for other in others:
        batch = [["BlockRemoved", [1]], ["BlockRemoved", [2, -1]], other, ["BlockRemoved", [3]]]
        first, between, last = decode(*batch).events
        assert first == removed_blocks([1, 2, 2**64 - 1], Tier.DEVICE, events=2)
        assert between != first
        assert last == removed_blocks([3], Tier.DEVICE)
    maps = [{**REMOVED, "block_hashes": [n]} for n in range(5)]
    assert decode(*maps).events == [removed_blocks(list(range(5)), Tier.DEVICE, events=5)]
    remote = {**REMOVED, "locality": "REMOTE"}
    assert len(decode(REMOVED, remote, REMOVED).events) == 3


def test_junk_is_counted_by_kind() -> None:
    batch = decode(*[1, None, ["Moved"], {"type": "Moved"}, ["BlockStored"], STORED] * 100)
    counts = {(each.event_type, each.reason): each.count for each in batch.skipped}
    assert counts == {
        ("unknown", "malformed"): 200,
        ("unknown", "unknown_type"): 200,
        ("stored", "malformed"): 100,
    }
    assert len(batch.events) == 100
