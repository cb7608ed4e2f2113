"""From a request to a worker that is asked: its prompt, the choice, the connection.

The one part of a request's way that waits. One task for each request, and one more for each worker
that fails it; a client who hangs up cancels it, and what was leased by then is the errand's to end.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Final

from lean_selector.core.errors import BadRequest
from lean_selector.gateway.choosing import Chooser, NobodyChose, Shed
from lean_selector.gateway.counts import Counts
from lean_selector.gateway.directory import Directory
from lean_selector.gateway.errand import Errand
from lean_selector.gateway.lease import WorkerLease
from lean_selector.gateway.peeked_model import peeked_model
from lean_selector.gateway.rotation import Rotation
from lean_selector.http.client import ClientConnection, Upstream
from lean_selector.http.endpoints import AllowedEndpoints
from lean_selector.http.outbound import Resolve, connect, reason
from lean_selector.prompts.fleet import UnknownModel
from lean_selector.prompts.prompts import Prompts

log = logging.getLogger("lean_selector.gateway")

CONNECT_S: Final = 5.0
MOST_ATTEMPTS: Final = 5
RETRY_AFTER: Final = b"retry-after: 1\r\n"


class RotationLease(WorkerLease):
    """A turn: nothing is booked, and the selector is not told how it went."""

    def __init__(self, endpoint: Upstream) -> None:
        super().__init__(endpoint)


class Placing:
    """From the loop's thread only."""

    def __init__(
        self,
        prompts: Prompts,
        chooser: Chooser,
        rotation: Rotation,
        directory: Directory,
        counts: Counts,
        resolve: Resolve,
        tls: Callable[[], ssl.SSLContext],
        allowed: AllowedEndpoints | None = None,
    ) -> None:
        """`tls` is asked for where a worker's URL is https, and may raise OSError; `allowed`
        says which workers are connected to."""
        self._allowed = allowed
        self._prompts = prompts
        self._chooser = chooser
        self._rotation = rotation
        self._directory = directory
        self._counts = counts
        self._resolve = resolve
        self._tls = tls

    def begin(self, errand: Errand, is_completion: bool) -> "asyncio.Task[None]":
        return asyncio.get_running_loop().create_task(self._place(errand, is_completion))

    async def _place(self, errand: Errand, is_completion: bool) -> None:
        try:
            await self._try(errand, is_completion)
        except Exception:
            log.exception("a request could not be placed")
            if not errand.is_over:
                errand.fail(500, "internal error")

    async def _try(self, errand: Errand, is_completion: bool) -> None:
        self._directory.look()
        if is_completion and errand.routed is None and not errand.tried:
            request = errand.request
            try:
                errand.routed = await self._prompts.of(request.path.decode(), bytes(request.body))
            except BadRequest as error:
                errand.fail(400, error.message, "invalid_request")
                return
            except UnknownModel as error:
                if self._directory.is_complete:
                    errand.fail(404, error.message, "model_not_found")
                    return
                self._counts.unrouted["not_known_yet"] += 1
        if errand.attempts >= MOST_ATTEMPTS:
            errand.fail(502, f"no worker served the request; the last: {errand.why}", "bad_gateway")
            return
        lease = errand.lease  # of a connection that had gone stale: it is the worker's turn again
        if lease is None:
            try:
                lease = await self._lease(errand, is_completion)
            except Shed as shed:
                errand.fail(shed.status, shed.message, "overloaded", RETRY_AFTER)
                return
            if lease is None:
                if errand.why:
                    message = f"no worker served the request; the last: {errand.why}"
                    errand.fail(502, message, "bad_gateway")
                else:
                    errand.fail(503, "no worker is available", "no_worker", RETRY_AFTER)
                return
            errand.takes(lease)
            connection = lease.endpoint.kept()
        else:
            connection = None
        if connection is None:
            try:
                connection = await self._connected(lease.endpoint)
            except (OSError, ValueError) as error:
                errand.refused(reason(error))
                return
        errand.sent(connection)

    async def _lease(self, errand: Errand, is_completion: bool) -> WorkerLease | None:
        """A worker that did not fail this request yet; None: there is none."""
        routed, directory = errand.routed, self._directory
        if routed is not None:
            avoided = frozenset(directory.ids_of(errand.tried))
            try:
                return await self._chooser.choose(
                    routed, f"{errand.lease_id}.{errand.attempts}", avoided
                )
            except NobodyChose as nobody:
                self._counts.unrouted[nobody.why] += 1
            among = (
                directory.may_serve(routed.model_name)
                if routed.worker_ids is None
                else directory.bases_of(routed.worker_ids)  # nobody else has the adapter
            )
        else:
            is_post = errand.request.method == b"POST"
            among = directory.may_serve(peeked_model(errand.request.body) if is_post else None)
        endpoint = self._rotation.next(errand.tried, among)
        return None if endpoint is None else RotationLease(endpoint)

    async def _connected(self, endpoint: Upstream) -> ClientConnection:
        self._counts.connections_made += 1
        connection = ClientConnection(endpoint)
        context = self._tls() if endpoint.url.is_secure else None
        await connect(connection, self._resolve, context, CONNECT_S, self._allowed)
        return connection
