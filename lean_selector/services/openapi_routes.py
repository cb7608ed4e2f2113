"""GET /openapi.json: the document of a service, made when it is first asked for.

Until then nothing of it is imported. It is the same for as long as the process lives. It is made in
a thread, for it takes longer than others should wait.
"""

import asyncio
import logging

from lean_selector.access.roles import NAMES, READ
from lean_selector.http.response import JSON, encode_response
from lean_selector.services.gate import Route, plain
from lean_selector.services.replies import INTERNAL_ERROR, LaterReply

_log = logging.getLogger("lean_selector.http")


class OpenApiRoutes:
    """`document`: its name in `openapi.services`; `routes`: all that it tells of but this one."""

    def __init__(
        self, document: str, routes: tuple[Route, ...], *, asks_tokens: bool = False
    ) -> None:
        self._document = document
        self._asks_tokens = asks_tokens
        self._roles = {
            (method, path): NAMES.get(role, "open")
            for method, path, role, _ in (*routes, *self.routes())
        }
        self._text = b""
        self._waiting: list[LaterReply] = []

    def routes(self) -> tuple[Route, ...]:
        return (("GET", "/openapi.json", READ, plain(self._answer)),)

    def _answer(self) -> bytes | LaterReply:
        if self._text:
            return encode_response(200, self._text, JSON)
        pending = LaterReply(is_being_made=True)
        self._waiting.append(pending)
        if len(self._waiting) == 1:
            work = asyncio.get_running_loop().run_in_executor(None, self._made)
            work.add_done_callback(self._tell)
        return pending

    def _made(self) -> bytes:
        """In a thread."""
        from lean_selector.openapi.services import service_document

        return service_document(
            self._document, list(self._roles), self._roles, asks_tokens=self._asks_tokens
        )

    def _tell(self, work: "asyncio.Future[bytes]") -> None:
        waiting, self._waiting = self._waiting, []
        if work.cancelled():
            return  # with the loop
        error = work.exception()
        if error is not None:
            _log.error("GET /openapi.json failed", exc_info=error)
            for pending in waiting:
                pending.answer(500, INTERNAL_ERROR)
            return
        self._text = work.result()
        for pending in waiting:
            pending.finish(encode_response(200, self._text, JSON))
