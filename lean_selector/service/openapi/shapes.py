"""Records of the route descriptions."""

from typing import Any

import msgspec

from lean_selector.wire.dump_shapes import TierEvent
from lean_selector.wire.replica_shapes import SessionLine, SnapshotLine
from lean_selector.wire.selection_bodies import ErrorBody


class Text(msgspec.Struct, frozen=True):
    """An answer that is not JSON."""

    media_type: str


class RouteDescription(msgspec.Struct, frozen=True):
    """The description of one route.

    `answers` are those of the handler, by status: a type that msgspec knows, a list of alternative
    types, a Text, or None for an empty body. `errors` are the statuses of its own errors, with the
    reason; those of every route of its kind (an invalid body or path, an internal error) are added
    automatically. `refusal` is the answer to a request without a sufficient token.
    """

    summary: str
    group: str
    answers: dict[int, Any]
    errors: dict[int, str] = {}
    example: Any = None  # of a body, as decoded from JSON; required if there is a body
    refusal: Any = ErrorBody


class DumpEntry(msgspec.Struct):
    """One partition of GET /dump. Names and watermarks are ours."""

    block_size: int
    events: list[TierEvent]
    model_name: str | msgspec.UnsetType = msgspec.UNSET
    tenant_id: str | msgspec.UnsetType = msgspec.UNSET
    watermarks: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class TierEvent16(TierEvent, frozen=True):
    """One event, with its tier; in the 1.6 dialect also the domain of its residency."""

    residency_domain: str | msgspec.UnsetType = msgspec.UNSET


class DumpEntry16(msgspec.Struct):
    """One partition of GET /dump. Names and watermarks are ours, and only with `detail=true`."""

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
