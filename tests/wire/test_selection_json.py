"""Bodies of the selection service: what each field takes, and what comes out of it."""

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lean_selector.core.errors import BadRequest
from lean_selector.core.selection.catalog import Worker
from lean_selector.core.selection.shapes import Overlap, Placement, WorkerRecord, WorkerSpec
from lean_selector.core.settings import API_1_3
from lean_selector.wire.scalars import allowed_workers
from lean_selector.wire.selection_bodies import (
    ReservationRequest,
    SelectRequest,
    WorkerPatch,
    WorkerRequest,
)

U32_MAX, U64_MAX = 2**32 - 1, 2**64 - 1
worker = msgspec.json.Decoder(WorkerRequest).decode
patch = msgspec.json.Decoder(WorkerPatch).decode
select = msgspec.json.Decoder(SelectRequest).decode
reservation = msgspec.json.Decoder(ReservationRequest).decode


def read_spec(text: str) -> WorkerSpec:
    return worker(text).spec()


def spec(**fields: Any) -> WorkerSpec:
    return read_spec(json.dumps({"worker_id": 1, **fields}))


# -- workers ---------------------------------------------------------------------------------------


def test_a_worker_needs_an_id_and_nothing_else() -> None:
    assert spec() == WorkerSpec(worker_id=1)
    with pytest.raises(msgspec.ValidationError, match="worker_id"):
        worker("{}")


FULL: dict[str, Any] = {
    "worker_id": U64_MAX,
    "model_name": "m",
    "tenant_id": "t",
    "endpoint": "http://w",
    "kv_events_endpoint": "tcp://w:1",
    "kv_events_endpoints": {"10": "tcp://w:3", "4294967295": "tcp://w:4", "9": "tcp://w:2"},
    "replay_endpoint": "tcp://w:5",
    "block_size": 16,
    "data_parallel_start_rank": 4,
    "data_parallel_size": 2,
    "max_num_batched_tokens": U64_MAX,
    "total_kv_blocks": U64_MAX,
    "stable_routing_id": "s",
    "is_eagle": False,
    "taints": ["b", "a", "b"],
    "topology_domains": {"zone": "z", "rack": "é"},
    "kv_transfer_domain": "d",
    "kv_transfer_enforcement": "preferred",
    "kv_transfer_preferred_weight": 0.1,
}


def test_a_record_shows_every_field_in_the_documented_order() -> None:
    record = WorkerRecord(**Worker(worker(json.dumps(FULL)).spec(), [], {}).shown(API_1_3))
    shown = json.loads(msgspec.json.encode(record))
    order = [*FULL]
    order.insert(3, "lifecycle")
    assert list(shown) == order
    assert shown == {**FULL, "lifecycle": "schedulable", "taints": ["a", "b"]}
    assert list(shown["kv_events_endpoints"]) == ["9", "10", "4294967295"]
    assert list(shown["topology_domains"]) == ["rack", "zone"]
    assert "é".encode() in msgspec.json.encode(record)


def test_the_tenant_goes_by_either_name_but_not_by_two_that_differ() -> None:
    cases: list[tuple[dict[str, str], str]] = [
        *(({}, "default"), ({"tenant_id": "a"}, "a"), ({"routing_group": "a"}, "a")),
        *(({"tenant_id": "a", "routing_group": "a"}, "a"), ({"tenant_id": ""}, "")),
        ({"routing_group": ""}, ""),
    ]
    for named, tenant in cases:
        assert spec(**named).tenant_id == tenant
        assert select(json.dumps(named)).group() == tenant
    both = {"tenant_id": "default", "routing_group": "b"}
    with pytest.raises(BadRequest, match="must not differ"):
        spec(**both)
    with pytest.raises(BadRequest, match="must not differ"):
        select(json.dumps(both)).group()


# Most wrong shapes stand in the recordings of the reference; these do not.
BAD_RANKS = ["", "x", "+1", "01", "1.0", "1a", " 1"]
WRONG_WORKERS: dict[str, list[str]] = {
    "worker_id": ["1e2", str(2**64)],
    "total_kv_blocks": [str(2**64), "1.0"],
    "taints": ["null"],
    "topology_domains": ["null"],
    "kv_events_endpoints": ['{"0":null}', *(f'{{"{rank}":"x"}}' for rank in BAD_RANKS)],
    "kv_transfer_enforcement": ['"Required"'],
}


def test_a_patch_names_only_what_is_present_and_not_null() -> None:
    assert patch("{}").changes() == {}
    assert patch(json.dumps(dict.fromkeys(FULL))).changes() == {}
    assert patch('{"worker_id":"x","model_name":5,"tenant_id":[],"unknown":{}}').changes() == {}
    assert patch(
        '{"endpoint":"","taints":["a","a"],"topology_domains":{},"kv_events_endpoints":{},'
        '"replay_endpoints":{"3":"tcp://w:1"},"is_eagle":false,"data_parallel_size":0}'
    ).changes() == {
        "endpoint": "",
        "taints": frozenset({"a"}),
        "topology_domains": {},
        "kv_events_endpoints": {},
        "replay_endpoints": {3: "tcp://w:1"},
        "is_eagle": False,
        "data_parallel_size": 0,
    }


# -- selections and reservations -------------------------------------------------------------------


WRONG_SELECTIONS: dict[str, list[str]] = {
    "strict_priority": ["-1", str(2**32), '"1"'],
    "priority_jump": ["true", "1e400"],
    "pinned_worker": ['{"worker_id":-1,"dp_rank":0}', '{"worker_id":1,"dp_rank":4294967296}'],
    "routing_constraints": ['{"required_taints":null}'],
    "router_config_override": ['{"router_temperature":1e400}'],
}


@pytest.mark.parametrize(
    ("read", "path"),
    [
        *((select, "pinned_worker.worker_id"), (select, "affinity_target.worker_id")),
        *((reservation, f"prefill.{field}") for field in ("worker_id", "effective_prefill_tokens")),
    ],
)
def test_numbers_beyond_u64_are_refused_wherever_they_stand(
    read: Callable[[str], object], path: str
) -> None:
    group, _, field = path.partition(".")
    inner = {"worker_id": 1, "dp_rank": 0, field: 2**64}
    with pytest.raises(msgspec.ValidationError, match=re.escape(f"`$.{path}`")):
        read(json.dumps({"reservation_id": "a", "worker_id": 1, group: inner}))


def test_worker_ids_of_a_list_are_not_beyond_u64() -> None:
    with pytest.raises(msgspec.ValidationError, match="allowed_worker_ids"):
        allowed_workers([1, 2**64])


def test_the_last_of_a_repeated_key_counts() -> None:
    assert worker('{"worker_id":1,"worker_id":2}').worker_id == 2  # D8
    assert spec(**{"unknown": [{}]}).worker_id == 1
    body = select('{"routing_constraints":{"preferred_taints":{"a":1,"a":2}}}')
    assert not isinstance(body.routing_constraints, msgspec.UnsetType)
    assert body.routing_constraints.preferred_taints == {"a": 2.0}


WRONG_RESERVATIONS: dict[str, list[str]] = {
    "worker_id": [str(2**64)],
    "dp_rank": ["4294967296"],
    "effective_prefill_tokens": ["-1", str(2**64)],
}
WRONG = [
    (read, whole, field, value)
    for read, whole, fields in (
        (read_spec, {"worker_id": "1"}, WRONG_WORKERS),
        (select, {}, WRONG_SELECTIONS),
        (reservation, {"reservation_id": '"a"', "worker_id": "1"}, WRONG_RESERVATIONS),
    )
    for field, values in fields.items()
    for value in values
]


@pytest.mark.parametrize(("read", "whole", "field", "value"), WRONG)
def test_a_field_of_the_wrong_shape_is_named(
    read: Callable[[str], object], whole: dict[str, str], field: str, value: str
) -> None:
    fields = {**whole, field: value}
    text = "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"
    with pytest.raises(msgspec.ValidationError, match=field):
        read(text)
    if read is read_spec and field in WorkerPatch.__struct_fields__ and value != "null":
        with pytest.raises(msgspec.ValidationError, match=field):
            patch(text).changes()


def test_a_placement_prints_its_overlap_in_the_documented_order() -> None:
    overlap = Overlap(128, 64, {"0": 64, "1": 32}, 96, 128)
    placement = Placement(1, 0, "http://w", 16, overlap, 384)
    assert msgspec.json.encode(placement) == (
        b'{"worker_id":1,"dp_rank":0,"endpoint":"http://w","block_size":16,"overlap":'
        b'{"longest_matched":128,"gpu":64,"dp":{"0":64,"1":32},"cpu":96,"disk":128},'
        b'"effective_prefill_tokens":384}'
    )
