"""Serves the selection service over HTTP on the host, with the doors for gateways beside it.

What it consists of is made in `selector_parts`, here it gets its listener.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lean_selector.core.selection.inspection import established
from lean_selector.core.settings import API_1_6
from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits
from lean_selector.http.protocol import App
from lean_selector.process.access import tokens_of
from lean_selector.process.exposure import exposure_warnings
from lean_selector.process.host import HttpServer, new_zmq_context, observation, run
from lean_selector.process.selector_parts import SelectorParts
from lean_selector.server.selector_flags import SelectorConfig
from lean_selector.service import logs
from lean_selector.service.access import AccessTokens
from lean_selector.service.application import observed
from lean_selector.service.exposition import AnyFamily
from lean_selector.service.header_warnings import refusal_lines
from lean_selector.service.metrics import (
    connection_families,
    discovery_families,
    replica_families,
    state_families,
)
from lean_selector.service.selection import SelectionService
from lean_selector.service.selector_metrics import (
    selection_cache_families,
    selection_families,
    session_families,
)
from lean_selector.service.worker_handlers import ServiceState

if TYPE_CHECKING:
    from lean_selector.process.gateway_doors import GatewayDoors


def run_selector(config: SelectorConfig) -> None:
    """Runs the selection service until it is told to stop. Raises StartError."""
    exposed = exposure_warnings(
        config.listen.host,
        asks_who=config.listen.is_guarded,
        has_allowed=bool(config.endpoints.allowed),
    )
    warnings = [*config.warnings, *exposed]
    run(config, config.listen, lambda log_state: _selector(config, log_state), warnings)


async def _selector(config: SelectorConfig, log_state: logs.LogState) -> None:
    """The selector, served over HTTP."""
    loop = asyncio.get_running_loop()
    tokens = tokens_of(config.listen)
    context = new_zmq_context()
    parts = SelectorParts(config, context)
    doors = doors_of(config, parts)
    connections = Connections(
        loop.call_soon, Limits(), max_connections=config.listen.max_connections
    )
    app = selector_app(config, parts, connections, log_state, doors, tokens=tokens)
    server = HttpServer(app, connections, config.listen)
    if tokens is not None:
        server.watch(tokens.look)
    await server.start()
    parts.start()

    async def close() -> None:
        if doors is not None:
            await doors.close()
        await parts.close()

    await server.serve(parts.tick, parts.refuse_new, close)
    context.destroy(linger=0)


def doors_of(config: SelectorConfig, parts: SelectorParts) -> "GatewayDoors | None":
    """What gateways are offered besides the API, if anything. Raises StartError."""
    if not config.access_logs.places and config.prompts.settings is None:
        return None
    from lean_selector.process.gateway_doors import GatewayDoors
    from lean_selector.process.outbound_access import engine_client

    # What gateways are told is the same in every dialect.
    service = SelectionService(
        parts.selector,
        dump=parts.dumps.answer,
        sources=parts.subscriptions,
        state=ServiceState(),
        call_later=asyncio.get_running_loop().call_later,
    )
    return GatewayDoors(
        service,
        config.access_logs,
        config.prompts.settings,
        lambda: engine_client(config.engines, parts.resolve, parts.allowed),
    )


def selector_app(
    config: SelectorConfig,
    parts: SelectorParts,
    connections: Connections,
    log_state: logs.LogState,
    doors: "GatewayDoors | None",
    more: Sequence[AnyFamily] = (),
    tokens: AccessTokens | None = None,
) -> App:
    """The selector's API; `more` are metrics of what else runs in this process, `tokens` those that
    are asked for."""
    is_16 = config.settings.dialect == API_1_6
    return observed(
        (*parts.routes, *(() if doors is None else doors.routes())),
        lambda meters: [
            *selection_families(
                parts.selector, parts.subscriptions, meters, config.overload_status
            ),
            *selection_cache_families(parts.selector.selections),
            *replica_families(parts.plane),
            *session_families(
                lambda: list(established(parts.selector.catalog, None, None)), parts.sessions
            ),
            *connection_families(connections),
            *discovery_families(parts.finding),
            *state_families(parts.persister),
            *([] if doors is None else doors.families()),
            *more,
        ],
        observation("selector", config.listen, log_state, "selector_16" if is_16 else "selector"),
        config.overload_status,
        refusal_lines,
        tokens,
    )
