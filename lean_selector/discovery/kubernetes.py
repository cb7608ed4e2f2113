"""Finds workers or peers behind a Kubernetes service: lists its EndpointSlices periodically.

A list comes from the API server's cache. While the server cannot be reached, the last result stays
in effect."""

import asyncio
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import msgspec

from lean_selector.discovery.finders import OnEndpoints, Sighting
from lean_selector.discovery.particulars import FoundEndpoint
from lean_selector.http.outbound import OutboundClient, OutboundFailed

# -- EndpointSlices, discovery.k8s.io/v1 -----------------------------------------------------------


class ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str


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
    address_type: str = "IPv4"
    endpoints: list[SliceEndpoint] | None = None
    ports: list[Port] | None = None


class SliceList(msgspec.Struct):
    metadata: ListMetadata  # required, because any other object would be an empty list
    items: list[Slice] | None = None


# -- which endpoints count -------------------------------------------------------------------------

_SECURE: Final = frozenset({"https", "kubernetes.io/https"})
# Ports used if none is given, in this order; otherwise the first port.
_USUAL: Final = ("http", "https")


def endpoints_of(
    slices: list[Slice], port: str | None
) -> tuple[dict[FoundEndpoint, str], list[FoundEndpoint]]:
    """Return a service's ready endpoints, each with the uid of its pod ("" if it has none), and
    its terminating endpoints, both sorted.

    `port` is a name or a number. IPv6 endpoints are used only if there are no IPv4 endpoints."""
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
        for endpoint in each.endpoints or []:
            if not endpoint.addresses:
                continue
            found = FoundEndpoint(endpoint.addresses[0], chosen.port, is_secure)
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


# -- listing ---------------------------------------------------------------------------------------

LIST_TIMEOUT_S: Final = 30.0
MOST_LIST_BYTES: Final = 64 << 20


@dataclass(eq=False)
class KubernetesFinder:
    """Discovers the endpoints of one service. `client` sends the service account's token, and
    trusts the API server's certificate authority. `port` is a port's name or number."""

    sighting: Sighting
    client: OutboundClient
    api: str
    namespace: str
    service: str
    port: str | None
    interval_s: float
    on_endpoints: OnEndpoints

    async def run(self) -> None:
        namespace = quote(self.namespace, safe="")
        selector = quote(f"kubernetes.io/service-name={self.service}", safe="")
        url = (
            f"{self.api}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            f"?labelSelector={selector}&resourceVersion=0"  # 0: what the server has in its cache
        )
        while True:
            try:
                body = await self.client.text(
                    url, timeout_s=LIST_TIMEOUT_S, most_bytes=MOST_LIST_BYTES
                )
                listed = msgspec.json.decode(body, type=SliceList)
            except OutboundFailed as error:
                self.sighting.failed(error.message)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                self.sighting.failed(f"unknown form of response: {error}")
            else:
                ready, leaving = endpoints_of(listed.items or [], self.port)
                self.sighting.found(len(ready))
                self.on_endpoints(ready, leaving)
            await asyncio.sleep(self.interval_s)
