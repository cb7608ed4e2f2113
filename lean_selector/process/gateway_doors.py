"""What gateways are offered besides the API: POST /route, and the reading of their access logs.

Imported only where one of them is asked for.
"""

import time
from collections.abc import Callable

from lean_selector.gateway.engines import CatalogFleet
from lean_selector.gateway.prompt_shapes import PromptSettings
from lean_selector.gateway.prompts import Prompts
from lean_selector.gateway.route import RouteHandler
from lean_selector.http.outbound import OutboundClient
from lean_selector.process.access_log_plane import AccessLogPlane
from lean_selector.process.prompt_plane import prompts_of
from lean_selector.server.selector_flags import AccessLogs
from lean_selector.service.exposition import Families
from lean_selector.service.gate import Route
from lean_selector.service.metrics import prompt_families
from lean_selector.service.selection import SelectionService


class GatewayDoors:
    """Both, or either; logs are read from when it is made until it is closed."""

    def __init__(
        self,
        service: SelectionService,
        access_logs: AccessLogs,
        prompts: PromptSettings | None,
        new_client: Callable[[], OutboundClient],
    ) -> None:
        """`new_client` makes what asks engines. Raises StartError; then nothing is open."""
        selector = service.selector
        self._prompts: Prompts | None = None
        if prompts is not None:
            self._prompts = prompts_of(prompts, CatalogFleet(selector.catalog), new_client())
        self._logs: AccessLogPlane | None = None
        if access_logs.places:
            self._logs = AccessLogPlane(access_logs, selector, time.monotonic)
        self._route: RouteHandler | None = None
        if self._prompts is not None:
            self._route = RouteHandler(
                self._prompts,
                service.select_and_reserve,
                lambda reservation_id: selector.free(reservation_id, time.monotonic()),
                _never if self._logs is None else self._logs.ends.has_ended,
            )

    def routes(self) -> tuple[Route, ...]:
        return () if self._route is None else self._route.routes()

    def families(self) -> Families:
        of_prompts = [] if self._prompts is None else prompt_families(self._prompts.unknown)
        of_logs = [] if self._logs is None else self._logs.families()
        return [*of_prompts, *of_logs]

    async def close(self) -> None:
        if self._route is not None:
            await self._route.close()
        if self._prompts is not None:
            await self._prompts.close()
        if self._logs is not None:
            self._logs.close()


def _never(reservation_id: str) -> bool:
    """No end is told where no log is read."""
    return False
