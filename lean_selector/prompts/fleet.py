"""Which models there are, who serves them, and what a request is told that names another."""

from collections.abc import Sequence
from typing import Protocol

from lean_selector.core.errors import NotFound
from lean_selector.core.selection.catalog import Catalog
from lean_selector.http.endpoints import url_at
from lean_selector.prompts.served import Served


class Fleet(Protocol):
    """What a door knows of its workers; only those that can be chosen count."""

    def model(self, model_name: str, tenant_id: str) -> Served | None: ...

    def models(self, tenant_id: str) -> Sequence[str]:
        """Names of all that `model` knows of this tenant, sorted."""
        ...


class UnknownModel(NotFound):
    """Nobody serves it, neither as a model nor as an adapter of one."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist.")
        self.model = model


class CatalogFleet:
    """The workers of a selector in this process."""

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
            )
            for key, partition in self._catalog.partitions.items()
            if partition.workers
        }
