"""Which service has which document."""

from collections.abc import Iterable, Mapping
from typing import Final

from lean_selector.openapi.document import document, encoded
from lean_selector.openapi.selector_routes import (
    DOOR_ROUTES,
    SELECTOR_16_ROUTES,
    SELECTOR_ROUTES,
)
from lean_selector.openapi.slot_tracker_routes import SLOT_TRACKER_ROUTES

_NO_ROLES: Final[dict[tuple[str, str], str]] = {}
DESCRIBED: Final = {
    "selector": ("lean-selector", SELECTOR_ROUTES | DOOR_ROUTES),
    "selector_16": ("lean-selector --api 1.6", SELECTOR_16_ROUTES | DOOR_ROUTES),
    "slot_tracker": ("lean-slot-tracker", SLOT_TRACKER_ROUTES),
}


def service_document(
    service: str,
    routes: Iterable[tuple[str, str]],
    roles: Mapping[tuple[str, str], str] = _NO_ROLES,
    *,
    asks_tokens: bool = False,
) -> bytes:
    """The document of a service with these routes, as JSON text; `roles` as in `document`."""
    title, described = DESCRIBED[service]
    return encoded(document(title, routes, described, roles, asks_tokens=asks_tokens))
