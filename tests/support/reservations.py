"""Bookings, and the records that hold one, from flat arguments: what a test says of a request."""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from lean_selector.core.load.shapes import Reservation, ReservationSpec
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.shapes import EventKind, LiveReservation, ReplicaEvent
from lean_selector.core.sessions.shapes import LiveSession, SessionEvent
from lean_selector.core.sessions.table import SessionTable, SessionTables
from lean_selector.core.settings import SessionSettings

Record = TypeVar("Record", ReplicaEvent, LiveReservation)


def book(
    slots: Slots,
    request_id: str,
    worker_id: int,
    dp_rank: int,
    sequence_hashes: bytes,
    prefill_tokens: int,
    now: float,
    *,
    router_id: int | None = None,
    lora_name: str | None = None,
    expected_output_tokens: int | None = None,
    prefill_duration_s: float | None = None,
    track_prefill_tokens: bool = True,
) -> Reservation:
    tokens = prefill_tokens or None
    expected = prefill_duration_s, expected_output_tokens
    spec = ReservationSpec(
        request_id, worker_id, dp_rank, lora_name, track_prefill_tokens, tokens, *expected
    )
    return slots.book(spec, sequence_hashes, now, router_id)


def replica_event(
    kind: EventKind,
    model_name: str,
    tenant_id: str,
    block_size: int,
    request_id: str,
    worker_id: int,
    dp_rank: int,
    router_id: int,
    lora_name: str | None = None,
    sequence_hashes: bytes = b"",
    track_prefill_tokens: bool = True,
    prefill_tokens: int | None = None,
    prefill_duration_s: float | None = None,
    expected_output_tokens: int | None = None,
    sequence: int | None = None,
) -> ReplicaEvent:
    tokens = track_prefill_tokens, prefill_tokens
    expected = prefill_duration_s, expected_output_tokens
    spec = ReservationSpec(request_id, worker_id, dp_rank, lora_name, *tokens, *expected)
    return ReplicaEvent(
        kind, model_name, tenant_id, block_size, router_id, spec, sequence_hashes, sequence
    )


def live_reservation_of(
    model_name: str,
    tenant_id: str,
    block_size: int,
    request_id: str,
    worker_id: int,
    dp_rank: int,
    router_id: int,
    sequence_hashes: bytes,
    prefill_tokens: int,
    prefill_duration_s: float | None,
    prefill_done: bool,
    touched_at: float,
    lora_name: str | None = None,
    expected_output_tokens: int | None = None,
) -> LiveReservation:
    expected = prefill_duration_s, expected_output_tokens
    spec = ReservationSpec(
        request_id, worker_id, dp_rank, lora_name, True, prefill_tokens, *expected
    )
    where = model_name, tenant_id, block_size, router_id
    return LiveReservation(*where, spec, sequence_hashes, prefill_done, touched_at)


def changed(record: Record, **fields: object) -> Record:
    """The same with other fields, be they its own or its booking's."""
    own = {name: fields.pop(name) for name in record.__struct_fields__ if name in fields}
    spec = msgspec.structs.replace(record.spec, **fields)
    return msgspec.structs.replace(record, spec=spec, **own)


def session_table(
    ttl_s: float,
    writer_id: int,
    first_sequence: Callable[[], int],
    tell: Callable[[SessionEvent], None],
) -> SessionTable:
    tables = SessionTables(SessionSettings(ttl_s=ttl_s))
    tables.publish(writer_id, first_sequence, tell)
    return tables.new_table("m", "t")


def session_event(*values: Any) -> SessionEvent:
    """Of all fields in their order."""
    return SessionEvent(**dict(zip(SessionEvent.__struct_fields__, values, strict=True)))


def live_session(event: SessionEvent, idle_s: float) -> LiveSession:
    return LiveSession(**msgspec.structs.asdict(event), idle_s=idle_s)
