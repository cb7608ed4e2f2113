"""Messages between replicas, as typed structs: events, heartbeats, snapshots. Also the bodies and
answers of the routes for peers (D18, D22)."""

from typing import Annotated, Literal

import msgspec

from lean_selector.core.numbers import U32, U64, U64_MAX, NonNegative


class Duration(msgspec.Struct, gc=False):
    secs: U64
    nanos: U32


class Hint(msgspec.Struct, gc=False):
    initial_effective_prefill_tokens: U64
    expected_prefill_duration: Duration | None = None


class Add(msgspec.Struct, gc=False):
    token_sequence: msgspec.Raw = msgspec.Raw(b"\xc0")
    track_prefill_tokens: bool = True
    expected_output_tokens: U32 | None = None
    prefill_load_hint: Hint | None = None


class AddVariant(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    add: Add = msgspec.field(name="AddRequest")


class EventWorker(msgspec.Struct, gc=False):
    worker_id: U64
    dp_rank: U32


class RequestEvent(msgspec.Struct, gc=False):
    request_id: str
    worker: EventWorker
    data: Literal["MarkPrefillCompleted", "Free"] | AddVariant
    router_id: U64
    lora_name: str | None = None


class Envelope(msgspec.Struct, gc=False, kw_only=True):
    model_name: str
    tenant_id: str | msgspec.UnsetType = msgspec.UNSET
    routing_group: str | msgspec.UnsetType = msgspec.UNSET
    block_size: U32
    event: RequestEvent
    lean_sequence: U64 | msgspec.UnsetType = msgspec.UNSET


class Heartbeat(msgspec.Struct, gc=False):
    """The heartbeat of a replica: how many events it has published so far."""

    router_id: U64
    lean_sequence: U64


_Age = Annotated[float, msgspec.Meta(ge=0.0)]


class SnapshotHead(msgspec.Struct):
    version: Literal[1]
    router_id: NonNegative
    reservations: list[msgspec.Raw]
    sequence: NonNegative = 0


class SnapshotLine(msgspec.Struct, gc=False):
    """One live reservation in the answer of GET /replica_sync/snapshot."""

    model_name: str
    tenant_id: str
    block_size: U32
    request_id: str
    worker_id: NonNegative
    dp_rank: U32
    router_id: NonNegative  # the replica that admitted it
    age_s: _Age  # seconds since the reservation's last event
    prefill_tokens: NonNegative  # prefill tokens that are not computed yet
    prefill_done: bool
    prefill_duration_s: _Age | None
    expected_output_tokens: U32 | None
    lora_name: str | None
    sequence_hashes: msgspec.Raw

    def __post_init__(self) -> None:
        if max(self.worker_id, self.router_id) > U64_MAX:
            raise msgspec.ValidationError("Expected a u64")


class SessionListHead(msgspec.Struct):
    version: Literal[1]
    sessions: list[msgspec.Raw]


# -- bodies of the routes about replicas -----------------------------------------------------------


class PeerRequest(msgspec.Struct):
    """The body of POST /replica_sync/register_peer and /deregister_peer."""

    endpoint: str


class PeerUrlRequest(PeerRequest):
    """The body of POST /register_peer and /deregister_peer, where the endpoint is named `url`."""

    endpoint: str = msgspec.field(name="url")


class PeerState(msgspec.Struct, frozen=True):
    """One peer, in GET /replica_sync/peers?detail=true."""

    endpoint: str
    state: str
    since_s: float
    retries: int
    last_error: str | None


class PublisherState(msgspec.Struct, frozen=True):
    """What this replica knows about another replica that numbers its events."""

    router_id: int
    sequence: int
    heard_s: float
    missed: int
    is_behind: bool


class CurveState(msgspec.Struct, frozen=True):
    """The state of CURVE encryption between replicas. Public keys are Z85 text."""

    public_key: str
    peer_keys: int
    refused: int
    last_refused: str | None


class SyncState(msgspec.Struct, frozen=True):
    """The answer of GET /replica_sync/peers?detail=true."""

    router_id: int
    peers: list[PeerState]
    published: int
    refused: int
    queue_overflows: int
    sequence: int
    received: int
    missed: int
    publishers: list[PublisherState]
    applied: dict[str, int]
    dropped: dict[str, int]
    catch_up: dict[str, int] | msgspec.UnsetType
    curve: CurveState | msgspec.UnsetType = msgspec.UNSET
