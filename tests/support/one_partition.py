"""One partition of one replica, with two ranks of worker 7: what it books, tells, hears, lists."""

from lean_selector.core.load.shapes import Reservation, ReservationSpec
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.catch_up import CatchUp, live_reservation
from lean_selector.core.replication.events import (
    ReplicaApplier,
    ReplicaEvents,
    Verdict,
)
from lean_selector.core.replication.ledger import (
    RESERVATION_EXPIRY_S,
    Ledger,
    Ledgers,
    ReplicaTarget,
    copies_expire_s,
)
from lean_selector.core.replication.shapes import EventKind, LiveReservation, ReplicaEvent
from tests.support.driven_selector import pack
from tests.support.reservations import replica_event

HERE, PEER, THIRD = 11, 22, 33
PROMPT = pack([1, 2, 3])
COPIES_EXPIRE_S = copies_expire_s(RESERVATION_EXPIRY_S)
IDLE = (0, 0, 0)
Load = tuple[int, int, int]  # prefill tokens, blocks, requests


def event(kind: EventKind, request_id: str = "r", **changes: object) -> ReplicaEvent:
    fields: dict[str, object] = {"worker_id": 7, "dp_rank": 0, "router_id": PEER, **changes}
    return replica_event(kind, "m", "t", 16, request_id, **fields)  # type: ignore[arg-type] # test


ADD = event(EventKind.ADD, sequence_hashes=PROMPT, prefill_tokens=48, expected_output_tokens=9)
COMPLETE, FREE = event(EventKind.PREFILL_COMPLETE), event(EventKind.FREE)


class Replica:
    """Told to `catch_up`, it notes from the start what it hears. `now` is its clock."""

    def __init__(self, router_id: int = HERE, ranks: int = 2, *, catches_up: bool = False) -> None:
        self.router_id, self.now = router_id, 0.0
        self.published: list[ReplicaEvent] = []
        self.shared = Ledgers(events=ReplicaEvents(router_id, self.publish))
        self.ledger = Ledger("m", "t", 16, Slots(), self.shared)
        self.slots = self.ledger.slots
        self.established = False
        self.applier = ReplicaApplier(router_id, self.lookup)
        self.catch_up = CatchUp(router_id, self.lookup, COPIES_EXPIRE_S) if catches_up else None
        self.register(ranks)

    def register(self, ranks: int) -> None:
        self.established = self.established or ranks > 0
        for dp_rank in range(ranks):
            self.slots.add_rank(7, dp_rank)

    def unregister(self) -> None:
        for worker_id, dp_rank in list(self.slots.ranks):
            self.ledger.drop_rank(worker_id, dp_rank)

    def lookup(self, model_name: str, tenant_id: str) -> ReplicaTarget | None:
        return self.ledger if self.established and (model_name, tenant_id) == ("m", "t") else None

    def publish(self, event: ReplicaEvent) -> None:
        if self.catch_up is not None:
            self.catch_up.note(event)
        self.published.append(event)

    def hear(self, event: ReplicaEvent, now: float | None = None) -> Verdict:
        self.now = self.now if now is None else now
        verdict = self.applier.apply(event, self.now)
        if self.catch_up is not None and verdict is not Verdict.OWN:
            self.catch_up.note(event)
        return verdict

    def add(self, request_id: str = "r", dp_rank: int = 0, tokens: int = 48) -> Reservation:
        spec = ReservationSpec(request_id, 7, dp_rank, prefill_tokens=tokens)
        return self.ledger.book(spec, PROMPT, self.now)

    def complete(self, request_id: str = "r") -> None:
        self.ledger.prefill_complete(request_id, self.now)

    def free(self, request_id: str = "r") -> None:
        self.ledger.free(request_id, self.now)

    def expire(self, now: float) -> None:
        self.shared.expire([self.ledger], now, 1_000_000)

    def snapshot(self) -> list[LiveReservation]:
        return [
            live_reservation(self.ledger, held, self.router_id) for held in self.slots.by_touch()
        ]

    def load(self, dp_rank: int = 0) -> Load:
        rank = self.slots.ranks[7, dp_rank]
        return rank.active_prefill_tokens, rank.active_decode_blocks, rank.active_requests

    def loads(self) -> dict[int, Load]:
        """By dp_rank."""
        return {dp_rank: self.load(dp_rank) for _, dp_rank in self.slots.ranks}
