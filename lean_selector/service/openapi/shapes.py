"""What is said of a route beside its method and path: the records that the tables hold."""

from typing import Any

import msgspec

from lean_selector.wire.dump_shapes import TierEvent
from lean_selector.wire.replica_shapes import SessionLine, SnapshotLine
from lean_selector.wire.selection import ErrorBody


class QueryField(msgspec.Struct, frozen=True):
    """A field of the query string. `pattern`: what it may say, where it may not say anything."""

    name: str
    meaning: str
    pattern: str | None = None
    is_required: bool = False


class Text(msgspec.Struct, frozen=True):
    """An answer that is not JSON."""

    media_type: str


class RouteDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One route.

    `answers` are those that the handler gives, by status: a type that msgspec knows, a list of such
    types where it is one or another, a Text, or None for an empty body. `errors` are the statuses
    of its own refusals, each with when; what every route of its kind may answer (a body that is no
    JSON, a path that cannot be read, a service that fails) is added by itself. `refusal` is what is
    said to whoever has no token, or one of a lesser role.
    """

    summary: str
    group: str
    answers: dict[int, Any]
    body: Any = None  # a struct
    is_body_optional: bool = False
    query: tuple[QueryField, ...] = ()
    errors: dict[int, str] = {}
    refusal: Any = ErrorBody
    example: Any = None  # of a body, as it decodes from JSON: there whenever a body is


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """What the selector's routes take and answer in one of its dialects: structs."""

    registration: Any
    change: Any
    record: Any
    detail: Any
    select: Any
    select_and_reserve: Any
    selection: Any
    reservation: Any
    booked: Any
    projection: Any
    loads: Any
    scores: Any
    dump: Any  # an entry
    id: str  # the field that names a reservation
    dumps_in_detail: bool = False


class DumpEntry(msgspec.Struct):
    """One partition of GET /dump. Names and watermarks are ours."""

    block_size: int
    events: list[TierEvent]
    model_name: str | msgspec.UnsetType = msgspec.UNSET
    tenant_id: str | msgspec.UnsetType = msgspec.UNSET
    watermarks: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class TierEvent16(TierEvent, frozen=True):
    """One event, and the tier that it is of; in the 1.6 dialect whose residency, too."""

    residency_domain: str | msgspec.UnsetType = msgspec.UNSET


class DumpEntry16(msgspec.Struct):
    """One partition of GET /dump. Names and watermarks are ours, and come with `detail=true`."""

    block_size: int
    events: list[TierEvent16]
    model_name: str | msgspec.UnsetType = msgspec.UNSET
    tenant_id: str | msgspec.UnsetType = msgspec.UNSET
    watermarks: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class SessionList(msgspec.Struct):
    """GET /replica_sync/sessions."""

    version: int
    sessions: list[SessionLine]


class Snapshot(msgspec.Struct):
    """GET /replica_sync/snapshot."""

    version: int
    router_id: int
    sequence: int
    reservations: list[SnapshotLine]
