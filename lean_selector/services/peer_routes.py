"""What both services answer about their replicas: peers come, go and are listed; the snapshot.

Spec slot_tracker.md 3.6; the details of peers and the snapshot are ours (decision D22).
"""

from typing import Protocol

from lean_selector.core.errors import BadRequest, Conflict
from lean_selector.http1.reader import Request
from lean_selector.http1.router import RepeatedQueryField, parse_query
from lean_selector.services.gate import Answer, Route, error_reply, plain, reply, with_body
from lean_selector.wire.peer_bodies import PeerRequest
from lean_selector.wire.selection import Ok

OK = Ok()
_DETAIL = frozenset({"detail"})
_WORDS = {"": True, "true": True, "1": True, "false": False, "0": False}


class Plane(Protocol):
    """The replica plane, as far as it is asked about."""

    def register_peer(self, endpoint: str) -> bool: ...

    def deregister_peer(self, endpoint: str) -> bool: ...

    def peers(self) -> list[str]: ...

    def state(self) -> object: ...

    def snapshot(self) -> Answer: ...


class ReplicaHandlers:
    """The part of a service that speaks of replicas; `plane` is None while replica sync is off."""

    def __init__(self, plane: Plane | None) -> None:
        self._plane = plane

    def replica_routes(self) -> tuple[Route, ...]:
        return (
            ("POST", "/replica_sync/register_peer", with_body(PeerRequest, self.register_peer)),
            (
                "POST",
                "/replica_sync/deregister_peer",
                with_body(PeerRequest, self.deregister_peer),
            ),
            ("GET", "/replica_sync/peers", self.list_peers),
            ("GET", "/replica_sync/snapshot", plain(lambda: self._switched_on().snapshot())),
        )

    def register_peer(self, body: PeerRequest) -> bytes:
        new = self._switched_on().register_peer(body.endpoint)
        return reply(201 if new else 200, OK)

    def deregister_peer(self, body: PeerRequest) -> Ok | bytes:
        known = self._switched_on().deregister_peer(body.endpoint)
        return OK if known else error_reply(404, "peer not found")

    def list_peers(self, request: Request, param: bytes | None) -> Answer:
        """Their endpoints; with `?detail=true` the state of each, and what was dropped why."""
        if request.query and _wants_detail(request.query):
            return reply(200, {} if self._plane is None else self._plane.state())
        return reply(200, [] if self._plane is None else self._plane.peers())

    def _switched_on(self) -> Plane:
        if self._plane is None:
            raise Conflict("replica sync is disabled")
        return self._plane


def _wants_detail(query: bytes) -> bool:
    try:
        word = parse_query(query, _DETAIL).get("detail", "false")
        return _WORDS[word.lower()]
    except RepeatedQueryField as error:
        raise BadRequest(f"Failed to deserialize query string: {error}") from None
    except KeyError:
        raise BadRequest("Failed to deserialize query string: detail is true or false") from None
