"""The workers as upstreams: their rotation, and what uses them.

The gateway ejects workers by the same rules as the selector (`core.health`): after several
consecutive failures, a worker is skipped for a while. Workers that the selector has ejected are
skipped too."""

from collections.abc import Collection, Iterable
from typing import Final

from lean_selector.core.health.ejections import Ejections
from lean_selector.core.settings import EjectionSettings
from lean_selector.gateway.fleet import GatewayFleet, base_of
from lean_selector.http.client import Upstream


class WorkerUse:
    """The use of a worker by one request, from the choice to the end. A use ends exactly once.

    This class reserves nothing. The subclass `Reservation` (`placing.py`) has a reservation."""

    # Of the decode worker of a pair: the use of the prefill worker, which this use ends, too.
    leg: "WorkerUse | None" = None
    pair_reason: str = ""  # whether a pair serves the request, and why; empty if nobody asked

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
            if self.leg is not None:
                self.leg.touch()

    def end(self, outcome: str | None, cached_tokens: int | None = None) -> None:
        """Ends the use; further calls do nothing. `outcome` is `ok`, `failed` or `refused`, or
        None if the request does not show whether the worker is healthy."""
        if not self.is_over:
            if self.leg is not None:
                self.leg.end(None)
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
        self._revision = -1  # of the fleet
        self._made = 0
        self._turn = 0
        self.endpoints: dict[str, Upstream] = {}  # by origin
        self._by_text: dict[str, Upstream] = {}  # by URL as registered
        self.in_turn: list[Upstream] = []
        self.ejected: frozenset[str] = frozenset()  # origins that the selector ejected
        # Origins of workers that get no new requests: they are draining, or only prefill.
        self.barred: frozenset[str] = frozenset()

    def endpoint(self, text: str) -> Upstream:
        """Return the worker at this URL, even if it is not in the rotation. Raises ValueError."""
        known = self._by_text.get(text)
        if known is None:
            origin = base_of(text)
            known = self.endpoints.get(origin)
            if known is None:
                self._made += 1
                known = self.endpoints[origin] = Upstream(origin, self._made, self._now)
            self._by_text[text] = known
        return known

    def follow(self, fleet: GatewayFleet) -> None:
        """Takes over the workers of the fleet, if they have changed."""
        if self._revision != fleet.revision:
            self._revision = fleet.revision
            self.set(fleet.bases())
            self.barred = fleet.barred()

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
        """Return the next worker in `among` (None: any) that is not in `avoided` and not barred.
        Return an ejected worker only if no other is left. Return None if no worker is left."""
        candidates = [
            each
            for each in self.in_turn
            if each.text not in avoided
            and each.text not in self.barred
            and (among is None or each.text in among)
        ]
        candidates = list(filter(self.is_well, candidates)) or candidates
        if not candidates:
            return None
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def is_well(self, endpoint: Upstream) -> bool:
        return (endpoint.number, 0) not in self._health.out and endpoint.text not in self.ejected

    def record_outcome(self, endpoint: Upstream, outcome: str, now: float) -> None:
        if endpoint in self.in_turn:
            self._health.record_outcome([(endpoint.number, 0)], outcome, len(self.in_turn), now)

    def sweep(self, now: float, silence_s: float) -> None:
        """Ends ejections that are over; closes connections that are idle or silent for too long."""
        self._now = now
        self._health.settle(now)
        for endpoint in list(self.endpoints.values()):
            endpoint.sweep(now, silence_s)

    def close(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.close()
