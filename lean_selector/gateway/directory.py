"""Which workers there are: those named on the command line, and those of the selector's catalog."""

from collections.abc import Iterable, Sequence

from lean_selector.core.selection.catalog import Catalog
from lean_selector.gateway.rotation import Rotation, base_of


class Directory:
    """Keeps the rotation in step. `named` are the URLs of the command line."""

    def __init__(self, named: Sequence[str], rotation: Rotation, catalog: Catalog) -> None:
        self._named = [base_of(url) for url in named]
        self._rotation = rotation
        self._catalog = catalog
        self._models: dict[str, set[str]] = {}  # by base URL
        self._ids: dict[str, set[int]] = {}
        self._ready: set[str] = set()  # where a worker can be chosen
        self._revision = -1
        rotation.set(self._named)

    def look(self) -> None:
        """Reads the catalog again if it has changed."""
        if self._revision == self._catalog.revision:
            return
        self._revision = self._catalog.revision
        models: dict[str, set[str]] = {}
        ids: dict[str, set[int]] = {}
        ready: set[str] = set()
        for worker in self._catalog.workers.values():
            try:
                base = base_of(worker.spec.endpoint or "")
            except ValueError:
                continue  # without a URL of its own
            models.setdefault(base, set()).add(worker.spec.model_name)
            ids.setdefault(base, set()).add(worker.spec.worker_id)
            if not worker.reasons:
                ready.add(base)
        self._models, self._ids, self._ready = models, ids, ready
        self._rotation.set([*self._named, *models])

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
