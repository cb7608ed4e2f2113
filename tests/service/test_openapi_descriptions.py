"""What /openapi.json is made of: every route is described."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lean_selector
from tests.documents.openapi_document import DESCRIBED as SERVICES
from tests.support.gates import routes_of

PACKAGE = Path(lean_selector.__file__).parent
METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE"}
DESCRIBED = {route: about for _, table in SERVICES.values() for route, about in table.items()}
# Rooms whose routes are of no service of ours: those of simulated engines.
OTHER_ROOMS = {"tools"}


def declared() -> Iterator[tuple[str, str, str]]:
    """Method and path of every route in the sources, and where it is declared."""
    for path in sorted(PACKAGE.rglob("*.py")):
        where = str(path.relative_to(PACKAGE))
        if where.split("/")[0] in OTHER_ROOMS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Tuple) and len(node.elts) == 4:  # as in service/gate.py
                method, template = map(written, node.elts[:2])
                if method in METHODS:
                    yield method, template, where


def written(node: ast.expr) -> str:
    """A literal as it is; what is not one as the source has it, which no description is of."""
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def test_every_route_is_described_and_nothing_else() -> None:
    routes = {(method, path): where for method, path, where in declared()}
    assert {route: routes[route] for route in routes.keys() - DESCRIBED} == {}, (
        "add a RouteDescription to tests/documents/openapi_routes.py "
        "(CONTRIBUTING.md, How to add a route)"
    )
    assert DESCRIBED.keys() - routes == set()


@pytest.mark.parametrize("service", SERVICES)
def test_a_body_has_an_example(service: str) -> None:
    for method, path, _, endpoint in routes_of(service):
        about = SERVICES[service][1][method, path]
        assert (endpoint.body is None) == (about.example is None), path
