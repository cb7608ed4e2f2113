"""The selector against a naive model: random workers, bookings and lifecycle calls.

The model keeps plain lists and counts everything anew after each step. It knows the rules of spec
selection.md sections 2, 5 and 6 and decisions D3, D4, D5 and D20, and nothing of tries or
partitions.
"""

import random
from operator import attrgetter
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lean_selector.core.errors import SelectorError
from lean_selector.core.selection import inspection
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import SelectionRequest, WorkerSpec
from tests.support.driven_selector import Sources, prompt_of

BLOCK_SIZE = 4
Key = tuple[str, str]

worker_ids = st.integers(1, 4)
keys = st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["default", "t"]))
START, SIZE = st.integers(0, 2), st.integers(0, 3)
request_ids = st.sampled_from([f"r{n}" for n in range(8)])
# Few values and short lists, so that prompts share prefixes, repeat hashes and diverge.
prompts = st.lists(st.integers(0, 2), max_size=4)


class ModelWorker:
    def __init__(self, key: Key, ranks: range, sources: dict[int, str]) -> None:
        self.key, self.ranks, self.sources = key, ranks, sources


class ModelRequest:
    def __init__(self, key: Key, rank: tuple[int, int], hashes: list[int], prefill: int) -> None:
        self.key, self.rank, self.hashes, self.prefill = key, rank, hashes, prefill
        self.output_blocks = 0


class SelectorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sources = Sources()
        self.selector = Selector(RouterSettings(), self.sources, random.Random(1))
        self.workers: dict[int, ModelWorker] = {}
        self.requests: dict[str, ModelRequest] = {}
        self.now = 0.0

    # -- what the model says -----------------------------------------------------------------------

    def expected_loads(self) -> list[tuple[Key, list[tuple[int, int, int, int, int]]]]:
        rows: dict[Key, list[tuple[int, int, int, int, int]]] = {}
        for worker_id, worker in self.workers.items():
            for dp_rank in worker.ranks:
                here = [r for r in self.requests.values() if r.rank == (worker_id, dp_rank)]
                paths = {tuple(r.hashes[: n + 1]) for r in here for n in range(len(r.hashes))}
                blocks = len(paths) + sum(r.output_blocks for r in here)
                row = (worker_id, dp_rank, sum(r.prefill for r in here), blocks, len(here))
                rows.setdefault(worker.key, []).append(row)
        return sorted((key, sorted(of_key)) for key, of_key in rows.items())

    def actual_loads(self) -> list[tuple[Key, list[tuple[Any, ...]]]]:
        figures = attrgetter(
            *("worker_id", "dp_rank", "potential_prefill_tokens", "potential_decode_blocks"),
            "active_requests",
        )
        return [
            ((entry.model_name, entry.tenant_id), [*map(figures, entry.loads)])
            for entry in inspection.loads(self.selector.catalog, None, None)
            if entry.loads  # the only worker of a partition may be incomplete for a while
        ]

    @invariant()
    def loads_are_those_of_the_model(self) -> None:
        assert self.actual_loads() == self.expected_loads()

    @invariant()
    def subscriptions_are_those_of_the_workers(self) -> None:
        expected = {
            (worker_id, dp_rank): endpoint
            for worker_id, worker in self.workers.items()
            for dp_rank, endpoint in worker.sources.items()
        }
        actual = {key: source.endpoint for key, source in self.sources.subscribed.items()}
        assert actual == expected

    def forget_requests_without_a_rank(self) -> None:
        ranks = {
            (worker_id, dp_rank, worker.key)
            for worker_id, worker in self.workers.items()
            for dp_rank in worker.ranks
        }
        self.requests = {
            name: request
            for name, request in self.requests.items()
            if (*request.rank, request.key) in ranks
        }

    def refused(self, call: Any) -> bool:
        """Makes a call; True if it raised, and then nothing may have changed."""
        before = self.actual_loads(), dict(self.sources.subscribed)
        try:
            call()
        except SelectorError:
            assert (self.actual_loads(), dict(self.sources.subscribed)) == before
            return True
        return False

    # -- rules -------------------------------------------------------------------------------------

    @rule(
        worker_id=worker_ids,
        key=keys,
        ranks=st.builds(lambda start, size: range(start, start + size), START, SIZE),
        endpoint=st.sampled_from(["http://w", ""]),
        port=st.integers(1, 2),
    )
    def register(self, worker_id: int, key: Key, ranks: range, endpoint: str, port: int) -> None:
        sources = {dp_rank: f"tcp://w{worker_id}:{port}{dp_rank}" for dp_rank in ranks}
        spec = WorkerSpec(
            worker_id=worker_id,
            model_name=key[0],
            tenant_id=key[1],
            endpoint=endpoint,
            block_size=BLOCK_SIZE,
            data_parallel_start_rank=ranks.start,
            data_parallel_size=len(ranks),
            kv_events_endpoints=sources,
        )
        worker = self.selector.upsert_worker(spec, self.now)
        is_complete = bool(endpoint) and len(ranks) > 0
        assert (not worker.reasons) is is_complete
        if is_complete:
            self.workers[worker_id] = ModelWorker(key, ranks, sources)
        else:
            self.workers.pop(worker_id, None)
        self.forget_requests_without_a_rank()

    @rule(worker_id=worker_ids)
    def delete(self, worker_id: int) -> None:
        known = worker_id in self.selector.catalog.workers
        refused = self.refused(lambda: self.selector.remove_worker(worker_id, self.now))
        assert refused is not known
        self.workers.pop(worker_id, None)
        self.forget_requests_without_a_rank()

    @rule(
        name=request_ids,
        key=keys,
        rank=st.tuples(worker_ids, st.integers(0, 4)),
        hashes=prompts,
        prefill=st.integers(0, 20),
    )
    def reserve(
        self, name: str, key: Key, rank: tuple[int, int], hashes: list[int], prefill: int
    ) -> None:
        worker = self.workers.get(rank[0])
        possible = (
            worker is not None
            and worker.key == key
            and rank[1] in worker.ranks
            and name not in self.requests
            and prefill <= 16
        )

        def call() -> None:
            partition = self.selector.catalog.ready_partition(*key)
            prompt = prompt_of(hashes, 16)
            self.selector.reservations.reserve(partition, name, *rank, prompt, prefill, self.now)

        assert self.refused(call) is not possible
        if possible:
            self.requests[name] = ModelRequest(key, rank, hashes, prefill)

    @rule(name=request_ids, key=keys, hashes=prompts, allowed=st.none() | st.frozensets(worker_ids))
    def select_and_reserve(
        self, name: str, key: Key, hashes: list[int], allowed: frozenset[int] | None
    ) -> None:
        eligible = {
            (worker_id, dp_rank)
            for worker_id, worker in self.workers.items()
            if worker.key == key and (allowed is None or worker_id in allowed)
            for dp_rank in worker.ranks
        }
        placed: list[tuple[int, int]] = []

        def call() -> None:
            partition = self.selector.catalog.ready_partition(*key)
            request = SelectionRequest(prompt_of(hashes, 16), self.selector.terms)
            request.books, request.reservation_id = True, name
            request.allowed_worker_ids = allowed
            outcome = self.selector.select(partition, request, self.now)
            assert not isinstance(outcome, Waiting)
            placed.append((outcome.worker_id, outcome.dp_rank))

        assert self.refused(call) is not (bool(eligible) and name not in self.requests)
        if placed:
            assert placed[0] in eligible
            self.requests[name] = ModelRequest(key, placed[0], hashes, 16)

    @rule(name=request_ids)
    def complete_prefill(self, name: str) -> None:
        refused = self.refused(lambda: self.selector.reservations.prefill_complete(name, self.now))
        assert refused is (name not in self.requests)
        if not refused:
            self.requests[name].prefill = 0

    @rule(name=request_ids)
    def grow(self, name: str) -> None:
        refused = self.refused(
            lambda: self.selector.reservations.output_block(name, None, self.now)
        )
        assert refused is (name not in self.requests)
        if not refused:
            self.requests[name].output_blocks += 1

    @rule(name=request_ids)
    def free(self, name: str) -> None:
        refused = self.refused(lambda: self.selector.reservations.free(name, self.now))
        assert refused is (name not in self.requests)
        self.requests.pop(name, None)

    @rule()
    def free_everything(self) -> None:
        for name in list(self.requests):
            self.selector.reservations.free(name, self.now)
        self.requests.clear()

    @rule()
    def expire_everything(self) -> None:
        self.now += 301.0
        gone = self.selector.reservations.expire(self.now, 1000)
        assert {reservation.request_id for _, reservation in gone} == set(self.requests)
        self.requests.clear()


TestSelectorModel = SelectorMachine.TestCase
TestSelectorModel.settings = settings(max_examples=60, stateful_step_count=40)
