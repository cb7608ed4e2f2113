"""Bodies of the routes about replicas, under both names of the endpoint (decision D18)."""

import msgspec


class PeerRequest(msgspec.Struct):
    """POST /replica_sync/register_peer and /deregister_peer."""

    endpoint: str


class PeerUrlRequest(PeerRequest):
    """POST /register_peer and /deregister_peer, as the slot tracker's source document has them."""

    endpoint: str = msgspec.field(name="url")
