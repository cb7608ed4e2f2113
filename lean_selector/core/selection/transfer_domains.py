"""Between which workers KV blocks can be transferred, and between which they better are.

A worker may name a key of `topology_domains` (such as `rack`) as its `kv_transfer_domain`. It then
forms pairs only with workers that have its value of this key (`required`), or such pairs cost less
(`preferred`, with a weight like that of a preferred taint). Workers for which all this is equal
form a class. Imported only if a worker names a domain."""

from collections.abc import Mapping

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.schedulable_worker import SchedulableWorker

# The domain that a worker names, whether it is required, its weight; and the worker's value of each
# named domain.
_Class = tuple[tuple[str, bool, float] | None, tuple[str | None, ...]]


class TransferDomains:
    """The classes of a partition's workers. Computed anew when needed after a change."""

    def __init__(self, workers: Mapping[int, SchedulableWorker], tainted: dict[str, int]) -> None:
        """`tainted` has the ranks of each taint; names that no taint has are added to it."""
        self._workers = workers
        self._tainted = tainted
        self._names: list[str] = []  # added to `tainted`
        self._is_stale = True
        self._partners: list[tuple[int, int]] = []
        self._preferred: list[tuple[int, dict[str, float]]] = []

    def changed(self) -> None:
        self._is_stale = True

    def partners(self) -> list[tuple[int, int]]:
        """Return pairs: the ranks of a class, and all ranks with which they may form pairs."""
        if self._is_stale:
            self._classify()
        return self._partners

    def partners_of(self, load: RankLoad) -> int:
        return next((others for ranks, others in self.partners() if ranks & load.mask), 0)

    def preferred(self, load: RankLoad) -> dict[str, float]:
        """Return names in `tainted` of the ranks that had better be the other one, with weights."""
        self.partners()
        return next((names for ranks, names in self._preferred if ranks & load.mask), {})

    def _classify(self) -> None:
        self._is_stale = False
        for name in self._names:
            del self._tainted[name]
        workers = self._workers.values()
        named = sorted({each.transfer[0] for each in workers if each.transfer is not None})
        classes: dict[_Class, int] = {}
        for each in workers:
            own = each.transfer, tuple([each.domains.get(domain) for domain in named])
            classes[own] = classes.get(own, 0) | each.mask
        self._partners, self._preferred, self._names = [], [], []
        for own, ranks in classes.items():
            others, liked = 0, dict[float, int]()
            for other, its_ranks in classes.items():
                fits, weight = _judged(own, other, named)
                if fits:
                    others |= its_ranks
                if weight:
                    liked[weight] = liked.get(weight, 0) | its_ranks
            names = dict[str, float]()
            for weight, its_ranks in liked.items():
                name = f"\0{len(self._names)}"
                names[name], self._tainted[name] = weight, its_ranks
                self._names.append(name)
            self._partners.append((ranks, others))
            self._preferred.append((ranks, names))


def _judged(one: _Class, other: _Class, named: list[str]) -> tuple[bool, float]:
    """Return whether workers of these classes may form pairs, and the weight of doing so."""
    fits, weight = True, 0.0
    for transfer in {one[0], other[0]}:
        if transfer is None:
            continue
        domain, is_required, preference = transfer
        at = named.index(domain)
        value = one[1][at]
        is_same = value is not None and value == other[1][at]
        if is_required:
            fits = fits and is_same
        elif is_same:
            weight += preference
    return fits, weight
