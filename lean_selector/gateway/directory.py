"""Which workers there are, as far as anybody has told: those that were named, and the selector's.

What is known stays known while the selector is away.
"""

from collections.abc import Callable, Iterable, Sequence

from lean_selector.gateway.rotation import Rotation, base_of


class Row:
    """A worker that the selector has; perhaps it lacks something to be chosen, or is drained."""

    __slots__ = ("can_be_chosen", "endpoint", "model_name", "worker_id")

    def __init__(
        self, worker_id: int, model_name: str, endpoint: str, *, can_be_chosen: bool = True
    ) -> None:
        self.can_be_chosen = can_be_chosen
        self.worker_id = worker_id
        self.model_name = model_name
        self.endpoint = endpoint


class Directory:
    """Keeps the rotation in step. `named` are the URLs of the command line."""

    def __init__(self, named: Sequence[str], rotation: Rotation) -> None:
        self._named = [base_of(url) for url in named]
        self._rotation = rotation
        self._models: dict[str, set[str]] = {}  # by base URL
        self._ids: dict[str, set[int]] = {}
        self._ready: set[str] = set()  # where somebody can be chosen
        self._revision = -1
        self.take(())

    def take(self, rows: Iterable[Row]) -> None:
        """All that the selector has now."""
        models: dict[str, set[str]] = {}
        ids: dict[str, set[int]] = {}
        ready: set[str] = set()
        for row in rows:
            try:
                base = base_of(row.endpoint)
            except ValueError:
                continue  # nothing that we could ask
            models.setdefault(base, set()).add(row.model_name)
            ids.setdefault(base, set()).add(row.worker_id)
            if row.can_be_chosen:
                ready.add(base)
        self._models, self._ids, self._ready = models, ids, ready
        self._rotation.set([*self._named, *models])

    def look(self, revision: int, rows: Callable[[], Iterable[Row]]) -> None:
        """`take`, if the revision is another than before."""
        if revision != self._revision:
            self._revision = revision
            self.take(rows())

    @property
    def is_complete(self) -> bool:
        """Every worker that was named can be chosen: a model that nobody serves is not there.
        Never where none was named, because more may be found."""
        return bool(self._named) and all(url in self._ready for url in self._named)

    def may_serve(self, model: str | None) -> list[str] | None:
        """Base URLs of whoever may serve a model: those that do, else those of whom nothing is
        known, else None: anybody."""
        if model is None or not self._models:
            return None
        serving = [base for base, models in self._models.items() if model in models]
        return serving or [url for url in self._named if url not in self._models] or None

    def ids_of(self, bases: Iterable[str]) -> set[int]:
        """The workers at these base URLs."""
        return {each for base in bases for each in self._ids.get(base, ())}

    def bases_of(self, worker_ids: Iterable[int]) -> list[str]:
        """Where these workers are."""
        wanted = set(worker_ids)
        return [base for base, ids in self._ids.items() if ids & wanted]
