"""Every route is described, and nothing else: what to do about one that is not stands in the
message."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lean_selector
from lean_selector.service.openapi.document import CONNECTION_ERRORS
from lean_selector.service.openapi.document import DESCRIBED as SERVICES
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


ROUTES = list(declared())


def test_the_routes_are_found() -> None:
    found = {(method, path) for method, path, _ in ROUTES}
    assert {("POST", "/select"), ("POST", "/add"), ("GET", "/openapi.json")} <= found


@pytest.mark.parametrize(
    ("method", "path", "where"), ROUTES, ids=[f"{method} {path}" for method, path, _ in ROUTES]
)
def test_a_route_is_described(method: str, path: str, where: str) -> None:
    assert (method, path) in DESCRIBED, (
        f"{where} declares {method} {path}, and nothing describes it in /openapi.json: add a "
        f"RouteDescription to lean_selector/service/openapi/routes.py "
        "(CONTRIBUTING.md, How to add a route)"
    )


def test_nothing_is_described_that_is_no_route() -> None:
    assert set(DESCRIBED) == {(method, path) for method, path, _ in ROUTES}


@pytest.mark.parametrize("service", SERVICES)
def test_a_body_has_an_example(service: str) -> None:
    for method, path, _, endpoint in routes_of(service):
        about = SERVICES[service][1][method, path]
        assert (endpoint.body is None) == (about.example is None), path


def test_what_a_connection_may_answer_by_itself_is_what_http1_refuses_with() -> None:
    refused = {500}  # and what the gate says of a handler that fails
    for path in (PACKAGE / "http").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        refused |= {int(status) for status in re.findall(r"HttpError\((\d{3})", text)}
    assert refused == set(CONNECTION_ERRORS)


def test_nothing_of_it_is_imported_before_it_is_asked_for() -> None:
    script = (
        "import sys, lean_selector.cli, lean_selector.server.selector_process,"
        " lean_selector.server.slot_tracker_process;"
        "print([name for name in sys.modules if 'openapi' in name])"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout.strip() == "[]"
