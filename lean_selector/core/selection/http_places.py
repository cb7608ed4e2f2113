"""Which workers requests are sent to at which HTTP endpoint: one, where all is well."""

from collections.abc import Collection, Iterator

from lean_selector.core.endpoints import HttpPlace, http_place
from lean_selector.core.selection.workers import WorkerSpec


class HttpPlaces:
    """Kept in step with the catalog. An endpoint that is none of HTTP is nowhere."""

    def __init__(self) -> None:
        self._by_place: dict[HttpPlace, dict[int, range]] = {}  # the ranks of each worker there
        self._by_address: dict[str, dict[int, None]] = {}  # none is empty, nor of those above

    def put(self, spec: WorkerSpec) -> None:
        place = _place_of(spec)
        if place is not None:
            self._by_place.setdefault(place, {})[spec.worker_id] = spec.ranks
            self._by_address.setdefault(place.address, {})[spec.worker_id] = None

    def remove(self, spec: WorkerSpec) -> None:
        """Takes out what was put in with the same spec."""
        place = _place_of(spec)
        if place is None:
            return
        there, near = self._by_place[place], self._by_address[place.address]
        del there[spec.worker_id], near[spec.worker_id]
        if not there:
            del self._by_place[place]
        if not near:
            del self._by_address[place.address]

    def at_address(self, address: str) -> Collection[int]:
        """The workers of a host:port, whatever path they have there."""
        return self._by_address.get(address, ())

    def sharing(self, spec: WorkerSpec) -> Iterator[int]:
        """Other workers at this one's endpoint that have some of its ranks: those of one engine
        may be registered as a worker each."""
        place = _place_of(spec)
        own = spec.ranks
        for worker_id, ranks in self._by_place.get(place, {}).items() if place is not None else ():
            overlap = max(own.start, ranks.start) < min(own.stop, ranks.stop)
            if overlap and worker_id != spec.worker_id:
                yield worker_id


def _place_of(spec: WorkerSpec) -> HttpPlace | None:
    return http_place(spec.endpoint) if spec.endpoint else None
