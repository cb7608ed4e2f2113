"""Workers or peers behind a service of Kubernetes: its EndpointSlices, listed and then watched.

As the API asks for it: a watch goes on from the resource version of the list, or of the last event
or bookmark; one that ends is begun again from there; one that is told 410 (Gone) needs a new list.
What the list said holds while the API server cannot be asked.
"""

import asyncio
import logging
import random
import time
from typing import Final
from urllib.parse import quote

import msgspec

from lean_selector.discovery.endpoint_slices import places_of
from lean_selector.discovery.sighting import OnPlaces, Sighting
from lean_selector.discovery.slice_shapes import Slice, SliceList, Status, WatchEvent
from lean_selector.outbound.client import OutboundClient
from lean_selector.outbound.failure import OutboundFailed

log = logging.getLogger("lean_selector.discovery")

GONE: Final = 410
LIST_TIMEOUT_S: Final = 30.0
PAGE: Final = 500  # slices; each has up to a hundred endpoints, or a thousand if so configured
MOST_LIST_BYTES: Final = 64 << 20
MOST_SLICES: Final = 10_000
# The server is asked to end a watch after this time. Bookmarks come every minute; who is silent for
# longer than all of it is gone, whatever the connection says.
WATCH_S: Final = 240
SILENCE_S: Final = 300.0
AGAIN_FIRST_S: Final = 0.2
AGAIN_LIMIT_S: Final = 30.0


class WatchGone(Exception):
    """The server has forgotten what came after our resource version: list again."""


class KubernetesFinder:
    """Follows one service. `client` brings the service account's token and authority."""

    def __init__(
        self,
        sighting: Sighting,
        client: OutboundClient,
        api: str,
        namespace: str,
        service: str,
        port: str | None,
        on_places: OnPlaces,
        again_first_s: float = AGAIN_FIRST_S,
    ) -> None:
        """`api` is the server's URL, `port` the name or number of the port that is meant."""
        self._sighting = sighting
        self._client = client
        selector = quote(f"kubernetes.io/service-name={service}", safe="")
        self._url = (
            f"{api}/apis/discovery.k8s.io/v1/namespaces/{quote(namespace, safe='')}/endpointslices"
            f"?labelSelector={selector}"
        )
        self._port = port
        self._on_places = on_places
        self._again_first_s = again_first_s
        self._slices: dict[str, Slice] = {}
        self._count = 0
        self.version = ""  # to watch from; empty before a list, and after 410

    async def run(self) -> None:
        pause_s = self._again_first_s
        while True:
            try:
                if not self.version:
                    await self._list()
                    pause_s = self._again_first_s
                began = time.monotonic()
                await self._watch()
                if time.monotonic() - began >= AGAIN_LIMIT_S:
                    pause_s = self._again_first_s
            except WatchGone:
                log.info("discovery %s: the watch is too old, listing again", self._sighting.name)
                self.version = ""
            except OutboundFailed as error:
                if error.status == GONE:
                    self.version = ""
                else:
                    self._sighting.failed(error.message)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                self.version = ""
                self._sighting.failed(f"an answer in words that we do not know: {error}")
            # A server that ends every watch at once must not be asked without a pause.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, AGAIN_LIMIT_S)

    async def _list(self) -> None:
        slices: dict[str, Slice] = {}
        following = ""
        while True:
            page = f"&limit={PAGE}" + (
                f"&continue={quote(following, safe='')}" if following else ""
            )
            body = await self._client.text(
                self._url + page, timeout_s=LIST_TIMEOUT_S, most_bytes=MOST_LIST_BYTES
            )
            listed = msgspec.json.decode(body, type=SliceList)
            for each in listed.items or []:
                slices[each.metadata.name] = each
            if len(slices) > MOST_SLICES:
                raise OutboundFailed(f"more than {MOST_SLICES} EndpointSlices")
            following = listed.metadata.continue_
            if not following:
                break
        if not listed.metadata.resource_version:
            raise ValueError("a list without a resourceVersion")
        self._slices = slices
        self.version = listed.metadata.resource_version
        self._tell()

    async def _watch(self) -> None:
        """Until the server ends it. Raises WatchGone and OutboundFailed."""
        url = (
            f"{self._url}&watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}"
            f"&resourceVersion={quote(self.version, safe='')}"
        )
        async with self._client.lines(url, silence_s=SILENCE_S) as lines:
            self._sighting.found(self._count)
            while (line := await lines.next()) is not None:
                if line.strip():
                    self._take(msgspec.json.decode(line, type=WatchEvent))

    def _take(self, event: WatchEvent) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=Status)
            if status.code == GONE or status.reason in ("Expired", "Gone"):
                raise WatchGone
            raise OutboundFailed(f"the watch failed: {status.message}", status.code)
        told = msgspec.json.decode(event.object, type=Slice)
        if told.metadata.resource_version:
            self.version = told.metadata.resource_version
        if event.type in ("ADDED", "MODIFIED"):
            self._slices[told.metadata.name] = told
        elif event.type == "DELETED":
            self._slices.pop(told.metadata.name, None)
        else:  # a bookmark
            return
        self._tell()

    def _tell(self) -> None:
        ready, leaving = places_of(self._slices.values(), self._port)
        self._count = len(ready)
        self._sighting.found(self._count)
        self._on_places(ready, leaving)
