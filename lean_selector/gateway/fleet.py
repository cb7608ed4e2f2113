"""The served models and their workers, for the code that reads prompts."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.partition import Partition
from lean_selector.gateway.prompt_shapes import Served
from lean_selector.http.urls import url_at


class Fleet(Protocol):
    """The served models, each with its workers."""

    def model(self, model_name: str, tenant_id: str) -> Served | None: ...

    def models(self, tenant_id: str) -> Sequence[str]:
        """Returns the names of this tenant's models, sorted."""
        ...

    def ejected(self) -> Collection[str]:
        """Returns the base URLs of the workers that were ejected because of failures."""
        ...


class CatalogFleet:
    """The served models of a selector in this process."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: dict[tuple[str, str], Served] = {}
        self._revision = -1

    def model(self, model_name: str, tenant_id: str) -> Served | None:
        self._look()
        return self._known.get((model_name, tenant_id))

    def models(self, tenant_id: str) -> list[str]:
        self._look()
        return sorted(name for name, tenant in self._known if tenant == tenant_id)

    def ejected(self) -> set[str]:
        return {
            base
            for partition in self._catalog.partitions.values()
            for worker_id in {key[0] for key in partition.health.out}
            if (worker := partition.workers.get(worker_id)) is not None
            and all(load.key in partition.health.out for load in worker.loads)
            and (base := url_at(worker.endpoint, ""))
        }

    def _look(self) -> None:
        if self._revision == self._catalog.revision:
            return
        self._revision = self._catalog.revision
        self._known = {
            key: Served(
                partition.model_name,
                partition.tenant_id,
                partition.block_size,
                partition.is_eagle,
                {
                    worker.worker_id: base
                    for worker in partition.workers.values()
                    if (base := url_at(worker.endpoint, ""))
                },
                _most_tokens(partition),
            )
            for key, partition in self._catalog.partitions.items()
            if partition.workers
        }


def _most_tokens(partition: Partition) -> int:
    blocks = [worker.total_kv_blocks or 0 for worker in partition.workers.values()]
    return max(blocks) * partition.block_size if all(blocks) else 0


def well(workers: Mapping[int, str], fleet: Fleet) -> Mapping[int, str]:
    """Returns the workers that are not ejected, or all workers if all are ejected."""
    ejected = fleet.ejected()
    if not ejected:
        return workers
    return {each: base for each, base in workers.items() if base not in ejected} or workers
