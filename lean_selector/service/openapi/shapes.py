"""What is said of a route beside its method and path: the records that the tables hold."""

from typing import Any

import msgspec

from lean_selector.wire.dump_shapes import TierEvent
from lean_selector.wire.replica_shapes import SessionLine, SnapshotLine
from lean_selector.wire.selection_bodies import ErrorBody


class Text(msgspec.Struct, frozen=True):
    """An answer that is not JSON."""

    media_type: str


class RouteDescription(msgspec.Struct, frozen=True):
    """One route.

    `answers` are those that the handler gives, by status: a type that msgspec knows, a list of such
    types where it is one or another, a Text, or None for an empty body. `errors` are the statuses
    of its own refusals, each with when; what every route of its kind may answer (a body that is no
    JSON, a path that cannot be read, a service that fails) is added by itself. `refusal` is the
    answer to a request without a token, or with one of a lesser role.
    """

    summary: str
    group: str
    answers: dict[int, Any]
    errors: dict[int, str] = {}
    example: Any = None  # of a body, as it decodes from JSON: there whenever a body is
    refusal: Any = ErrorBody


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
