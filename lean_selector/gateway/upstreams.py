"""The workers as upstreams: their list, their rotation, and leases.

The gateway ejects workers by the same rules as the selector (`core.health`): after several
consecutive failures, a worker is skipped for a while. Workers that the selector has ejected are
skipped too."""

import contextlib
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from lean_selector.core.health.ejections import Ejections
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.settings import EjectionSettings
from lean_selector.http.client import Upstream
from lean_selector.http.urls import Url, url_at


class WorkerLease:
    """The use of a worker by one request, from the choice to the end. A lease ends exactly once.

    This class reserves nothing. The subclass `Reservation` (`placing.py`) has a reservation."""

    def __init__(
        self,
        endpoint: Upstream,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        overlap_tokens: int | None = None,
    ) -> None:
        """If the selector did not choose the worker, all parameters except `endpoint` are None. If
        the worker has only one rank, `dp_rank` is None."""
        self.endpoint = endpoint
        endpoint.users += 1
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.overlap_tokens = overlap_tokens
        self.misses_blocks = False  # the index lacks blocks that the worker has cached
        self.body: bytes | None = None  # replaces the request's body, for this worker only
        self.is_over = False

    def prefill_complete(self, ttft_s: float | None = None) -> None:
        """Records that the worker's answer began. `ttft_s`: the time to first token, if known."""
        if not self.is_over:
            self._begun(ttft_s)

    def touch(self) -> None:
        """Renews the reservation, if there is one, so that the reservation does not expire."""
        if not self.is_over:
            self._touched()

    def end(self, outcome: str | None, cached_tokens: int | None = None) -> None:
        """Ends the lease; further calls do nothing. `outcome` is `ok`, `failed` or `refused`, or
        None if the request does not show whether the worker is healthy."""
        if not self.is_over:
            self.is_over = True
            self.endpoint.users -= 1
            self._freed(outcome, cached_tokens)

    def _begun(self, ttft_s: float | None) -> None:
        pass

    def _touched(self) -> None:
        pass

    def _freed(self, outcome: str | None, cached_tokens: int | None) -> None:
        pass


class Rotation:
    """The workers for round-robin, which is used if the selector chooses no worker."""

    def __init__(self, settings: EjectionSettings, now: float) -> None:
        self._health: Final = Ejections(settings)
        self._now = now
        self._made = 0
        self._turn = 0
        self.endpoints: dict[str, Upstream] = {}  # by origin
        self._by_text: dict[str, Upstream] = {}  # by URL as registered
        self.in_turn: list[Upstream] = []
        self.ejected: frozenset[str] = frozenset()  # origins that the selector ejected
        # Origins of draining workers, which get no new requests
        self.draining: frozenset[str] = frozenset()

    def endpoint(self, text: str) -> Upstream:
        """Returns the worker at this URL, even if it is not in the rotation. Raises ValueError."""
        known = self._by_text.get(text)
        if known is None:
            origin = base_of(text)
            known = self.endpoints.get(origin)
            if known is None:
                self._made += 1
                known = self.endpoints[origin] = Upstream(origin, self._made, self._now)
            self._by_text[text] = known
        return known

    def set(self, urls: Iterable[str]) -> None:
        """Sets the workers for round-robin. A removed worker finishes its current requests."""
        self.in_turn = [self.endpoint(url) for url in dict.fromkeys(map(base_of, urls))]
        self._by_text.clear()  # refilled on use
        keys = {(each.number, 0) for each in self.in_turn}
        gone = [key for key in self._health.ranks if key not in keys]
        self._health.forget(gone)
        for text, each in list(self.endpoints.items()):
            if each not in self.in_turn and not each.is_used:
                del self.endpoints[text]

    def next(self, avoided: Collection[str], among: Collection[str] | None) -> Upstream | None:
        """Returns the next worker in `among` (None: any) that is not in `avoided` and not draining.
        Returns an ejected worker only if no other is left. Returns None if no worker is left."""
        candidates = [
            each
            for each in self.in_turn
            if each.text not in avoided
            and each.text not in self.draining
            and (among is None or each.text in among)
        ]
        candidates = list(filter(self.is_well, candidates)) or candidates
        if not candidates:
            return None
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def is_well(self, endpoint: Upstream) -> bool:
        return (endpoint.number, 0) not in self._health.out and endpoint.text not in self.ejected

    def report(self, endpoint: Upstream, outcome: str, now: float) -> None:
        if endpoint in self.in_turn:
            self._health.report([(endpoint.number, 0)], outcome, len(self.in_turn), now)

    def sweep(self, now: float, silence_s: float) -> None:
        """Ends ejections that are over; closes connections that are idle or silent for too long."""
        self._now = now
        self._health.settle(now)
        for endpoint in list(self.endpoints.values()):
            endpoint.sweep(now, silence_s)

    def close(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.close()


def base_of(text: str) -> str:
    """Returns the canonical form of a worker's URL, which ends with the port. Raises ValueError."""
    return Url(url_at(text, "") or text).origin


class Directory:
    """Puts the registered workers and `named`, the command line's URLs, into the rotation."""

    def __init__(self, named: Sequence[str], rotation: Rotation, catalog: Catalog) -> None:
        self._named = [base_of(url) for url in named]
        self._rotation = rotation
        self._catalog = catalog
        self._models: dict[str, set[str]] = {}  # by base URL
        self._ids: dict[str, set[int]] = {}
        self._ready: set[str] = set()  # base URLs of schedulable workers
        self._revision = -1
        rotation.set(self._named)

    def look(self) -> None:
        """Updates the rotation (workers for round-robin) if registered workers have changed."""
        if self._revision == self._catalog.revision:
            return
        self._revision = self._catalog.revision
        models: dict[str, set[str]] = {}
        ids: dict[str, set[int]] = {}
        ready: set[str] = set()
        working: set[str] = set()
        for worker in self._catalog.workers.values():
            try:
                base = base_of(worker.spec.endpoint or "")
            except ValueError:
                continue  # without a URL of its own
            models.setdefault(base, set()).add(worker.spec.model_name)
            ids.setdefault(base, set()).add(worker.spec.worker_id)
            if not worker.reasons:
                ready.add(base)
            if not worker.is_draining:
                working.add(base)
        self._models, self._ids, self._ready = models, ids, ready
        self._rotation.set([*self._named, *models])
        self._rotation.draining = frozenset(ids.keys() - working)

    def pass_over(self, ejected: Iterable[str]) -> None:
        """Sets which workers round-robin skips, because the selector has ejected them."""
        found = set()
        for endpoint in ejected:
            with contextlib.suppress(ValueError):
                found.add(base_of(endpoint))
        self._rotation.ejected = frozenset(found)

    @property
    def is_complete(self) -> bool:
        """Whether the command line names workers, and all of these are registered and schedulable.
        If so, all models are known. The gateway can then answer that a model does not exist."""
        return bool(self._named) and all(url in self._ready for url in self._named)

    def may_serve(self, model: str | None) -> list[str] | None:
        """Returns the base URLs of the workers that serve the model. If there are none, returns the
        command line's URLs whose models are unknown. None means that any worker may be tried."""
        if model is None or not self._models:
            return None
        serving = [base for base, models in self._models.items() if model in models]
        return serving or [url for url in self._named if url not in self._models] or None

    def ids_of(self, bases: Iterable[str]) -> set[int]:
        """Returns the ids of the workers at these base URLs."""
        return {each for base in bases for each in self._ids.get(base, ())}

    def bases_of(self, worker_ids: Iterable[int]) -> list[str]:
        """Returns the base URLs of these workers."""
        wanted = set(worker_ids)
        return [base for base, ids in self._ids.items() if ids & wanted]
