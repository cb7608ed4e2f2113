"""Between which workers KV blocks can be transferred, and between which they better are.

A worker may name a key of `topology_domains` (such as `rack`) as its `kv_transfer_domain`. It then
forms pairs only with workers that have its value of this key (`required`), or such pairs cost less
(`preferred`, with a weight like that of a preferred taint). Workers for which all this is equal
form a class. Imported only if a worker names a domain."""

from collections.abc import Mapping
from typing import NamedTuple

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.schedulable_worker import SchedulableWorker

# The domain that a worker names, whether it is required, its weight; and the worker's value of each
# named domain.
_Class = tuple[tuple[str, bool, float] | None, tuple[str | None, ...]]


class TransferClass(NamedTuple):
    ranks: int
    partners: int  # with which they may form pairs
    liked: tuple[tuple[float, int], ...]  # of these: (weight, ranks)


class TransferDomains:
    """The classes of a partition's workers. Computed anew when needed after a change."""

    def __init__(self, workers: Mapping[int, SchedulableWorker]) -> None:
        self._workers = workers
        self._classes: list[TransferClass] = []  # empty until computed

    def changed(self) -> None:
        self._classes = []

    def classes(self) -> list[TransferClass]:
        if not self._classes:
            self._classes = self._classify()
        return self._classes

    def of(self, load: RankLoad) -> TransferClass:
        """Return the class of a rank of a worker."""
        return next(each for each in self.classes() if each.ranks & load.mask)

    def _classify(self) -> list[TransferClass]:
        workers = self._workers.values()
        named = sorted({each.transfer[0] for each in workers if each.transfer is not None})
        alike: dict[_Class, int] = {}
        for each in workers:
            own = each.transfer, tuple([each.domains.get(domain) for domain in named])
            alike[own] = alike.get(own, 0) | each.mask
        classes = []
        for own, ranks in alike.items():
            partners, liked = 0, list[tuple[float, int]]()
            for other, its_ranks in alike.items():
                fits, weight = _judged(own, other, named)
                if fits:
                    partners |= its_ranks
                if weight:
                    liked.append((weight, its_ranks))
            classes.append(TransferClass(ranks, partners, tuple(liked)))
        return classes


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
