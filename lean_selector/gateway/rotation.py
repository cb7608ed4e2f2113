"""The workers in turn: whom requests go to when nobody chooses, and who of them is avoided.

What the gateway itself sees of workers is judged as the selector judges reports (`core.health`):
after some failures in a row a worker is passed over for a while.
"""

from collections.abc import Collection, Iterable
from typing import Final

from lean_selector.core.health.ejections import Ejections
from lean_selector.core.settings import EjectionSettings
from lean_selector.http.client import Upstream
from lean_selector.http.endpoints import Url, url_at


class Rotation:
    """Endpoints by their base URLs; each is made once, and kept while it is known."""

    def __init__(self, settings: EjectionSettings, now: float) -> None:
        self._health: Final = Ejections(settings)
        self._now = now
        self._made = 0
        self._turn = 0
        self.endpoints: dict[str, Upstream] = {}  # by origin
        self.in_turn: list[Upstream] = []

    def endpoint(self, text: str) -> Upstream:
        """Of a base URL, also of one that is not in turn. Raises ValueError."""
        text = base_of(text)
        known = self.endpoints.get(text)
        if known is None:
            self._made += 1
            known = self.endpoints[text] = Upstream(text, self._made, self._now)
        return known

    def set(self, urls: Iterable[str]) -> None:
        """Whose turn it may be from now on. Whoever was there and is no more keeps what is under
        way."""
        self.in_turn = [self.endpoint(url) for url in dict.fromkeys(map(base_of, urls))]
        keys = {(each.number, 0) for each in self.in_turn}
        gone = [key for key in self._health.ranks if key not in keys]
        self._health.forget(gone)
        for text, each in list(self.endpoints.items()):
            if each not in self.in_turn and not each.is_used:
                del self.endpoints[text]

    def next(self, avoided: Collection[str], among: Collection[str] | None) -> Upstream | None:
        """The next in turn that is not in `avoided`, and one of `among` if that is given: one that
        is well, or else any."""
        candidates = [
            each
            for each in self.in_turn
            if each.text not in avoided and (among is None or each.text in among)
        ]
        well = [each for each in candidates if (each.number, 0) not in self._health.out]
        candidates = well or candidates
        if not candidates:
            return None
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def is_well(self, endpoint: Upstream) -> bool:
        return (endpoint.number, 0) not in self._health.out

    def report(self, endpoint: Upstream, outcome: str, now: float) -> None:
        if endpoint in self.in_turn:
            self._health.report([(endpoint.number, 0)], outcome, len(self.in_turn), now)

    def sweep(self, now: float, silence_s: float) -> None:
        """About every second."""
        self._now = now
        self._health.settle(now)
        for endpoint in list(self.endpoints.values()):
            endpoint.sweep(now, silence_s)

    def close(self) -> None:
        for endpoint in self.endpoints.values():
            endpoint.close()


def base_of(text: str) -> str:
    """One spelling of each worker's URL, which ends at its port. Raises ValueError."""
    return Url(url_at(text, "") or text).origin
