"""What both services answer about discovery (decision D22)."""

from collections.abc import Callable

from lean_selector.access.roles import READ
from lean_selector.services.gate import Route, plain
from lean_selector.wire.discovery_states import DiscoveryReport

NOTHING = DiscoveryReport([], [], [])


def discovery_routes(report: Callable[[], DiscoveryReport] | None) -> tuple[Route, ...]:
    """`report` is None while nothing is to be found."""
    return (("GET", "/discovery", READ, plain(report if report is not None else lambda: NOTHING)),)
