"""Which peers were added and removed over HTTP, told from those of flags and discoveries."""

from collections.abc import Callable, Collection
from typing import Final, Protocol

from lean_selector.core.errors import SelectorError


class Mesh(Protocol):
    """The replica plane, as far as peers go."""

    def register_peer(self, endpoint: str) -> bool: ...

    def deregister_peer(self, endpoint: str) -> bool: ...

    def peers(self) -> list[str]: ...


class PeersByHttp:
    """What was said over HTTP holds, also against a flag."""

    def __init__(
        self, mesh: Mesh | None, given: Collection[str], found: Callable[[], Collection[str]]
    ) -> None:
        """`given` are those of the flags, `found` those that discoveries added. Without a mesh what
        was restored is kept as it is."""
        self._mesh: Final = mesh
        self._given: Final = given
        self._found: Final = found
        self._restored: tuple[list[str], list[str]] = [], []

    def changes(self) -> tuple[list[str], list[str]]:
        """Those added, and those removed, each sorted."""
        if self._mesh is None:
            return self._restored
        peers = set(self._mesh.peers())
        return sorted(peers - {*self._given, *self._found()}), sorted({*self._given} - peers)

    def restore(self, added: list[str], removed: list[str]) -> list[str]:
        """Before the mesh is started. Returns what could not be added, with the reason."""
        self._restored = added, removed
        mesh, problems = self._mesh, list[str]()
        if mesh is None:
            return problems
        for endpoint in added:
            try:
                mesh.register_peer(endpoint)
            except SelectorError as error:
                problems.append(f"peer {endpoint}: {error.message}")
        for endpoint in removed:
            if endpoint in self._given:
                mesh.deregister_peer(endpoint)
        return problems
