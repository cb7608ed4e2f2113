"""A Selector without sockets, under a clock that only the test moves."""

import random
from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.shapes import Reservation, ReservationSpec
from lean_selector.core.load.speeds import LEAST_TOKENS, WINDOW
from lean_selector.core.replication.ledger import ReplicaTarget
from lean_selector.core.selection import inspection
from lean_selector.core.selection.catalog import SourceSink, Worker
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import (
    PinnedWorker,
    Placement,
    SelectionRequest,
    Source,
    WorkerSpec,
)

BLOCK_SIZE = 4


def pack(hashes: Iterable[int]) -> bytes:
    """Hashes, signed or not, as they travel."""
    return b"".join((value % 2**64).to_bytes(8, "little") for value in hashes)


def prompt_of(hashes: list[int], isl_tokens: int) -> Prompt:
    """The same numbers serve as local and as sequence hashes."""
    packed = pack(hashes)
    return Prompt(isl_tokens, packed, len(hashes), packed[:8], lambda: packed)


def teach(partition: Partition, load: RankLoad, seconds: float, times: int = WINDOW) -> None:
    """Requests on a rank tell how fast it is, in seconds per token."""
    spec, run = ReservationSpec("r", *load.key), cast(Any, None)
    for turn in range(times):
        served = Reservation("r", spec, load, run, 0, 0, 0.0, 0.0, None)
        served.ahead_tokens = LEAST_TOKENS
        partition.speeds.completed(served, LEAST_TOKENS * seconds, 10.0 * turn)


class Sources:
    """Stands where the sockets would: remembers who is subscribed, and every change."""

    def __init__(self) -> None:
        self.subscribed: dict[tuple[int, int], Source] = {}
        self.changes: list[tuple[str, int, int]] = []
        self.spoken_for: set[int] = set()  # other ranks, by any source

    def subscribe(self, _: Partition, worker_id: int, dp_rank: int, source: Source) -> None:
        assert (worker_id, dp_rank) not in self.subscribed
        self.subscribed[worker_id, dp_rank] = source
        self.changes.append(("subscribe", worker_id, dp_rank))

    def unsubscribe(self, worker_id: int, dp_rank: int) -> Collection[int]:
        del self.subscribed[worker_id, dp_rank]
        self.changes.append(("unsubscribe", worker_id, dp_rank))
        return self.spoken_for


class DrivenSelector:
    """A Selector, its clock, what it told its peers, and the answers of requests that waited.

    `sessions` among the settings may be the tables themselves, and `sources` real ones. With
    `turns` there is a loop, whose turns are driven by `turn`.
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("use_kv_events", False)
        self.now = 0.0
        self.told: list[tuple[str, str]] = []
        self.answers: dict[str, Placement | Exception] = {}
        self.sources = Sources()
        sources: SourceSink = settings.pop("sources", self.sources)
        self.turns: list[Callable[[], None]] | None = [] if settings.pop("turns", False) else None
        decisions = settings.pop("decisions", None)
        check: Callable[[WorkerSpec], None] = settings.pop("check_worker", lambda spec: None)
        self.selector = Selector(
            RouterSettings(**settings),
            sources,
            random.Random(7),
            call_soon=None if self.turns is None else self.turns.append,
            check_worker=check,
        )
        self.selector.ledgers.events = self
        self.selector.reservations.decisions = decisions

    def turn(self) -> None:
        """One turn of the loop, in which something is due."""
        assert self.turns is not None
        (due,) = self.turns
        self.turns.clear()
        due()

    # What the selector tells its peers.

    def booked(self, _: ReplicaTarget, reservation: Reservation, sequence: bytes) -> None:
        self.told.append(("booked", reservation.request_id))

    def prefill_completed(self, _: ReplicaTarget, reservation: Reservation) -> None:
        self.told.append(("prefill_completed", reservation.request_id))

    def freed(self, _: ReplicaTarget, reservation: Reservation) -> None:
        self.told.append(("freed", reservation.request_id))

    def kept_alive(self, _: ReplicaTarget, reservation: Reservation) -> None:
        self.told.append(("kept_alive", reservation.request_id))

    # Calls.

    def register(self, worker_id: int, **changes: Any) -> Worker:
        fields: dict[str, Any] = {
            "worker_id": worker_id,
            "endpoint": f"http://w{worker_id}",
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": 1,
        }
        return self.selector.upsert_worker(WorkerSpec(**{**fields, **changes}), self.now)

    def remove(self, worker_id: int) -> Worker:
        return self.selector.remove_worker(worker_id, self.now)

    @property
    def partition(self) -> Partition:
        return self.selector.catalog.ready_partition("default", "default")

    def request(self, hashes: list[int], isl_tokens: int, **changes: Any) -> SelectionRequest:
        request = SelectionRequest(prompt_of(hashes, isl_tokens), self.selector.terms)
        if "pin" in changes:
            request.pinned = PinnedWorker(*changes.pop("pin"))
        if "allowed" in changes:
            request.allowed_worker_ids = frozenset(changes.pop("allowed"))
        for name, value in changes.items():
            setattr(request, name, value)
        return request

    def submit(self, name: str, request: SelectionRequest) -> Placement | Waiting:
        """Answers at once or parks; a late answer lands in `answers[name]`."""

        def on_answer(outcome: Placement | Exception) -> None:
            assert name not in self.answers, "answered once"
            self.answers[name] = outcome

        found = self.selector.select(self.partition, request, self.now)
        if isinstance(found, Waiting):
            found.on_answer = on_answer
        return found

    def book(
        self, name: str, *, hashes: list[int] | None = None, isl_tokens: int = 16, **changes: Any
    ) -> Placement | Waiting:
        """select_and_reserve."""
        request = self.request(hashes or [], isl_tokens, **changes)
        request.books, request.reservation_id = True, name
        return self.submit(name, request)

    def reserve(
        self,
        name: str,
        rank: tuple[int, int] = (1, 0),
        *,
        hashes: list[int] | None = None,
        isl_tokens: int = 16,
        prefill: int | None = 16,
        key: tuple[str, str] = ("default", "default"),
    ) -> None:
        """POST /reservations."""
        partition = self.selector.catalog.ready_partition(*key)
        prompt = prompt_of(hashes or [], isl_tokens)
        self.selector.reservations.reserve(partition, name, *rank, prompt, prefill, self.now)

    def placed(self, name: str) -> tuple[int, int]:
        outcome = self.answers[name]
        assert isinstance(outcome, Placement), outcome
        return outcome.worker_id, outcome.dp_rank

    # What can be seen.

    def chosen(self) -> set[int]:
        """The workers that 40 requests go to; nothing is booked, so all are equally loaded."""
        placements = [self.submit("s", self.request([], 16)) for _ in range(40)]
        return {each.worker_id for each in placements if isinstance(each, Placement)}

    def pending(self) -> tuple[int, int]:
        """pending_count and pending_isl_tokens of the default partition."""
        (entry,) = inspection.loads(self.selector.catalog, "default", "default")
        return entry.pending_count, entry.pending_isl_tokens

    def loads(self) -> dict[tuple[str, str], dict[tuple[int, int], tuple[int, int, int]]]:
        """Per partition and rank: prefill tokens, decode blocks, requests."""
        return {
            (entry.model_name, entry.tenant_id): {
                (row.worker_id, row.dp_rank): (
                    row.potential_prefill_tokens,
                    row.potential_decode_blocks,
                    row.active_requests,
                )
                for row in entry.loads
            }
            for entry in inspection.loads(self.selector.catalog, None, None)
        }


def fleet_of(*roles: str, **settings: Any) -> DrivenSelector:
    """Workers 1, 2... of these roles."""
    driven = DrivenSelector(**settings)
    for number, role in enumerate(roles, 1):
        driven.register(number, worker_role=role, total_kv_blocks=100)
    return driven
