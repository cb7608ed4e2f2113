"""Workers that a file lists. It is looked at again and again, and read when it has changed."""

import asyncio
import os
from collections.abc import Callable
from typing import Final

from lean_selector.discovery.listed_workers import listed_workers
from lean_selector.discovery.particulars import Found
from lean_selector.discovery.sighting import Sighting
from lean_selector.outbound.watched_file import WatchedFile

MOST_BYTES: Final = 16 << 20


class FileFinder:
    """Names ending in .json are JSON, all others YAML. Replace the file in one step (rename): one
    that is half written is a failure, or half a fleet."""

    def __init__(
        self, sighting: Sighting, path: str, interval_s: float, on_found: Callable[[Found], None]
    ) -> None:
        self._sighting = sighting
        self._file = WatchedFile(path, MOST_BYTES)
        self._is_yaml = not path.lower().endswith(".json")
        self._interval_s = interval_s
        self._on_found = on_found

    async def run(self) -> None:
        fault: str | None = None
        while True:
            try:
                text, is_new = self._file.read()
                if is_new:
                    fault = None
                    # In a thread: thousands of workers in YAML take a second.
                    found = await asyncio.to_thread(listed_workers, text, self._is_yaml)
                    self._sighting.found(len(found.entries))
                    self._on_found(found)
                elif fault is not None:
                    self._sighting.failed(fault)
                elif self._sighting.error is not None:  # it was away, and is what it was
                    self._sighting.found(self._sighting.count or 0)
            except OSError as error:
                self._sighting.failed(os.strerror(error.errno) if error.errno else str(error))
            except ValueError as error:
                fault = str(error)
                self._sighting.failed(fault)
            except Exception:
                self._file.forget()  # what became of it is not known
                raise
            await asyncio.sleep(self._interval_s)
