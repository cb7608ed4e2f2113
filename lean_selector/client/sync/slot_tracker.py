"""SyncSlotTracker: a client of the standalone slot tracker, for one model.

The same methods as `aio.slot_tracker` has, without `await`.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from lean_selector.client.access import Access, Cert, Token, Verify
from lean_selector.client.slot_tracker_calls import Row, SlotTrackerCalls
from lean_selector.client.sync.service_connection import SyncServiceConnection
from lean_selector.client.timeouts import Timeouts


class SyncSlotTracker:
    """Use as `with`, or close()."""

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
        self._service = SyncServiceConnection(
            endpoint, timeouts or Timeouts(), Access(verify, cert, token)
        )
        self._calls = SlotTrackerCalls(model_name, tenant_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._service.close()

    def register(
        self, worker_id: int, block_size: int, dp_start: int = 0, dp_size: int = 1
    ) -> None:
        """Make ranks dp_start to dp_start + dp_size - 1 known."""
        self._service.exchange(self._calls.register(worker_id, block_size, dp_start, dp_size))

    def unregister(self, worker_id: int) -> None:
        """Forget a worker and its requests. Raises NotFound."""
        self._service.exchange(self._calls.unregister(worker_id))

    def workers(self) -> list[Row]:
        """The registered workers of this model."""
        return self._service.exchange(self._calls.workers())

    def add(
        self,
        request_id: str,
        worker_id: int,
        sequence_hashes: Sequence[int],
        new_isl_tokens: int = 0,
        dp_rank: int = 0,
    ) -> None:
        """Count a request on a rank: its blocks, and the tokens still to be computed.

        Raises AlreadyExists and NotFound. On ServiceUnreachable it may have been counted: free it.
        """
        self._service.exchange(
            self._calls.add(request_id, worker_id, dp_rank, sequence_hashes, new_isl_tokens)
        )

    def prefill_complete(self, request_id: str) -> None:
        """Raises NotFound for an unknown request."""
        self._service.exchange(self._calls.prefill_complete(request_id))

    def free(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""
        self._service.exchange(self._calls.free(request_id))

    def loads(self) -> list[Row]:
        """A row for each rank: active_prefill_tokens and active_decode_blocks."""
        return self._service.exchange(self._calls.loads())

    def potential_loads(
        self, sequence_hashes: Sequence[int], new_isl_tokens: int = 0
    ) -> list[dict[str, int]]:
        """A row for each rank, as it would be with this prompt."""
        return self._service.exchange(self._calls.potential_loads(sequence_hashes, new_isl_tokens))

    def register_peer(self, url: str) -> None:
        """Listen to a replica, by its published endpoint."""
        self._service.exchange(self._calls.register_peer(url))

    def deregister_peer(self, url: str) -> None:
        """Stop listening to a replica. Raises NotFound."""
        self._service.exchange(self._calls.deregister_peer(url))

    def peers(self) -> list[str]:
        """The endpoints of the replicas that it listens to."""
        return self._service.exchange(self._calls.peers())
