"""What the EndpointSlices of a service say together: who is there, and who is about to end."""

from collections.abc import Iterable
from typing import Final

from lean_selector.discovery.particulars import Place
from lean_selector.discovery.slice_shapes import Port, Slice

_SECURE: Final = frozenset({"https", "kubernetes.io/https"})
# The ports that are meant where none is named, in this order; else the first.
_USUAL: Final = ("http", "https")


def places_of(slices: Iterable[Slice], port: str | None) -> tuple[list[Place], list[Place]]:
    """Those that are ready, and those that are terminating; both sorted.

    `port` is a name or a number. Of a service with addresses of both families, IPv4 stands for
    both.
    """
    slices = list(slices)
    is_v4 = any(each.address_type == "IPv4" and each.endpoints for each in slices)
    ready: set[Place] = set()
    leaving: set[Place] = set()
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
            place = Place(endpoint.addresses[0], chosen.port, is_secure)
            conditions = endpoint.conditions
            if conditions is not None and conditions.terminating:
                leaving.add(place)
            elif conditions is None or conditions.ready is not False:
                ready.add(place)
    return sorted(ready), sorted(leaving - ready)


def _chosen(ports: list[Port], wanted: str | None) -> Port | None:
    if wanted is not None:
        # Without a name a port is any that the slice has: its ports may be all that there are.
        for port in ports:
            if wanted in (port.name, str(port.port)):
                return port
        return None
    for name in _USUAL:
        for port in ports:
            if port.name == name:
                return port
    return next(iter(ports), None)
