"""SlotTracker and SyncSlotTracker: clients of the standalone slot tracker, for one model.

Routes and fields are those of its document, "Topology API", "Lifecycle API", "Load API" and
"Replica Synchronization". Nothing is retried: an /add whose answer is lost may have been counted.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar
from urllib.parse import urlencode

import msgspec

from lean_selector.client.calls import Call, nothing, post
from lean_selector.client.settings import Access, Cert, Timeouts, Token, Verify
from lean_selector.client.transport import (
    AsyncClosing,
    Closing,
    ServiceConnection,
    SyncServiceConnection,
    described_by,
)

Row = dict[str, str | int]
P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", ServiceConnection, SyncServiceConnection)

_read_rows = msgspec.json.Decoder(list[Row]).decode
_read_projection = msgspec.json.Decoder(list[dict[str, int]]).decode
_read_peers = msgspec.json.Decoder(list[str]).decode


class SlotTrackerCalls:
    """The methods of both clients: each returns the Call that a client sends and reads.

    `sequence_hashes` are signed or unsigned, one for each block of the prompt, in order.
    """

    def __init__(self, model_name: str, tenant_id: str) -> None:
        self._scope = {"model_name": model_name, "tenant_id": tenant_id}

    def register(
        self, worker_id: int, block_size: int, dp_start: int = 0, dp_size: int = 1
    ) -> Call[None]:
        """Make ranks dp_start to dp_start + dp_size - 1 known."""
        ranks = {"block_size": block_size, "dp_start": dp_start, "dp_size": dp_size}
        return post("/register", {**self._scope, "worker_id": worker_id, **ranks}, nothing)

    def unregister(self, worker_id: int) -> Call[None]:
        """Forget a worker and its requests. Raises NotFound."""
        return post("/unregister", {**self._scope, "worker_id": worker_id}, nothing)

    def workers(self) -> Call[list[Row]]:
        """The registered workers of this model."""
        return Call("GET", "/workers?" + urlencode(self._scope), _read_rows)

    def add(
        self,
        request_id: str,
        worker_id: int,
        sequence_hashes: Sequence[int],
        new_isl_tokens: int = 0,
        dp_rank: int = 0,
    ) -> Call[None]:
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
        return post("/add", body, nothing)

    def prefill_complete(self, request_id: str) -> Call[None]:
        """Raises NotFound for an unknown request."""
        return post("/prefill_complete", {**self._scope, "request_id": request_id}, nothing)

    def free(self, request_id: str) -> Call[None]:
        """Forget a request; an unknown one is fine."""
        return post("/free", {**self._scope, "request_id": request_id}, nothing)

    def loads(self) -> Call[list[Row]]:
        """A row for each rank: active_prefill_tokens and active_decode_blocks."""
        return Call("GET", "/loads?" + urlencode(self._scope), _read_rows)

    def potential_loads(
        self, sequence_hashes: Sequence[int], new_isl_tokens: int = 0
    ) -> Call[list[dict[str, int]]]:
        """A row for each rank, as it would be with this prompt."""
        hashes = _signed(sequence_hashes)
        prompt = {"sequence_hashes": hashes, "new_isl_tokens": new_isl_tokens}
        return post("/potential_loads", {**self._scope, **prompt}, _read_projection)

    def register_peer(self, url: str) -> Call[None]:
        """Listen to a replica, by its published endpoint."""
        return post("/register_peer", {"url": url}, nothing)

    def deregister_peer(self, url: str) -> Call[None]:
        """Stop listening to a replica. Raises NotFound."""
        return post("/deregister_peer", {"url": url}, nothing)

    def peers(self) -> Call[list[str]]:
        """The endpoints of the replicas that it listens to."""
        return Call("GET", "/peers", _read_peers)


def _signed(hashes: Sequence[int]) -> list[int]:
    """64-bit hashes as signed integers, which is how hashes travel. Raises ValueError beyond."""
    if hashes and not (min(hashes) >= -(2**63) and max(hashes) < 2**64):
        raise ValueError("a sequence hash does not fit into 64 bits")
    return [value - 2**64 if value >= 2**63 else value for value in hashes]


Made = Callable[Concatenate[SlotTrackerCalls, P], Call[T]]


def _awaited(made: Made[P, T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The method of SlotTracker that sends what `made` returns."""

    @described_by(made)
    async def method(tracker: "SlotTracker", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await tracker._service.exchange(made(tracker._calls, *args, **kwargs))

    return method


def _done(made: Made[P, T]) -> Callable[Concatenate[Any, P], T]:
    """The method of SyncSlotTracker that sends what `made` returns."""

    @described_by(made)
    def method(tracker: "SyncSlotTracker", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return tracker._service.exchange(made(tracker._calls, *args, **kwargs))

    return method


class _Tracker(Generic[C]):
    _kind: type[C]

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
        anything else, and OSError for files that cannot be used."""
        access = Access(verify, cert, token)
        self._service: C = self._kind(endpoint, timeouts or Timeouts(), access)
        self._calls = SlotTrackerCalls(model_name, tenant_id)


class SlotTracker(_Tracker[ServiceConnection], AsyncClosing):
    """On an event loop. Use as `async with`, or aclose()."""

    _kind = ServiceConnection
    register = _awaited(SlotTrackerCalls.register)
    unregister = _awaited(SlotTrackerCalls.unregister)
    workers = _awaited(SlotTrackerCalls.workers)
    add = _awaited(SlotTrackerCalls.add)
    prefill_complete = _awaited(SlotTrackerCalls.prefill_complete)
    free = _awaited(SlotTrackerCalls.free)
    loads = _awaited(SlotTrackerCalls.loads)
    potential_loads = _awaited(SlotTrackerCalls.potential_loads)
    register_peer = _awaited(SlotTrackerCalls.register_peer)
    deregister_peer = _awaited(SlotTrackerCalls.deregister_peer)
    peers = _awaited(SlotTrackerCalls.peers)

    async def aclose(self) -> None:
        """Close all connections; what was counted stays counted."""
        await self._service.close()


class SyncSlotTracker(_Tracker[SyncServiceConnection], Closing):
    """Without an event loop. Use as `with`, or close()."""

    _kind = SyncServiceConnection
    register = _done(SlotTrackerCalls.register)
    unregister = _done(SlotTrackerCalls.unregister)
    workers = _done(SlotTrackerCalls.workers)
    add = _done(SlotTrackerCalls.add)
    prefill_complete = _done(SlotTrackerCalls.prefill_complete)
    free = _done(SlotTrackerCalls.free)
    loads = _done(SlotTrackerCalls.loads)
    potential_loads = _done(SlotTrackerCalls.potential_loads)
    register_peer = _done(SlotTrackerCalls.register_peer)
    deregister_peer = _done(SlotTrackerCalls.deregister_peer)
    peers = _done(SlotTrackerCalls.peers)

    def close(self) -> None:
        """Close all connections; what was counted stays counted."""
        self._service.close()
