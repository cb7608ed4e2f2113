"""Requests that met no schedulable worker, counted and told why."""

from typing import Final

from lean_selector.core.errors import NoWorkers
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.workers import PartitionKey
from lean_selector.core.settings import Dialect

_NAMED: Final = 4  # tenants of a model, which may have thousands


class Refusals:
    """Of one selector. A model is known once it had a worker."""

    __slots__ = ("_catalog", "_dialect", "known", "misplaced", "unknown", "unnamed")

    def __init__(self, catalog: Catalog, dialect: Dialect) -> None:
        self._catalog = catalog
        self._dialect = dialect
        self.known: dict[PartitionKey, int] = {}  # by the model and tenant
        # By the model, for a tenant that never had one while others of the model have some.
        self.misplaced: dict[str, int] = {}
        self.unknown = 0  # for models that nobody knows, while somebody had a worker
        self.unnamed = 0  # and while nobody had one

    def refused(self, key: PartitionKey) -> NoWorkers:
        """Counts one, and says what was wrong in the documented words."""
        is_known, served = key in self._catalog.known, self._catalog.served_models()
        other_tenants = self._other_tenants(key[0]) if key[0] in served else None
        if is_known:
            self.known[key] = self.known.get(key, 0) + 1
        elif other_tenants is not None:
            self.misplaced[key[0]] = self.misplaced.get(key[0], 0) + 1
        elif served:
            self.unknown += 1
        else:
            self.unnamed += 1
        if served:
            message = f"no schedulable workers for {self._dialect.scope(*key)}"
        else:
            message = "no schedulable workers are available"
        return NoWorkers(message, is_known or not served, served, other_tenants)

    def _other_tenants(self, model: str) -> str:
        """Those that the model has workers of."""
        tenants = self._catalog.served_tenants(model)
        named, more = ", ".join(tenants[:_NAMED]), len(tenants) - _NAMED
        word = self._dialect.group_word
        others = f"{named} and {more} more" if more > 0 else named
        return f"model {model} has workers of another {word}: {others}"
