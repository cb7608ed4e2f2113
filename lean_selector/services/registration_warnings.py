"""What is probably wrong with a worker's endpoints, as far as its registration shows.

The answer is as it would be anyway; this goes into its header `x-warning`. What only the network
can tell (nobody listens, it speaks HTTP) is in `GET /kv_sources` later.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Final, Protocol

from lean_selector.core.endpoints import check_endpoint, http_place, zmq_key
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.catalog import Worker
from lean_selector.core.selection.workers import WorkerSpec

_LISTENING: Final = ("*", "0.0.0.0", "[::]")  # where a socket binds, not where it is reached
_NAMED: Final = 4  # endpoints, and who shares one; a worker may have 4 096


class Places(Protocol):
    """The workers, the one in question included, by their HTTP endpoints."""

    def at_address(self, address: str) -> Collection[int]: ...

    def sharing(self, spec: WorkerSpec) -> Iterator[int]: ...


class Sources(Protocol):
    """The ranks, those of the worker in question included, by the `zmq_key` of their endpoints."""

    def listeners(self, key: str) -> Sequence[RankKey]: ...

    def askers(self, key: str) -> Sequence[RankKey]: ...


def registration_warnings(
    worker: Worker, places: Places, sources: Sources, *, listens: bool = True
) -> list[str]:
    """One line for each, in the order of the ranks; few.

    Without `listens` nobody listens to the workers, and only their own endpoint is judged.
    """
    judgement = _Judgement(worker, places, sources)
    warnings = list(judgement.of_http())
    room = len(warnings) + _NAMED
    for warning in judgement.of_sources() if listens else ():
        if len(warnings) == room:
            warnings.append("and more of its endpoints")
            break
        warnings.append(warning)
    return warnings


class _Judgement:
    """Of one worker's endpoints, by themselves and beside those of all others."""

    def __init__(self, worker: Worker, places: Places, sources: Sources) -> None:
        self._worker = worker
        self._spec = spec = worker.spec
        self._places = places
        self._sources = sources
        place = http_place(spec.endpoint) if spec.endpoint else None
        self._served = None if place is None else f"tcp://{place.address}"
        self._events = {zmq_key(endpoint) for _, endpoint, _ in _events_of(spec)}

    def of_http(self) -> Iterator[str]:
        endpoint = self._spec.endpoint
        if not endpoint:
            return
        if "://" not in endpoint:
            yield f"endpoint {endpoint} has no scheme: http://{endpoint} is probably meant"
        sharing = list(islice(self._places.sharing(self._spec), _NAMED + 1))
        if sharing:
            yield f"endpoint {endpoint} is also that of {_workers(sharing)}"
        if self._served is not None:
            taken = self._heard_there(self._served) or self._asked_there(self._served)
            if taken is not None:
                yield f"endpoint {endpoint} {taken}"

    def of_sources(self) -> Iterator[str]:
        for field, endpoint, dp_rank in _events_of(self._spec):
            fault = _fault(endpoint) or self._of_events(zmq_key(endpoint), dp_rank)
            if fault is not None:
                yield f"{field} {endpoint} {fault}"
        for field, endpoint in _replays_of(self._worker):
            fault = _fault(endpoint) or self._of_replay(zmq_key(endpoint))
            if fault is not None:
                yield f"{field} {endpoint} {fault}"

    def _of_events(self, key: str, dp_rank: int) -> str | None:
        own = self._spec.worker_id, dp_rank
        others = [rank for rank in self._sources.listeners(key) if rank != own]
        if others:
            return f"is also that of {_ranks(others)}"
        return self._asked_there(key) or self._served_there(key)

    def _of_replay(self, key: str) -> str | None:
        """Ranks of one worker may ask at one endpoint: its engine may answer for all of them."""
        if key in self._events and key != self._served:
            return "is where the worker's events are expected"
        others = self._of_others(self._sources.askers(key))
        if others:
            return f"is also that of {_ranks(others)}"
        return self._heard_there(key) or self._served_there(key)

    def _heard_there(self, key: str) -> str | None:
        others = self._of_others(self._sources.listeners(key))
        return f"is the kv_events endpoint of {_ranks(others)}" if others else None

    def _asked_there(self, key: str) -> str | None:
        others = self._of_others(self._sources.askers(key))
        return f"is the replay endpoint of {_ranks(others)}" if others else None

    def _served_there(self, key: str) -> str | None:
        if key == self._served:
            return "is the address of the worker's HTTP endpoint"
        there = self._places.at_address(key.removeprefix("tcp://"))
        others = list(islice(there, _NAMED + 1))
        return f"is the address of the HTTP endpoint of {_workers(others)}" if others else None

    def _of_others(self, ranks: Sequence[RankKey]) -> list[RankKey]:
        return [rank for rank in ranks if rank[0] != self._spec.worker_id]


def _events_of(spec: WorkerSpec) -> list[tuple[str, str, int]]:
    """(field, endpoint, rank): those that are connected to, whatever is wrong with them."""
    if not spec.kv_events_endpoints and spec.kv_events_endpoint is not None:
        return [("kv_events_endpoint", spec.kv_events_endpoint, spec.ranks.start)]
    return [
        (f"kv_events_endpoints[{rank}]", endpoint, rank)
        for rank, endpoint in sorted(spec.kv_events_endpoints.items())
    ]


def _replays_of(worker: Worker) -> Iterator[tuple[str, str]]:
    """(field, endpoint): also those of further ranks, which follow from the first one's."""
    spec = worker.spec
    if spec.replay_endpoint is not None:
        yield "replay_endpoint", spec.replay_endpoint
        if _fault(spec.replay_endpoint) is None:
            for rank, source in worker.sources.items():
                derived = source.replay_endpoint
                if derived is None or derived == spec.replay_endpoint:
                    continue
                if rank not in spec.replay_endpoints:
                    yield f"replay_endpoint of dp_rank {rank}", derived
    for rank, endpoint in sorted(spec.replay_endpoints.items()):
        yield f"replay_endpoints[{rank}]", endpoint


def _fault(endpoint: str) -> str | None:
    try:
        check_endpoint(endpoint)
    except ValueError:
        if "://" in endpoint:
            return "is no ZMQ endpoint (tcp://host:port)"
        return f"has no scheme: tcp://{endpoint} is probably meant"
    scheme, _, address = endpoint.partition("://")
    if scheme == "inproc":
        return "reaches nobody outside of the engine's process"
    if scheme == "tcp" and address.rpartition(":")[0] in _LISTENING:
        return "is where an engine listens, not where it is reached: name its host"
    return None


def _ranks(ranks: Sequence[RankKey]) -> str:
    named = [f"worker {worker_id} dp_rank {dp_rank}" for worker_id, dp_rank in ranks[:_NAMED]]
    more = len(ranks) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _workers(ids: Sequence[int]) -> str:
    named = ", ".join(f"worker {worker_id}" for worker_id in ids[:_NAMED])
    return named + (" and more" if len(ids) > _NAMED else "")
