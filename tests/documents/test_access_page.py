"""The page on access names the role of every route, as the tables of routes have it."""

import re

import pytest

from lean_selector.service.access import NAMES, READ, Role
from tests.documents.pages import OURS
from tests.gates import routes_of

PAGE = "docs/guide/access.md"


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
