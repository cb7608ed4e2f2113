"""The page on access names the role of every route, as the tables of routes have it."""

import re

import pytest

from lean_selector.core.trackers import Trackers
from lean_selector.route.door import RouteDoor
from lean_selector.service.access import NAMES, READ, Role
from lean_selector.service.application import MetricsAnswers, OpenApiRoutes
from lean_selector.service.gate import Route
from lean_selector.service.selection_handlers import BusyThresholdService
from lean_selector.service.shared_handlers import discovery_routes
from lean_selector.service.slot_tracker import SlotTrackerService
from tests.documents.pages import OURS
from tests.gates import Turns, selection_service

PAGE = "docs/guide/access.md"


class NoPrompts:
    """What the door for gateways would ask."""

    async def of(self, path: str, body: bytes, *, forwards: bool) -> object:
        raise NotImplementedError


def routes_of(service: str) -> list[Route]:
    shared = (
        *discovery_routes(None),
        *MetricsAnswers(list, Turns().call_soon).routes(),
        *OpenApiRoutes(service, ()).routes(),
    )
    if service == "slot_tracker":
        return [*SlotTrackerService(Trackers()).routes(), *shared]
    selection = selection_service()
    door = RouteDoor(NoPrompts(), lambda body: None, lambda name: None, lambda name: False)  # type: ignore[arg-type] # nothing is asked
    thresholds = BusyThresholdService(selection.selector)
    return [*selection.routes(), *thresholds.routes(), *door.routes(), *shared]


def cells(role: str) -> list[str]:
    (row,) = [line for line in OURS[PAGE].splitlines() if line.startswith(f"| {role} |")]
    return row.strip("| ").split(" | ")


@pytest.mark.parametrize(("service", "column"), [("selector", 2), ("slot_tracker", 3)])
def test_the_page_names_the_role_of_every_route(service: str, column: int) -> None:
    named: dict[tuple[str, str], Role] = {}
    for role in Role:
        cell = cells(f"`{NAMES[role]}`" if role in NAMES else "none")[column]
        for method, path in re.findall(r"`(GET|POST|PATCH|DELETE) (/[^`]*)`", cell):
            assert (method, path) not in named
            named[method, path] = role
        assert ("every other `GET`" in cell) == (role == READ)
    asked = {(method, path): role for method, path, role, _ in routes_of(service)}
    assert named.keys() <= asked.keys()
    for route, role in asked.items():
        other = READ if route[0] == "GET" else None
        assert role is named.get(route, other), route
