"""Requests that met no schedulable worker, counted and told why."""

from lean_selector.core.errors import NoWorkers
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.dialect import Dialect
from lean_selector.core.selection.workers import PartitionKey


class Refusals:
    """Of one selector. A model is known once it had a worker."""

    __slots__ = ("_catalog", "_dialect", "known", "unknown", "unnamed")

    def __init__(self, catalog: Catalog, dialect: Dialect) -> None:
        self._catalog = catalog
        self._dialect = dialect
        self.known: dict[PartitionKey, int] = {}  # by the model and tenant
        self.unknown = 0  # for models that nobody knows, while somebody had a worker
        self.unnamed = 0  # and while nobody had one

    def refused(self, key: PartitionKey) -> NoWorkers:
        """Counts one, and says what was wrong in the documented words."""
        is_known, served = key in self._catalog.known, self._catalog.served_models()
        if is_known:
            self.known[key] = self.known.get(key, 0) + 1
        elif served:
            self.unknown += 1
        else:
            self.unnamed += 1
        if served:
            message = f"no schedulable workers for {self._dialect.scope(*key)}"
        else:
            message = "no schedulable workers are available"
        return NoWorkers(message, is_known or not served, served)
