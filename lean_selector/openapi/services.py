"""Which service has which document."""

from collections.abc import Iterable
from typing import Final

from lean_selector.openapi.document import document, encoded
from lean_selector.openapi.selector_routes import (
    DOOR_ROUTES,
    SELECTOR_16_ROUTES,
    SELECTOR_ROUTES,
)
from lean_selector.openapi.slot_tracker_routes import SLOT_TRACKER_ROUTES

DESCRIBED: Final = {
    "selector": ("lean-selector", SELECTOR_ROUTES | DOOR_ROUTES),
    "selector_16": ("lean-selector --api 1.6", SELECTOR_16_ROUTES | DOOR_ROUTES),
    "slot_tracker": ("lean-slot-tracker", SLOT_TRACKER_ROUTES),
}


def service_document(service: str, routes: Iterable[tuple[str, str]]) -> bytes:
    """The document of a service with these routes, as JSON text."""
    title, described = DESCRIBED[service]
    return encoded(document(title, routes, described))
