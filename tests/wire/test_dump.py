"""The dump's text: golden, against what the reference writes, and against itself."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from lean_selector.core.index.shapes import StoredRun, Tier, Watermark
from lean_selector.wire.dump import BadEvent, NotADump, decode_event, encode_dump, split_dump
from lean_selector.wire.dump_shapes import DumpedPartition, PartitionDump

SAMPLES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "dump_samples.json").read_text()
)["samples"]
U64 = 2**64 - 1


def text(*partitions: PartitionDump) -> bytes:
    return b"".join(encode_dump(partitions))


def partition(
    name: str, *runs: StoredRun, watermarks: dict[tuple[int, int], Watermark] | None = None
) -> PartitionDump:
    model_name, _, tenant_id = name.partition("|")
    return PartitionDump(model_name, tenant_id or "default", 4, iter([[*runs]]), watermarks or {})


def run(
    tier: Tier, parent: int | None, *hashes: int, worker_id: int = 1, dp_rank: int = 0
) -> StoredRun:
    return StoredRun(worker_id, dp_rank, tier, parent, hashes, tuple(h + 1000 for h in hashes))


# -- what we write ---------------------------------------------------------------------------------


def test_what_holds_nothing_says_no_more_than_the_reference() -> None:
    assert text() == b"{}"
    assert text(partition("m"), partition("n|t")) == (
        b'{"m:default":{"block_size":4,"events":[]},"n:t":{"block_size":4,"events":[]}}'
    )
    assert text(
        partition("m", watermarks={(7, 10): Watermark(3, 5, 2), (7, 2): Watermark(0, 0)})
    ) == (
        b'{"m:default":{"block_size":4,"events":[],"model_name":"m","tenant_id":"default",'
        b'"watermarks":{"7:2":0,"7:10":3},"learned":{"7:2":{},"7:10":{"until":5,"unknown":2}}}}'
    )


def test_partitions_whose_keys_are_the_same_text_all_arrive() -> None:
    dumps = [
        partition("a|b:c", run(Tier.DEVICE, None, 1)),
        partition("a:b|c", run(Tier.DEVICE, None, 2)),
        partition("a:b|c:", run(Tier.DEVICE, None, 3)),
    ]
    body = text(*dumps)
    assert list(json.loads(body)) == ["a:b:c", "a:b:c::", "a:b:c:"]
    read, problems = split_dump(body)
    assert not problems
    assert [(of.model_name, of.tenant_id) for of in read] == [
        ("a", "b:c"),
        ("a:b", "c"),
        ("a:b", "c:"),
    ]


def test_one_part_of_the_text_is_bounded_work() -> None:
    many = [[run(Tier.DISK, None, block) for block in range(2000)]]
    parts = list(encode_dump([PartitionDump("m", "t", 4, iter(many), {})]))
    assert max(map(len, parts)) < 200_000
    assert len(json.loads(b"".join(parts))["m:t"]["events"]) == 2000


# -- what we read, and write again -----------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_read_of_a_recording_of_the_reference_is_written_again_as_it_was(name: str) -> None:
    recorded = SAMPLES[name]
    read, problems = split_dump(json.dumps(recorded).encode())
    assert not problems
    written = json.loads(text(*(to_write(of) for of in read)))
    for entry in written.values():
        for ours in ("model_name", "tenant_id", "watermarks", "learned"):
            entry.pop(ours, None)
    for entry in recorded.values():
        ids = dict.fromkeys(("device", "host_pinned", "disk", "external"), 0)
        for event in entry["events"]:
            event.pop("residency_domain", None)  # new in 1.6.1
            tier = event["storage_tier"]
            event["event"]["event_id"] = ids[tier]  # in 1.6.1 the tiers' ids follow on each other
            ids[tier] += 1
    assert json.dumps(written) == json.dumps(recorded)


def to_write(of: DumpedPartition) -> PartitionDump:
    """What was read, to be written."""
    runs = []
    for found in map(decode_event, of.events):
        where = found.worker_id, found.dp_rank, found.tier, found.parent_hash
        local = struct.unpack(f"<{len(found.local_hashes) // 8}Q", found.local_hashes)
        runs.append(StoredRun(*where, tuple(found.block_hashes), local))
    return PartitionDump(of.model_name, of.tenant_id, of.block_size, iter([runs]), {})


def test_what_is_no_dump_is_refused_as_a_whole() -> None:
    deep = b'{"m:t":' + b"[" * 99999
    for body in (b"", b"[]", b"null", b"<html>", b'{"m:t":', b'{"m:t":{}} x', b"\xff", deep):
        with pytest.raises(NotADump):
            split_dump(body)


@pytest.mark.parametrize(
    "entry",
    [
        *({"error": "index unavailable"}, {"block_size": 0, "events": []}),
        *({"block_size": 2**32, "events": []}, {"block_size": -4, "events": []}, {"block_size": 4}),
        *({"block_size": 4, "events": {}}, "oops", None),
    ],
)
def test_an_entry_that_cannot_be_used_leaves_the_others_standing(entry: object) -> None:
    body = {"bad:t": entry, "m:t": {"block_size": 4, "events": []}}
    read, problems = split_dump(json.dumps(body).encode())
    assert [of.model_name for of in read] == ["m"]
    assert len(problems) == 1
    assert "bad:t" in problems[0]


def test_a_key_is_split_at_its_last_colon_and_names_inside_count_more() -> None:
    (of,) = split_dump(b'{"org/m:B:t":{"block_size":4,"events":[]}}')[0]
    assert (of.model_name, of.tenant_id) == ("org/m:B", "t")
    body = b'{"x":{"block_size":4,"events":[],"model_name":"m","tenant_id":"t:u"}}'
    ((of,), problems) = split_dump(body)
    assert (of.model_name, of.tenant_id, problems) == ("m", "t:u", [])
    read, problems = split_dump(b'{"error":{"block_size":4,"events":[]}}')
    assert (read, len(problems)) == ([], 1)


@pytest.mark.parametrize(
    ("watermarks", "read"),
    [
        ({"1:0": 0, "2:7": U64 - 1}, {(1, 0): 0, (2, 7): U64 - 1}),
        ({"1:0": 0, "3:1": 0}, {(1, 0): 0}),  # the last has nothing in `learned`
        ({"1:0": 5, "1": 5, "x:0": 5, "1:-1": 5, "2:0": -1, "3:0": U64}, {(1, 0): 5}),
        ({"1:0": "5"}, {}),
        ([1], {}),
        (None, {}),
    ],
)
def test_watermarks_that_cannot_be_read_are_left_out(
    watermarks: object, read: dict[tuple[int, int], int]
) -> None:
    learned: dict[str, object] = {rank: {} for rank in ("1:0", "2:7", "2:0", "3:0", "x:0", "1:-1")}
    body = {"m:t": {"block_size": 4, "events": [], "watermarks": watermarks, "learned": learned}}
    (of,), problems = split_dump(json.dumps(body).encode())
    assert not problems
    assert of.watermarks == {rank: Watermark(seq, seq) for rank, seq in read.items()}


@pytest.mark.parametrize("learned", [None, [], {"1:0": {"until": "5"}}, {"1:0": {"reports": []}}])
def test_a_rank_whose_facts_cannot_be_read_has_no_watermark(learned: object) -> None:
    entry = {"block_size": 4, "events": [], "watermarks": {"1:0": 5}, "learned": learned}
    (of,), problems = split_dump(json.dumps({"m:t": entry}).encode())
    assert (problems, of.watermarks, of.learned) == ([], {}, {})


@pytest.mark.parametrize("learned", [{"again": [[-1]]}, {"again": [[2**64]]}, {"salts": [1]}, 7])
def test_an_event_whose_facts_cannot_be_read_is_left_out(learned: object) -> None:
    told = {"worker_id": 1, "event": {"data": stored(BLOCK)}, "learned": learned}
    with pytest.raises(BadEvent):
        decode_event(Raw(json.dumps(told).encode()))


def event(data: object, **more: object) -> Raw:
    inner = {"event_id": 0, "data": data, **more}
    tier = inner.pop("storage_tier", "device")
    worker_id = inner.pop("worker_id", 1)
    return Raw(json.dumps({"worker_id": worker_id, "storage_tier": tier, "event": inner}).encode())


def stored(*blocks: object, **more: object) -> dict[str, object]:
    return {"stored": {"blocks": list(blocks), **more}}


BLOCK = {"block_hash": 1, "tokens_hash": 2}


def test_what_may_be_left_out_has_its_default_and_unknown_keys_are_passed_over() -> None:
    blocks = b'[{"block_hash":1,"tokens_hash":2}]'
    raw = Raw(b'{"worker_id":9,"event":{"data":{"stored":{"blocks":%b}}}}' % blocks)
    found = decode_event(raw)
    assert (found.worker_id, found.dp_rank, found.tier) == (9, 0, Tier.DEVICE)
    assert found.parent_hash is None
    extra = {**BLOCK, "mm_extra_info": {"mm_objects": []}, "x": 1}
    found = decode_event(event(stored(extra, start_position=7, y=[]), z={}))
    assert list(found.block_hashes) == [1]


@pytest.mark.parametrize(
    "raw",
    [
        Raw(b"{}"),
        event(stored(BLOCK), worker_id=-1),
        event(stored(BLOCK), worker_id=2**64),
        event(stored(BLOCK), storage_tier="tape"),
        event(stored(BLOCK), dp_rank=2**32),
        event(stored({"block_hash": -1, "tokens_hash": 2})),
        event(stored({"block_hash": 1, "tokens_hash": 2**64})),
        event(stored(BLOCK, parent_hash=-1)),
        *(event(stored()), event(stored(BLOCK, BLOCK)), event(stored(BLOCK, parent_hash=1))),
        *(event({"removed": {"block_hashes": [1]}}), event({"cleared": None})),
    ],
)
def test_a_bad_event_is_told_apart(raw: Raw) -> None:
    with pytest.raises(BadEvent):
        decode_event(raw)


# -- there and back --------------------------------------------------------------------------------


def test_an_event_of_the_1_6_dialect_says_its_domain() -> None:
    partitions = [partition("m|default", run(Tier.DISK, None, 1))]
    (event,) = json.loads(b"".join(encode_dump(partitions, as_1_6=True)))["m:default"]["events"]
    assert (event["worker_id"], event["event"]["event_id"]) == (1, 0)
    assert "worker" in event.values()
