"""The slot tracker: registered workers and active requests, per (model_name, tenant_id).

The first worker of a model and tenant creates a tracker. When the last worker is removed, the
tracker is removed too, with all its state. A tracker is a ledger: it books requests and publishes
them to peers. A ReplicaApplier applies the peers' events; it finds a tracker by `Trackers.lookup`.
Independent of HTTP and sockets; time is an argument, in monotonic seconds. Spec:
slot_tracker.md 1.3 and 2, with decisions D3, D6, D12, D13 and D17."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from lean_selector.core.errors import BadRequest, Conflict, NotFound
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.shapes import (
    LoadRow,
    PotentialLoadRow,
    Reservation,
    ReservationSpec,
    WorkerRow,
)
from lean_selector.core.load.slots import Slots
from lean_selector.core.numbers import MAX_ISL_TOKENS, MAX_RANKS, RANK_LIMIT, U64_MAX
from lean_selector.core.replication.ledger import RESERVATION_EXPIRY_S, Ledger, Ledgers


@dataclass(eq=False)
class Tracker(Ledger):
    """The ledger of one (model_name, tenant_id), and the workers. It is removed with the last."""

    workers: dict[int, WorkerRow] = field(default_factory=dict)

    def ranks(self) -> list[RankLoad]:
        """Return the loads of all ranks, sorted by (worker_id, dp_rank)."""
        ranks = self.slots.ranks
        return [ranks[key] for key in sorted(ranks)]


class Trackers:
    """All trackers of one process. A method that raises has changed nothing."""

    def __init__(self, reservation_expiry_s: float = RESERVATION_EXPIRY_S) -> None:
        self.ledgers = Ledgers(reservation_expiry_s)  # `events`: set before workers register
        self._trackers: dict[tuple[str, str], Tracker] = {}
        self.revision = 0  # incremented whenever `workers` changes

    def lookup(self, model_name: str, tenant_id: str) -> Tracker | None:
        return self._trackers.get((model_name, tenant_id))

    def in_order(self) -> list[Tracker]:
        """Return all trackers, sorted by (model_name, tenant_id)."""
        return list(self._selected(None, None))

    # -- workers -----------------------------------------------------------------------------------

    def register(self, row: WorkerRow) -> None:
        """Add a worker. The first worker creates the tracker and fixes the block size. Raises
        BadRequest for an invalid range of ranks. Raises Conflict for another block size, or if the
        worker is already registered."""
        _check_range(row)
        scope = row.model_name, row.tenant_id
        tracker = self._trackers.get(scope)
        where = f"model={row.model_name} tenant={row.tenant_id}"
        if tracker is None:
            tracker = self._trackers[scope] = Tracker(*scope, row.block_size, Slots(), self.ledgers)
        elif tracker.block_size != row.block_size:
            raise Conflict(
                f"block_size mismatch for {where}: "
                f"existing={tracker.block_size}, requested={row.block_size}"
            )
        elif row.worker_id in tracker.workers:
            raise Conflict(f"worker {row.worker_id} already registered for {where}")
        tracker.workers[row.worker_id] = row
        self.revision += 1
        for dp_rank in row.ranks:
            tracker.slots.add_rank(row.worker_id, dp_rank)

    def unregister(self, model_name: str, tenant_id: str, worker_id: int) -> None:
        """Remove a worker and its requests. If no worker remains, remove the tracker too. Publishes
        the end of requests that this replica admitted. Raises NotFound."""
        tracker = self.lookup(model_name, tenant_id)
        if tracker is None or worker_id not in tracker.workers:
            raise NotFound(
                f"worker {worker_id} not found for model={model_name} tenant={tenant_id}"
            )
        for dp_rank in tracker.workers.pop(worker_id).ranks:
            tracker.drop_rank(worker_id, dp_rank)
        self.revision += 1
        if not tracker.workers:
            del self._trackers[model_name, tenant_id]

    def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRow]:
        """Return workers of this model and tenant (None: any), sorted by (model_name, tenant_id,
        worker_id)."""
        return [
            row
            for tracker in self._selected(model_name, tenant_id)
            for _worker_id, row in sorted(tracker.workers.items())
        ]

    # -- requests ----------------------------------------------------------------------------------

    def add(
        self,
        model_name: str,
        tenant_id: str,
        request_id: str,
        worker_id: int,
        dp_rank: int,
        sequence_hashes: bytes,
        new_isl_tokens: int,
        now: float,
    ) -> None:
        """Book a request on a rank. `sequence_hashes` has 8 bytes little-endian per block.

        Raises BadRequest for too many tokens; NotFound if the tracker or the rank does not exist;
        DuplicateRequest for an id that is live in this tracker."""
        _check_tokens(new_isl_tokens)
        tracker = self._tracker(model_name, tenant_id)
        spec = ReservationSpec(
            request_id,
            worker_id,
            dp_rank,
            track_prefill_tokens=new_isl_tokens > 0,
            prefill_tokens=new_isl_tokens or None,
        )
        tracker.book(spec, sequence_hashes, now)

    def prefill_complete(
        self, model_name: str, tenant_id: str, request_id: str, now: float
    ) -> None:
        """Release a request's prefill tokens. May be called repeatedly. Raises NotFound."""
        tracker = self._tracker(model_name, tenant_id)
        if tracker.prefill_complete(request_id, now) is None:
            raise NotFound(f"Request {request_id} not found")

    def free(self, model_name: str, tenant_id: str, request_id: str, now: float) -> None:
        """Free a request. An unknown request is not an error. Raises NotFound if there is no
        tracker for the model and tenant."""
        self._tracker(model_name, tenant_id).free(request_id, now)

    def expire(self, now: float, max_steps: int) -> list[Reservation]:
        """Expire idle requests, at most `max_steps` in total. Publishes the end of requests that
        this replica admitted. If `max_steps` requests were returned, call again."""
        gone: list[Reservation] = []
        trackers = list(self._trackers.values())
        for _, expired in self.ledgers.expire(trackers, now, max_steps):
            gone += expired
        return gone

    def arrived(self) -> int:
        """Count requests booked here or copied from peers, without those of dropped trackers."""
        return sum(tracker.slots.arrived for tracker in self._trackers.values())

    # -- loads -------------------------------------------------------------------------------------

    def loads(self, model_name: str | None, tenant_id: str | None) -> list[LoadRow]:
        """Return one row per registered rank of this model and tenant (None: any), sorted."""
        return [
            LoadRow(
                tracker.model_name,
                tracker.tenant_id,
                rank.worker_id,
                rank.dp_rank,
                min(rank.active_prefill_tokens, U64_MAX),
                rank.active_decode_blocks,
            )
            for tracker in self._selected(model_name, tenant_id)
            for rank in tracker.ranks()
        ]

    def potential_loads(
        self,
        model_name: str,
        tenant_id: str,
        sequence_hashes: bytes,
        new_isl_tokens: int,
    ) -> list[PotentialLoadRow]:
        """Return each rank's load with this request added. Raises BadRequest or NotFound."""
        _check_tokens(new_isl_tokens)
        tracker = self._tracker(model_name, tenant_id)
        blocks = len(sequence_hashes) // 8
        shared = tracker.slots.active_prefix(sequence_hashes)
        return [
            PotentialLoadRow(
                rank.worker_id,
                rank.dp_rank,
                min(rank.active_prefill_tokens + new_isl_tokens, U64_MAX),
                rank.active_decode_blocks + blocks - shared.get(rank.key, 0),
                rank.active_requests,
            )
            for rank in tracker.ranks()
        ]

    def _tracker(self, model_name: str, tenant_id: str) -> Tracker:
        tracker = self.lookup(model_name, tenant_id)
        if tracker is None:
            raise NotFound(f"no slot tracker for model={model_name} tenant={tenant_id}")
        return tracker

    def _selected(self, model_name: str | None, tenant_id: str | None) -> Iterator[Tracker]:
        return (
            tracker
            for (model, tenant), tracker in sorted(self._trackers.items())
            if model_name in (None, model) and tenant_id in (None, tenant)
        )


def _check_range(row: WorkerRow) -> None:
    if row.block_size == 0:
        raise BadRequest("block_size must be greater than 0")
    if row.dp_size == 0:
        raise BadRequest("dp_size must be greater than 0")
    if row.dp_start + row.dp_size > RANK_LIMIT:
        raise BadRequest(f"dp range overflows u32: start={row.dp_start} size={row.dp_size}")
    if row.dp_size > MAX_RANKS:
        raise BadRequest(f"dp_size {row.dp_size} exceeds the maximum {MAX_RANKS}")


def _check_tokens(tokens: int) -> None:
    if tokens > MAX_ISL_TOKENS:
        raise BadRequest(f"isl_tokens ({tokens}) exceeds the maximum {MAX_ISL_TOKENS}")
