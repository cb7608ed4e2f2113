"""The text of the snapshot: JSON as a whole, one reservation a line, read back as written."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.replication.shapes import LiveReservation
from lean_selector.wire.replica_snapshot import (
    BadSnapshot,
    decode_line,
    encode_snapshot,
    snapshot_line,
    split_snapshot,
)
from tests.support.reservations import live_reservation_of

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
SECONDS = st.floats(0.0, 1e6).map(lambda value: round(value, 3))
BOOKINGS = st.builds(
    live_reservation_of,
    *(st.text(), st.text(), U32, st.text(), U64, U32, U64),
    st.lists(U64, max_size=5).map(lambda hashes: struct.pack(f"<{len(hashes)}Q", *hashes)),
    *(st.integers(0, 2**53), st.none() | SECONDS, st.booleans(), SECONDS),
    *(st.none() | st.text(), st.none() | U32),
)
CLOCK = 2e6


def text_of(bookings: list[LiveReservation]) -> bytes:
    return b"".join(
        encode_snapshot(2**64 - 1, 77, (snapshot_line(each, CLOCK) for each in bookings))
    )


@given(st.lists(BOOKINGS, max_size=4))
def test_what_was_written_is_read_back(bookings: list[LiveReservation]) -> None:
    text = text_of(bookings)
    whole = json.loads(text)
    assert (whole["version"], whole["router_id"]) == (1, 2**64 - 1)
    assert len(whole["reservations"]) == len(bookings)
    router_id, sequence, lines = split_snapshot(text)
    assert (router_id, sequence) == (2**64 - 1, 77)
    back = [decode_line(line, CLOCK) for line in lines]
    for spec, read in zip(bookings, back, strict=True):
        assert read.touched_at == pytest.approx(spec.touched_at, abs=0.001)
        read.touched_at = spec.touched_at
        assert read == spec


def test_a_snapshot_is_printed_as_documented() -> None:
    spec = live_reservation_of(
        "m", "t", 16, "r", 7, 0, 5, struct.pack("<2q", 1, -2), 48, None, False, 0
    )
    assert b"".join(encode_snapshot(9, 5, [snapshot_line(spec, 1.5)])) == (
        b'{"version":1,"router_id":9,"sequence":5,"reservations":[\n'
        b'{"model_name":"m","tenant_id":"t","block_size":16,"request_id":"r","worker_id":7,'
        b'"dp_rank":0,"router_id":5,"age_s":1.5,"prefill_tokens":48,"prefill_done":false,'
        b'"prefill_duration_s":null,"expected_output_tokens":null,"lora_name":null,'
        b'"sequence_hashes":[1,-2]}\n]}'
    )
    assert text_of([]) == (
        b'{"version":1,"router_id":18446744073709551615,"sequence":77,"reservations":[\n]}'
    )


def test_a_snapshot_that_does_not_say_how_many_events_there_were_is_read() -> None:
    assert split_snapshot(b'{"version":1,"router_id":9,"reservations":[\n]}') == (9, 0, [])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"no json",
        b'{"error":"replica sync is disabled"}',
        b'{"version":2,"router_id":1,"reservations":[\n]}',
        b'{"version":1,"router_id":-1,"reservations":[\n]}',
        b'{"version":1,"router_id":1,"reservations":[',
        b'{"version":1,"router_id":1,"reservations":[\n{}',
        b'{"version":1,"router_id":1,"reservations":[\n{"a":\xff}',
    ],
)
def test_other_text_is_refused(text: bytes) -> None:
    with pytest.raises(BadSnapshot):
        split_snapshot(text)


@pytest.mark.parametrize(
    "change",
    [
        *({"worker_id": 2**64}, {"worker_id": -1}, {"router_id": 2**64}, {"dp_rank": 2**32}),
        *({"age_s": -1.0}, {"prefill_tokens": -1}, {"request_id": None}, {"block_size": "16"}),
        *({"sequence_hashes": [2**64]}, {"sequence_hashes": None}, {"prefill_duration_s": -1}),
    ],
)
def test_a_line_with_a_wrong_value_is_refused(change: dict[str, object]) -> None:
    spec = live_reservation_of("m", "t", 16, "r", 7, 0, 5, b"", 48, None, False, 0.0)
    line = json.loads(split_snapshot(text_of([spec])).lines[0])
    assert decode_line(json.dumps(line).encode(), CLOCK).spec.request_id == "r"
    with pytest.raises(BadSnapshot):
        decode_line(json.dumps({**line, **change}).encode(), CLOCK)
    with pytest.raises(BadSnapshot):
        decode_line(b"[" * 100_000, CLOCK)
