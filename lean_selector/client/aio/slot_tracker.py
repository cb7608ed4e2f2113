"""SlotTracker: a client of the standalone slot tracker, for one model.

One method for each route of its document; what is sent is in `slot_tracker_calls`. Nothing is
retried: an /add whose answer is lost may have been counted ("Load API" of the document).
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from lean_selector.client.access import Access, Cert, Token, Verify
from lean_selector.client.aio.service_connection import ServiceConnection
from lean_selector.client.slot_tracker_calls import Row, SlotTrackerCalls
from lean_selector.client.timeouts import Timeouts


class SlotTracker:
    """Use as `async with`, or aclose()."""

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
        self._service = ServiceConnection(
            endpoint, timeouts or Timeouts(), Access(verify, cert, token)
        )
        self._calls = SlotTrackerCalls(model_name, tenant_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._service.close()

    async def register(
        self, worker_id: int, block_size: int, dp_start: int = 0, dp_size: int = 1
    ) -> None:
        """Make ranks dp_start to dp_start + dp_size - 1 known."""
        call = self._calls.register(worker_id, block_size, dp_start, dp_size)
        await self._service.exchange(call)

    async def unregister(self, worker_id: int) -> None:
        """Forget a worker and its requests. Raises NotFound."""
        await self._service.exchange(self._calls.unregister(worker_id))

    async def workers(self) -> list[Row]:
        """The registered workers of this model."""
        return await self._service.exchange(self._calls.workers())

    async def add(
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
        await self._service.exchange(
            self._calls.add(request_id, worker_id, dp_rank, sequence_hashes, new_isl_tokens)
        )

    async def prefill_complete(self, request_id: str) -> None:
        """Raises NotFound for an unknown request."""
        await self._service.exchange(self._calls.prefill_complete(request_id))

    async def free(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""
        await self._service.exchange(self._calls.free(request_id))

    async def loads(self) -> list[Row]:
        """A row for each rank: active_prefill_tokens and active_decode_blocks."""
        return await self._service.exchange(self._calls.loads())

    async def potential_loads(
        self, sequence_hashes: Sequence[int], new_isl_tokens: int = 0
    ) -> list[dict[str, int]]:
        """A row for each rank, as it would be with this prompt."""
        return await self._service.exchange(
            self._calls.potential_loads(sequence_hashes, new_isl_tokens)
        )

    async def register_peer(self, url: str) -> None:
        """Listen to a replica, by its published endpoint."""
        await self._service.exchange(self._calls.register_peer(url))

    async def deregister_peer(self, url: str) -> None:
        """Stop listening to a replica. Raises NotFound."""
        await self._service.exchange(self._calls.deregister_peer(url))

    async def peers(self) -> list[str]:
        """The endpoints of the replicas that it listens to."""
        return await self._service.exchange(self._calls.peers())
