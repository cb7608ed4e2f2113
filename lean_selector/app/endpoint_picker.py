"""Attaches the endpoint picker (`--epp-port`) to the selector: listener, metrics and shutdown."""

import asyncio
import logging
import time
from functools import partial

from lean_selector.api.access import WRITE, AccessTokens
from lean_selector.app.gateway_routes import GatewayRoutes
from lean_selector.app.host import HttpServer
from lean_selector.app.picker_flags import SelectorServiceConfig
from lean_selector.app.selector_parts import SelectorCore
from lean_selector.app.service_flags import ListenFlags
from lean_selector.core.selection.shapes import PICKER
from lean_selector.epp.connection import MAX_CONNECTIONS, PickerConnection
from lean_selector.epp.picking import Addresses, Picker
from lean_selector.epp.stream import ExtProcStream
from lean_selector.gateway.placing import Chooser
from lean_selector.gateway.route import SHED
from lean_selector.gateway.upstreams import Rotation
from lean_selector.http.connections import Connections
from lean_selector.parts import Part
from lean_selector.wire.exposition import Families, by, table

log = logging.getLogger("lean_selector.epp")


class EndpointPicker(Part):
    """Serves ext_proc and health checks, once `server` was started, until `close`."""

    def __init__(
        self,
        core: SelectorCore,
        config: SelectorServiceConfig,
        routes: GatewayRoutes,
        tokens: AccessTokens | None,
    ) -> None:
        flags = config.picker
        assert flags.port is not None
        rotation = Rotation(config.settings.ejection, time.monotonic())
        self.chooser = Chooser(core.selector, rotation, SHED, asked_at=PICKER)
        self._picker = Picker(
            routes.prompts,
            self.chooser,
            rotation,
            routes.fleet,
            Addresses(routes.fleet, core.resolve),
            flags.tenant,
            flags.fallbacks,
            flags.max_wait_s,
            config.queue.headers(tokens, by_name=False),
        )
        self._touch_after_s = config.reservations.touch_after_s
        self._touched_at = time.monotonic()
        loop = asyncio.get_running_loop()
        connections = Connections(loop.call_soon, max_connections=MAX_CONNECTIONS)
        state, catalog = core.state, core.selector.catalog

        def is_ready() -> bool:  # as GET /ready
            return catalog.can_serve() and not state.is_draining

        def may_write(credential: bytes | None) -> bool:
            return tokens is None or tokens.role_of(credential) >= WRITE

        new_stream = partial(ExtProcStream, self._picker)
        listen = ListenFlags(
            port=flags.port, host=flags.host, tls_cert=flags.tls_cert, tls_key=flags.tls_key
        )
        self.server = HttpServer(
            partial(PickerConnection, connections, new_stream, is_ready, may_write),
            connections,
            listen,
            "endpoint picker",
            port_flag="--epp-port",
            tls_flags="--epp-tls",
            spoken="h2",
        )

    def tick(self, now: float) -> None:
        picker = self._picker
        picker.rotation.ejected = picker.fleet.ejected()
        picker.addresses.tick(now)
        self.server.sweep(now)
        if now - self._touched_at >= self._touch_after_s:
            self._touched_at = now
            for stream in picker.live:
                stream.touch()

    @property
    def is_idle(self) -> bool:
        return not self._picker.live

    def close(self) -> None:
        if self._picker.live:
            log.warning("streams of gateways were reset", extra={"streams": len(self._picker.live)})
        for connection in list(self.server.connections.open):
            if isinstance(connection, PickerConnection):
                connection.go_away()
        self.server.abort()
        self._picker.addresses.close()

    def families(self) -> Families:
        picker = self._picker
        return table({
            "epp_streams": (lambda: len(picker.live), "Requests of gateways in progress."),
            "epp_events_total": (lambda: by("event", picker.counts),
                "What happened to requests of gateways."),
            "epp_refused_total": (lambda: by("status", picker.refused),
                "Requests of gateways that were answered in place of a worker, by status."),
            "epp_unresolved_workers": (lambda: picker.addresses.unresolved,
                "Workers that are not offered, because their names do not resolve."),
        })  # fmt: skip
