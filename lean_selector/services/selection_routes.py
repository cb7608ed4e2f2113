"""The routes whose bodies each dialect of the selection service has of its own, in one table."""

from collections.abc import Mapping
from typing import Any, Protocol

from lean_selector.access.roles import ADMIN, READ, WRITE
from lean_selector.services.bodies import Query, worker_id_param
from lean_selector.services.gate import Route, with_body, with_param_and_body, with_query
from lean_selector.services.helpful_headers import warning_of_fields


class Handlers(Protocol):
    """Those of one dialect, each for the body that it has in `Bodies`."""

    def register(self, body: Any) -> object: ...

    def patch(self, worker_id: int, body: Any) -> object: ...

    def select(self, body: Any) -> object: ...

    def select_and_reserve(self, body: Any) -> object: ...

    def reserve(self, body: Any) -> object: ...

    def loads(self, query: Query) -> object: ...

    def potential_loads(self, body: Any) -> object: ...

    def overlap_scores(self, body: Any) -> object: ...


class Bodies:
    """The structs of one dialect; `fields` are the names in the body of each path."""

    def __init__(
        self,
        fields: Mapping[str, frozenset[str]],
        *,
        registration: type[Any],
        change: type[Any],
        select: type[Any],
        select_and_reserve: type[Any],
        reservation: type[Any],
        projection: type[Any],
    ) -> None:
        self.fields = fields
        self.registration = registration
        self.change = change
        self.select = select
        self.select_and_reserve = select_and_reserve
        self.reservation = reservation
        self.projection = projection


def dialect_routes(handlers: Handlers, bodies: Bodies) -> tuple[Route, ...]:
    register = with_body(bodies.registration, handlers.register, 201)
    patch = with_param_and_body(worker_id_param, bodies.change, handlers.patch)
    return (
        ("POST", "/workers", ADMIN, warning_of_fields(bodies.fields["/workers"], register)),
        (
            "PATCH",
            "/workers/{worker_id}",
            ADMIN,
            warning_of_fields(bodies.fields["/workers/{worker_id}"], patch),
        ),
        ("POST", "/select", WRITE, with_body(bodies.select, handlers.select)),
        (
            "POST",
            "/select_and_reserve",
            WRITE,
            with_body(bodies.select_and_reserve, handlers.select_and_reserve),
        ),
        ("POST", "/reservations", WRITE, with_body(bodies.reservation, handlers.reserve, 201)),
        ("GET", "/loads", READ, with_query(handlers.loads)),
        ("POST", "/potential_loads", READ, with_body(bodies.projection, handlers.potential_loads)),
        ("POST", "/overlap_scores", READ, with_body(bodies.projection, handlers.overlap_scores)),
    )
