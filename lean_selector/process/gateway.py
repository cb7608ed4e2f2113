"""Builds the gateway and runs it on the host, with a selector in this process or one beside it.

This module only wires. Two servers share the loop: the door, which says when to stop, and the
selector's API, which answers until the door has drained.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import zmq.asyncio

from lean_selector.access.roles import OPEN
from lean_selector.access.token_file import AccessTokens
from lean_selector.gateway.choosing import Chooser
from lean_selector.gateway.core_chooser import CoreChooser
from lean_selector.gateway.counts import Counts
from lean_selector.gateway.directory import Directory, Row
from lean_selector.gateway.door import Door, http_refusal
from lean_selector.gateway.door_guard import guarded
from lean_selector.gateway.families import gateway_families
from lean_selector.gateway.model_list import ModelList
from lean_selector.gateway.placing import Placing
from lean_selector.gateway.remote_chooser import RemoteChooser
from lean_selector.gateway.remote_fleet import RemoteFleet
from lean_selector.gateway.rotation import Rotation
from lean_selector.gateway.selector_link import SelectorLink
from lean_selector.http.connections import Connections
from lean_selector.http.limits import Limits
from lean_selector.http.protocol import App
from lean_selector.http.streaming import StreamingProtocol
from lean_selector.observing import logs
from lean_selector.observing.load_metrics import Families
from lean_selector.observing.prompt_metrics import prompt_families
from lean_selector.outbound.client import Resolve
from lean_selector.process.access import tokens_of
from lean_selector.process.endpoint_rules import allowed_of
from lean_selector.process.exposure import exposure_warnings
from lean_selector.process.gateway_config import GatewayConfig
from lean_selector.process.host import HttpServer, new_zmq_context, observation, run
from lean_selector.process.outbound_access import credentials_of, engine_client
from lean_selector.process.prompt_plane import prompts_of
from lean_selector.process.selector import doors_of, selector_app
from lean_selector.process.selector_parts import SelectorParts
from lean_selector.prompts.fleet import CatalogFleet, Fleet
from lean_selector.services.connection_metrics import connection_families
from lean_selector.services.gate import plain
from lean_selector.services.observed import observed
from lean_selector.services.peer_routes import OK
from lean_selector.sockets.resolver import Resolver
from lean_selector.tasks import supervise

_LAST_WORDS_S = 2.0  # for what a selector beside is still to be told at the end


class Choice(Protocol):
    """Who chooses, wired."""

    chooser: Chooser
    fleet: Fleet
    resolve: Resolve

    def look(self) -> None: ...

    def app(
        self,
        connections: Connections,
        log_state: logs.LogState,
        more: Families,
        tokens: AccessTokens | None,
    ) -> App: ...

    def start(self) -> None: ...

    def tick(self, now: float) -> None: ...

    def refuse_new(self) -> None: ...

    async def close(self) -> None: ...


def run_gateway(config: GatewayConfig) -> None:
    """Runs the gateway until it is told to stop. Raises StartError."""
    selector = config.selector
    exposed = exposure_warnings(
        config.listen.host,
        asks_who=config.listen.asks_who,
        # Beside a selector nobody can register anything here.
        has_allowed=bool(selector.allowed_endpoints) or config.beside is not None,
    )
    warnings = [*selector.warnings, *exposed]
    run(config, config.listen, lambda log_state: _gateway(config, log_state), warnings)


async def _gateway(config: GatewayConfig, log_state: logs.LogState) -> None:
    loop, now = asyncio.get_running_loop(), time.monotonic()
    tokens = tokens_of(config.listen)
    context = new_zmq_context()
    rotation = Rotation(config.selector.router.ejection, now)
    directory = Directory(config.workers, rotation)
    choice: Choice
    if config.beside is None:
        choice = _Within(config, context, rotation, directory)
    else:
        choice = _Beside(config, config.beside, rotation, directory)
    credentials = credentials_of(config.selector.engines, "worker")
    counts = Counts()
    allowed = allowed_of(config.selector.allowed_endpoints)
    client = engine_client(config.selector.engines, choice.resolve, allowed)
    prompts = prompts_of(config.prompts, choice.fleet, client)
    placing = Placing(
        prompts,
        choice.chooser,
        rotation,
        directory,
        counts,
        choice.resolve,
        credentials.trust.context,
        choice.look,
        allowed,
    )
    door = Door(
        placing,
        rotation,
        ModelList(rotation, client, time.monotonic),
        counts,
        clock=time.monotonic,
        silence_s=config.silence_s,
        touch_after_s=config.touch_after_s,
        token=None if credentials.token is None else credentials.token.token,
        access_log=config.listen.access_log,
        most_body_bytes=config.most_body_bytes,
    )
    limits = Limits(
        max_body_bytes=config.most_body_bytes,
        max_discard_bytes=max(Limits().max_discard_bytes, config.most_body_bytes),
    )
    most = config.listen.max_connections
    front = Connections(loop.call_soon, limits, max_connections=most, refusal=http_refusal)
    behind = Connections(loop.call_soon, Limits(), max_connections=most)
    families = [*gateway_families(counts, rotation), *prompt_families(prompts.unknown)]
    api = HttpServer(
        choice.app(behind, log_state, families, tokens),
        behind,
        config.selector.listen,
        "lean-selector",
    )
    app = door if tokens is None else guarded(door, tokens, counts)
    server = HttpServer(app, front, config.listen, "gateway", StreamingProtocol)
    if tokens is not None:
        server.watch(tokens.look)
    await api.start()
    await server.start()
    server.on_reload += api.on_reload
    choice.start()

    def tick(now: float) -> None:
        api.sweep(now)
        choice.tick(now)
        choice.look()
        door.sweep(now)

    def refuse_new() -> None:
        choice.refuse_new()

    async def close() -> None:
        await door.close()
        await prompts.close()
        api.abort()
        await choice.close()

    await server.serve(tick, refuse_new, close)
    context.destroy(linger=0)


class _Within:
    """The selector is in this process."""

    def __init__(
        self,
        config: GatewayConfig,
        context: zmq.asyncio.Context,
        rotation: Rotation,
        directory: Directory,
    ) -> None:
        self._config = config.selector
        self._parts = parts = SelectorParts(config.selector, context)
        self._doors = doors_of(config.selector, parts)
        self._directory = directory
        self.resolve: Resolve = parts.resolve
        self.fleet: Fleet = CatalogFleet(parts.selector.catalog)
        self.chooser: Chooser = CoreChooser(
            parts.selector, rotation.endpoint, time.monotonic, config.selector.overload_status
        )

    def look(self) -> None:
        self._directory.look(self._parts.selector.catalog.revision, self._rows)

    def _rows(self) -> list[Row]:
        return [
            Row(
                worker.spec.worker_id,
                worker.spec.model_name,
                worker.spec.endpoint,
                can_be_chosen=not worker.reasons,
            )
            for worker in self._parts.selector.catalog.workers.values()
            if worker.spec.endpoint
        ]

    def app(
        self,
        connections: Connections,
        log_state: logs.LogState,
        more: Families,
        tokens: AccessTokens | None,
    ) -> App:
        return selector_app(
            self._config, self._parts, connections, log_state, self._doors, more, tokens
        )

    def start(self) -> None:
        self._parts.start()

    def tick(self, now: float) -> None:
        self._parts.tick(now)

    def refuse_new(self) -> None:
        self._parts.refuse_new()

    async def close(self) -> None:
        if self._doors is not None:
            await self._doors.close()
        await self._parts.close()


class _Beside:
    """The selector is another process; here is no API but the metrics."""

    def __init__(
        self, config: GatewayConfig, target: str, rotation: Rotation, directory: Directory
    ) -> None:
        self._listen = config.selector.listen
        self.resolve: Resolve = Resolver().resolve
        self._link = SelectorLink(
            target,
            self.resolve,
            config.beside_timeout_s,
            time.monotonic,
            credentials_of(config.selector.peers, "peer"),
        )
        fleet = RemoteFleet(self._link, directory.take)
        self.fleet: Fleet = fleet
        self._remote = RemoteChooser(self._link, fleet, rotation)
        self.chooser: Chooser = self._remote
        self._asking: Callable[[], object] | None = None
        self._fleet = fleet

    def look(self) -> None:
        pass

    def app(
        self,
        connections: Connections,
        log_state: logs.LogState,
        more: Families,
        tokens: AccessTokens | None,
    ) -> App:
        routes = (("GET", "/health", OPEN, plain(lambda: OK)),)
        return observed(
            routes,
            lambda meters: [*connection_families(connections), *more],
            observation("gateway", self._listen, log_state),
            tokens=tokens,
        )

    def start(self) -> None:
        self._asking = supervise("workers of the selector", self._fleet.run).cancel

    def tick(self, now: float) -> None:
        self._link.sweep(now)

    def refuse_new(self) -> None:
        pass

    async def close(self) -> None:
        if self._asking is not None:
            self._asking()
        await self._remote.close(_LAST_WORDS_S)
        self._link.endpoint.close()
