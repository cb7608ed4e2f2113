"""What /openapi.json is made of: every route is described, and the document is made in a thread."""

import ast
import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

import lean_selector
from lean_selector.service.application import OpenApiRoutes
from lean_selector.service.gate import Gate
from lean_selector.service.openapi import document as services
from lean_selector.service.openapi.document import DESCRIBED as SERVICES
from lean_selector.service.replies import LaterReply
from tests.support.gates import request, routes_of
from tests.support.on_loop import until

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
        "add a RouteDescription to lean_selector/service/openapi/routes.py "
        "(CONTRIBUTING.md, How to add a route)"
    )
    assert DESCRIBED.keys() - routes == set()


@pytest.mark.parametrize("service", SERVICES)
def test_a_body_has_an_example(service: str) -> None:
    for method, path, _, endpoint in routes_of(service):
        about = SERVICES[service][1][method, path]
        assert (endpoint.body is None) == (about.example is None), path


def test_the_loop_goes_on_while_the_document_is_made_for_all_who_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go_on = threading.Event()
    made: list[str] = []

    def slow(name: str, *_: object, **__: object) -> bytes:
        made.append(name)
        assert may_go_on.wait(60)
        if len(made) == 1:
            raise RuntimeError("a bug")
        return b"{}"

    monkeypatch.setattr(services, "service_document", slow)
    gate = Gate(OpenApiRoutes("selector", ()).routes())

    def ask() -> LaterReply:
        answer = gate(request("GET", "/openapi.json"))
        assert isinstance(answer, LaterReply)
        return answer

    async def answered(count: int) -> list[bytes]:
        pending = [ask() for _ in range(count)]
        gone = ask()
        gone.hang_up()
        await until(lambda: all(each.response is not None for each in pending))
        return [bytes(each.response or b"")[9:12] for each in pending]

    async def story() -> None:
        asyncio.get_running_loop().call_later(0, may_go_on.set)  # the loop runs, or nothing would
        assert await answered(3) == [b"500"] * 3
        assert await answered(2) == [b"200"] * 2
        assert made == ["selector"] * 2
        assert isinstance(gate(request("GET", "/openapi.json")), bytes)

    uvloop.run(story())
