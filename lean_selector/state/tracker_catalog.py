"""The catalog of a slot tracker as the file `catalog`, and back: its workers, and its peers."""

from typing import Final

import msgspec

from lean_selector.core.errors import SelectorError
from lean_selector.core.tracker_rows import WorkerRow
from lean_selector.core.trackers import Trackers
from lean_selector.state.catalog_text import catalog_text, read_rows
from lean_selector.state.peers import PeersByHttp
from lean_selector.state.shapes import CatalogFile

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(WorkerRow).decode


class TrackerCatalog:
    """What is written of a slot tracker."""

    service: Final = "slot_tracker"

    def __init__(self, trackers: Trackers, peers: PeersByHttp) -> None:
        self._trackers = trackers
        self._peers = peers

    @property
    def revision(self) -> int:
        """Grows with each change of a worker."""
        return self._trackers.revision

    def text(self) -> bytes:
        """The file as it should be now."""
        added, removed = self._peers.changes()
        head = CatalogFile(
            version=1, service=self.service, peers_added=added, peers_removed=removed
        )
        return catalog_text(head, [_encode(row) for row in self._trackers.workers()])

    def restore(self, file: CatalogFile, now: float) -> list[str]:
        """Puts it back into trackers that have just been made. Returns what did not fit."""
        problems = self._peers.restore(file.peers_added, file.peers_removed)
        for row in read_rows(file.workers, _decode, problems):
            try:
                self._trackers.register(row)
            except SelectorError as error:
                problems.append(f"worker {row.worker_id}: {error.message}")
        return problems
