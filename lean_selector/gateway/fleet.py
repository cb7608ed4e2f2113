"""The registered workers as the gateway sees them: by model, by id and by base URL."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.shapes import PREFILL
from lean_selector.gateway.prompt_shapes import Served
from lean_selector.http.urls import endpoint_url

_NAMED: Final = 8  # models or URLs listed in a message


def base_of(endpoint: str) -> str:
    """Return the base URL of a worker's endpoint, `http(s)://host:port`, the same for each
    spelling. Raises ValueError."""
    return endpoint_url(endpoint).origin


def _base(endpoint: str | None) -> str | None:
    try:
        return base_of(endpoint or "")
    except ValueError:
        return None  # the worker has no URL of its own


class GatewayFleet:
    """The workers in the catalog of a selector in this process, and those on the command line."""

    def __init__(
        self, catalog: Catalog, named: Sequence[str] = (), prefill: Sequence[str] = ()
    ) -> None:
        """`named`: the endpoints on the command line, of which those in `prefill` only prefill."""
        self._catalog: Final = catalog
        self._named = [base_of(each) for each in named]
        self._prefill = frozenset(map(base_of, prefill))
        self._revision = -1
        self._served: dict[tuple[str, str], Served] = {}  # by model and tenant
        self._models: dict[str, set[str]] = {}  # by base URL
        self._ids: dict[str, set[int]] = {}
        self._ready: set[str] = set()  # base URLs of schedulable workers
        self._working: set[str] = set()  # and of those that take requests of any kind

    @property
    def revision(self) -> int:
        """Changes when a worker does."""
        return self._catalog.revision

    # -- by model ----------------------------------------------------------------------------------

    def model(self, model_name: str, tenant_id: str) -> Served | None:
        self._update()
        return self._served.get((model_name, tenant_id))

    def models(self, tenant_id: str) -> list[str]:
        """Return the names of this tenant's models, sorted."""
        self._update()
        return sorted(name for name, tenant in self._served if tenant == tenant_id)

    def known_text(self) -> str:
        """Return the models that are known, and the URLs whose models are not, as a sentence."""
        self._update()
        models = sorted({f"`{name}`" for name, _ in self._served})
        silent = [base for base in self._named if base not in self._models]
        text = f"Known models: {_some(models) or 'none'}."
        return f"{text} Not answered yet: {_some(silent)}." if silent else text

    # -- by base URL -------------------------------------------------------------------------------

    def bases(self) -> list[str]:
        self._update()
        return list(dict.fromkeys((*self._named, *self._models)))

    def barred(self) -> frozenset[str]:
        """Return the base URLs at which all workers are draining, or only prefill."""
        self._update()
        known = self._models.keys()
        # A frozenset minus a dict's keys is a set, which the compiled form would refuse.
        return self._prefill.difference(known) | (known - self._working)

    def ejected(self) -> frozenset[str]:
        """Return the base URLs of the workers that were ejected because of failures."""
        return frozenset(
            [
                base
                for partition in self._catalog.partitions.values()
                for worker_id in {key[0] for key in partition.health.out}
                if (worker := partition.workers.get(worker_id)) is not None
                and all(load.key in partition.health.out for load in worker.loads)
                and (base := _base(worker.endpoint)) is not None
            ]
        )

    def healthy(self, workers: Mapping[int, str]) -> Mapping[int, str]:
        """Return the workers that are not ejected, or all workers if all are ejected."""
        ejected = self.ejected()
        if not ejected:
            return workers
        return {each: base for each, base in workers.items() if base not in ejected} or workers

    @property
    def is_complete(self) -> bool:
        """Whether the command line names workers, and all of these are registered and schedulable.
        If so, all models are known. The gateway can then answer that a model does not exist."""
        self._update()
        return bool(self._named) and all(base in self._ready for base in self._named)

    def may_serve(self, model: str | None) -> list[str] | None:
        """Return the base URLs of the workers that serve the model. If there are none, returns the
        command line's URLs whose models are unknown. None means that any worker may be tried."""
        self._update()
        if model is None or not self._models:
            return None
        serving = [base for base, models in self._models.items() if model in models]
        return serving or [base for base in self._named if base not in self._models] or None

    def ids_of(self, bases: Iterable[str]) -> frozenset[int]:
        """Return the ids of the workers at these base URLs."""
        self._update()
        return frozenset([each for base in bases for each in self._ids.get(base, ())])

    def bases_of(self, worker_ids: Iterable[int]) -> list[str]:
        """Return the base URLs of these workers."""
        self._update()
        wanted = set(worker_ids)
        return [base for base, ids in self._ids.items() if ids & wanted]

    def _update(self) -> None:
        """Reads the catalog again, if a worker has changed."""
        if self._revision == self._catalog.revision:
            return
        self._revision = self._catalog.revision
        self._served = {
            key: _served(partition)
            for key, partition in self._catalog.partitions.items()
            if partition.workers
        }
        self._models, self._ids, self._ready, self._working = {}, {}, set(), set()
        for worker in self._catalog.workers.values():
            base = _base(worker.spec.endpoint)
            if base is None:
                continue
            self._models.setdefault(base, set()).add(worker.spec.model_name)
            self._ids.setdefault(base, set()).add(worker.spec.worker_id)
            if not worker.reasons:
                self._ready.add(base)
            if not worker.is_draining and worker.spec.worker_role != PREFILL:
                self._working.add(base)


def _some(names: list[str]) -> str:
    """Return the first names as a list, and how many others there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _served(partition: Partition) -> Served:
    workers = partition.workers.values()
    blocks = [worker.total_kv_blocks or 0 for worker in workers]
    return Served(
        partition.model_name,
        partition.tenant_id,
        partition.block_size,
        partition.is_eagle,
        {
            worker.worker_id: base
            for worker in workers
            if (base := _base(worker.endpoint)) is not None
        },
        max(blocks) * partition.block_size if all(blocks) else 0,
    )
