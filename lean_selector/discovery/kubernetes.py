"""Finds workers or peers behind a Kubernetes service: lists its EndpointSlices, then watches them.

A watch starts at the resource version of the list, and resumes at the version of the last event or
bookmark. After 410 (Gone), a new list is requested. While the API server cannot be reached, the
last result stays in effect."""

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import msgspec

from lean_selector.discovery.finders import OnEndpoints, Sighting
from lean_selector.discovery.particulars import FoundEndpoint, Target, role_of
from lean_selector.http.outbound import OutboundClient, OutboundFailed

# -- EndpointSlices, discovery.k8s.io/v1 -----------------------------------------------------------


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}  # Kubernetes copies those of the Service


class ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Conditions(msgspec.Struct):
    """Conditions of an endpoint. Older API servers omit `ready` (None), which counts as ready."""

    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct):
    """The object behind an endpoint, mostly a pod. No later object has its `uid`."""

    uid: str = ""


class SliceEndpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] = []
    conditions: Conditions | None = None
    target_ref: TargetRef | None = None


class Port(msgspec.Struct, rename="camel"):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None
    app_protocol: str | None = None


class Slice(msgspec.Struct, rename="camel"):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[Port] | None = None


class SliceList(msgspec.Struct):
    metadata: ListMetadata = msgspec.field(default_factory=ListMetadata)
    items: list[Slice] | None = None


class Status(msgspec.Struct):
    """The reason why a watch ends, from an event of type ERROR."""

    code: int | None = None
    message: str = ""
    reason: str = ""


class WatchEvent(msgspec.Struct):
    """One event of a watch of EndpointSlices. The form of `object` depends on `type`."""

    type: str
    object: msgspec.Raw = msgspec.Raw(b"{}")


# -- which endpoints count -------------------------------------------------------------------------

_SECURE: Final = frozenset({"https", "kubernetes.io/https"})
# Ports used if none is given, in this order; otherwise the first port.
_USUAL: Final = ("http", "https")


def endpoints_of(
    slices: Iterable[Slice], port: str | None, role_label: str = ""
) -> tuple[dict[FoundEndpoint, str], list[FoundEndpoint]]:
    """Return a service's ready endpoints, each with the uid of its pod ("" if it has none), and
    its terminating endpoints, both sorted. The value of `role_label` tells their role.

    `port` is a name or a number. IPv6 endpoints are used only if there are no IPv4 endpoints."""
    slices = list(slices)
    is_v4 = any(each.address_type == "IPv4" and each.endpoints for each in slices)
    ready: dict[FoundEndpoint, str] = {}
    leaving: set[FoundEndpoint] = set()
    for each in slices:
        if is_v4 and each.address_type == "IPv6":
            continue
        chosen = _chosen(each.ports or [], port)
        if chosen is None or chosen.port is None:
            continue
        is_secure = chosen.app_protocol in _SECURE or (
            chosen.app_protocol is None and chosen.name == "https"
        )
        role = role_of(each.metadata.labels.get(role_label)) or ""
        for endpoint in each.endpoints or []:
            if not endpoint.addresses:
                continue
            found = FoundEndpoint(endpoint.addresses[0], chosen.port, is_secure, role)
            conditions = endpoint.conditions
            if conditions is not None and conditions.terminating:
                leaving.add(found)
            elif conditions is None or conditions.ready is not False:
                # One slice may still list a pod whose successor is in another one already.
                uid = endpoint.target_ref.uid if endpoint.target_ref is not None else ""
                ready[found] = max(uid, ready.get(found, ""))
    return dict(sorted(ready.items())), sorted(leaving - ready.keys())


def _chosen(ports: list[Port], wanted: str | None) -> Port | None:
    if wanted is not None:
        # `wanted` is a name or a number.
        for port in ports:
            if wanted in (port.name, str(port.port)):
                return port
        return None
    for name in _USUAL:
        for port in ports:
            if port.name == name:
                return port
    return next(iter(ports), None)


# -- listing and watching --------------------------------------------------------------------------

log = logging.getLogger("lean_selector.discovery")

GONE: Final = 410
LIST_TIMEOUT_S: Final = 30.0
PAGE: Final = 500  # slices; each has up to a hundred endpoints, or up to a thousand if configured
MOST_LIST_BYTES: Final = 64 << 20
MOST_SLICES: Final = 10_000
# The server is asked to end a watch after this time. Bookmarks arrive every minute; a server that
# is silent for longer than this is down, even if the connection seems alive.
WATCH_S: Final = 240
SILENCE_S: Final = 300.0
AGAIN_FIRST_S: Final = 0.2
AGAIN_LIMIT_S: Final = 30.0


@dataclass(eq=False)
class KubernetesFinder:
    """Discovers the endpoints of one service. `client` sends the service account's token, and
    trusts the API server's certificate authority."""

    sighting: Sighting
    client: OutboundClient
    api: str
    target: Target
    on_endpoints: OnEndpoints
    role_label: str = ""
    again_first_s: float = AGAIN_FIRST_S
    version: str = ""  # version to watch from; empty before a list and after 410

    def __post_init__(self) -> None:
        namespace = quote(self.target.namespace, safe="")
        selector = quote(f"kubernetes.io/service-name={self.target.name}", safe="")
        self._url = (
            f"{self.api}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            f"?labelSelector={selector}"
        )
        self._slices: dict[str, Slice] = {}
        self._count = 0

    async def run(self) -> None:
        pause_s = self.again_first_s
        while True:
            try:
                if not self.version:
                    await self._list()
                began = time.monotonic()
                await self._watch()
                if time.monotonic() - began >= AGAIN_LIMIT_S:
                    pause_s = self.again_first_s
            except OutboundFailed as error:
                if error.status == GONE:
                    name = self.sighting.name
                    log.info("discovery %s: the watch is too old, listing again", name)
                    self.version = ""
                else:
                    self.sighting.failed(error.message)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                self.version = ""
                self.sighting.failed(f"unknown form of response: {error}")
            # A pause, in case the server ends every watch at once.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, AGAIN_LIMIT_S)

    async def _list(self) -> None:
        slices: dict[str, Slice] = {}
        following = ""
        while True:
            page = f"&limit={PAGE}" + (
                f"&continue={quote(following, safe='')}" if following else ""
            )
            body = await self.client.text(
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
        self._deliver()

    async def _watch(self) -> None:
        """Watches EndpointSlices until the API server ends the watch. Raises OutboundFailed, with
        status GONE if our resource version is too old."""
        url = (
            f"{self._url}&watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}"
            f"&resourceVersion={quote(self.version, safe='')}"
        )
        async with aclosing(self.client.lines(url, silence_s=SILENCE_S)) as lines:
            async for line in lines:
                self.sighting.found(self._count)
                if line.strip():
                    self._take(msgspec.json.decode(line, type=WatchEvent))

    def _take(self, event: WatchEvent) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=Status)
            code = GONE if status.reason in ("Expired", "Gone") else status.code
            raise OutboundFailed(f"the watch failed: {status.message}", code)
        told = msgspec.json.decode(event.object, type=Slice)
        if told.metadata.resource_version:
            self.version = told.metadata.resource_version
        if event.type in ("ADDED", "MODIFIED"):
            self._slices[told.metadata.name] = told
        elif event.type == "DELETED":
            self._slices.pop(told.metadata.name, None)
        else:  # it is a bookmark
            return
        self._deliver()

    def _deliver(self) -> None:
        ready, leaving = endpoints_of(self._slices.values(), self.target.port, self.role_label)
        self._count = len(ready)
        self.sighting.found(self._count)
        self.on_endpoints(ready, leaving)
