"""SlotTracker and SyncSlotTracker: clients of the standalone slot tracker, for one model.

Routes and fields are those of its document, "Topology API", "Lifecycle API", "Load API" and
"Replica Synchronization". Nothing is retried: an /add whose response is lost may have been counted.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar
from urllib.parse import urlencode

import msgspec

from lean_selector.client.calls import Call, nothing, post
from lean_selector.client.client_settings import Access, Cert, Timeouts, Token, Verify
from lean_selector.client.drivers import Driver, SyncDriver, awaited, done
from lean_selector.client.routing import Flow, Routing, ask
from lean_selector.client.transport import AsyncClosing, Closing

Row = dict[str, str | int]
D = TypeVar("D", Driver, SyncDriver)

_read_rows = msgspec.json.Decoder(list[Row]).decode
_read_projection = msgspec.json.Decoder(list[dict[str, int]]).decode
_read_peers = msgspec.json.Decoder(list[str]).decode


class SlotTrackerCalls:
    """The methods of both clients: each is a flow that a client runs.

    `sequence_hashes` are signed or unsigned, one for each block of the prompt, in order.
    """

    def __init__(self, model_name: str, tenant_id: str) -> None:
        self._scope = {"model_name": model_name, "tenant_id": tenant_id}

    def register(
        self, worker_id: int, block_size: int, dp_start: int = 0, dp_size: int = 1
    ) -> Flow[None]:
        """Make ranks dp_start to dp_start + dp_size - 1 known."""
        ranks = {"block_size": block_size, "dp_start": dp_start, "dp_size": dp_size}
        return ask(post("/register", {**self._scope, "worker_id": worker_id, **ranks}, nothing))

    def unregister(self, worker_id: int) -> Flow[None]:
        """Forget a worker and its requests. Raises NotFound."""
        return ask(post("/unregister", {**self._scope, "worker_id": worker_id}, nothing))

    def workers(self) -> Flow[list[Row]]:
        """The registered workers of this model."""
        return ask(Call("GET", "/workers?" + urlencode(self._scope), _read_rows))

    def add(
        self,
        request_id: str,
        worker_id: int,
        sequence_hashes: Sequence[int],
        new_isl_tokens: int = 0,
        dp_rank: int = 0,
    ) -> Flow[None]:
        """Count a request on a rank: its blocks, and the tokens still to be computed.

        Raises AlreadyExists and NotFound. On ServiceUnreachable it may have been counted: free it.
        """
        body = {
            **self._scope,
            "request_id": request_id,
            "worker_id": worker_id,
            "dp_rank": dp_rank,
            "sequence_hashes": _signed(sequence_hashes),
            "new_isl_tokens": new_isl_tokens,
        }
        return ask(post("/add", body, nothing))

    def prefill_complete(self, request_id: str) -> Flow[None]:
        """Raises NotFound for an unknown request."""
        return ask(post("/prefill_complete", {**self._scope, "request_id": request_id}, nothing))

    def free(self, request_id: str) -> Flow[None]:
        """Forget a request; an unknown one is fine."""
        return ask(post("/free", {**self._scope, "request_id": request_id}, nothing))

    def loads(self) -> Flow[list[Row]]:
        """A row for each rank: active_prefill_tokens and active_decode_blocks."""
        return ask(Call("GET", "/loads?" + urlencode(self._scope), _read_rows))

    def potential_loads(
        self, sequence_hashes: Sequence[int], new_isl_tokens: int = 0
    ) -> Flow[list[dict[str, int]]]:
        """A row for each rank, as it would be with this prompt."""
        hashes = _signed(sequence_hashes)
        prompt = {"sequence_hashes": hashes, "new_isl_tokens": new_isl_tokens}
        return ask(post("/potential_loads", {**self._scope, **prompt}, _read_projection))

    def register_peer(self, url: str) -> Flow[None]:
        """Listen to a replica, by its published endpoint."""
        return ask(post("/register_peer", {"url": url}, nothing))

    def deregister_peer(self, url: str) -> Flow[None]:
        """Stop listening to a replica. Raises NotFound."""
        return ask(post("/deregister_peer", {"url": url}, nothing))

    def peers(self) -> Flow[list[str]]:
        """The endpoints of the replicas that it listens to."""
        return ask(Call("GET", "/peers", _read_peers))


def _signed(hashes: Sequence[int]) -> list[int]:
    """64-bit hashes as signed integers, which is how hashes travel. Raises ValueError beyond."""
    if hashes and not (min(hashes) >= -(2**63) and max(hashes) < 2**64):
        raise ValueError("a sequence hash does not fit into 64 bits")
    return [value - 2**64 if value >= 2**63 else value for value in hashes]


class _Tracker(Generic[D]):
    _kind: type[D]

    def __init__(
        self,
        endpoint: str,
        model_name: str,
        tenant_id: str = "default",
        *,
        timeouts: Timeouts | None = None,
        verify: Verify = True,
        cert: Cert | None = None,
        token: Token | None = None,
    ) -> None:
        """endpoint: URL or unix:PATH. verify, cert, token: as of KvRouter. Raises ValueError for
        any other URL, and OSError for unusable files."""
        access = Access(verify, cert, token)
        self._driver: D = self._kind(endpoint, Routing(), timeouts or Timeouts(), None, access)
        self._calls = SlotTrackerCalls(model_name, tenant_id)


class SlotTracker(_Tracker[Driver], AsyncClosing):
    """On an event loop. Use as `async with`, or aclose()."""

    _kind = Driver
    register = awaited(SlotTrackerCalls.register)
    unregister = awaited(SlotTrackerCalls.unregister)
    workers = awaited(SlotTrackerCalls.workers)
    add = awaited(SlotTrackerCalls.add)
    prefill_complete = awaited(SlotTrackerCalls.prefill_complete)
    free = awaited(SlotTrackerCalls.free)
    loads = awaited(SlotTrackerCalls.loads)
    potential_loads = awaited(SlotTrackerCalls.potential_loads)
    register_peer = awaited(SlotTrackerCalls.register_peer)
    deregister_peer = awaited(SlotTrackerCalls.deregister_peer)
    peers = awaited(SlotTrackerCalls.peers)

    async def aclose(self) -> None:
        """Close all connections; what was counted stays counted."""
        await self._driver.close()


class SyncSlotTracker(_Tracker[SyncDriver], Closing):
    """Without an event loop. Use as `with`, or close()."""

    _kind = SyncDriver
    register = done(SlotTrackerCalls.register)
    unregister = done(SlotTrackerCalls.unregister)
    workers = done(SlotTrackerCalls.workers)
    add = done(SlotTrackerCalls.add)
    prefill_complete = done(SlotTrackerCalls.prefill_complete)
    free = done(SlotTrackerCalls.free)
    loads = done(SlotTrackerCalls.loads)
    potential_loads = done(SlotTrackerCalls.potential_loads)
    register_peer = done(SlotTrackerCalls.register_peer)
    deregister_peer = done(SlotTrackerCalls.deregister_peer)
    peers = done(SlotTrackerCalls.peers)

    def close(self) -> None:
        """Close all connections; what was counted stays counted."""
        self._driver.close()
