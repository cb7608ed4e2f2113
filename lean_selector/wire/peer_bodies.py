"""Bodies of the routes about replicas: requests under both names of the endpoint (decision D18),
and the details of peers (decision D22).
"""

import msgspec


class PeerRequest(msgspec.Struct):
    """POST /replica_sync/register_peer and /deregister_peer."""

    endpoint: str


class PeerUrlRequest(PeerRequest):
    """POST /register_peer and /deregister_peer, as the slot tracker's source document has them."""

    endpoint: str = msgspec.field(name="url")


class PeerState(msgspec.Struct, frozen=True):
    """One peer of GET /replica_sync/peers?detail=true."""

    endpoint: str
    state: str
    since_s: float  # how long it has been so
    retries: int  # attempts to connect meanwhile
    last_error: str | None  # why there is no connection now


class PublisherState(msgspec.Struct, frozen=True):
    """One replica that numbers what it publishes."""

    router_id: int
    sequence: int  # the last that was heard of
    heard_s: float  # how long ago
    missed: int
    is_behind: bool  # something was missed, and not mended since


class CurveState(msgspec.Struct, frozen=True):
    """How replicas encrypt; public keys as Z85."""

    public_key: str  # ours
    peer_keys: int  # that are admitted
    refused: int  # handshakes of clients with another key
    last_refused: str | None  # a public key


class PlaneState(msgspec.Struct, frozen=True):
    """GET /replica_sync/peers?detail=true."""

    router_id: int
    peers: list[PeerState]
    published: int
    refused: int  # not published: too many waited, or too big
    queue_overflows: int  # times that the queue of a peer began to drop what is published
    sequence: int  # the number of the last event published or refused
    received: int
    missed: int  # published by replicas that number their events, and never arrived
    publishers: list[PublisherState]  # those replicas
    applied: dict[str, int]  # by kind of event
    dropped: dict[str, int]  # by reason
    catch_up: dict[str, int] | msgspec.UnsetType  # how many reservations met which fate
    curve: CurveState | msgspec.UnsetType = msgspec.UNSET  # while keys are given
