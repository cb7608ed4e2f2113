"""The routes of a service. One `Route` says everything about a route: who may call it, what it
takes and answers, and which handler it has. The gate serves it, and /openapi.json describes it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from lean_selector.api.access import ADMIN, Refusal, Role
from lean_selector.api.bodies import (
    body_reader,
    query_of,
    reservation_id_param,
    shape_fault,
    worker_id_param,
)
from lean_selector.api.replies import Answer, LaterReply, Reply, is_json, sent, warning_line
from lean_selector.core.errors import SelectorError
from lean_selector.http.head import Request
from lean_selector.wire.selection_bodies import Ok

Run = Callable[[Request, bytes | None], Answer]  # the second argument is the path parameter

_log = logging.getLogger("lean_selector.server")
_NOTHING: Final = frozenset[str]()
_PARAMETERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "worker_id": worker_id_param,
    "reservation_id": reservation_id_param,
}


@dataclass(eq=False)
class Route:
    """A route and its handler.

    The handler gets the path parameter, then the body or the fields of the query, as far as the
    route has them. It returns a body, which is sent with `status`, or what `replies.sent` takes."""

    method: str
    path: str
    role: Role
    tag: str
    summary: str
    handler: Callable[..., Any]
    query: frozenset[str] = _NOTHING  # names of the fields that are read
    body: Any = None  # a struct
    is_body_optional: bool = False  # an invalid body is ignored, as in Dynamo, with a warning
    gives: Any = Ok  # the type of the answer, or a tuple of types; (): an answer without body
    media: str = "application/json"
    status: int = 200
    also: int = 0  # another status of this answer
    sheds: bool = False  # it may answer that all workers are busy
    warns: bool = False  # successful answers warn of unknown fields, as failed ones always do
    is_raw: bool = False  # the handler gets the Request and the encoded parameter
    # If access tokens are on: answers requests without a valid one; and encodes the answers 401 and
    # 403, if the route's errors do not have the form `{"error": ...}`.
    brief: Callable[[], object] | None = None
    refused: Callable[[Refusal], bytes] | None = None

    def __post_init__(self) -> None:
        self._read_param = _PARAMETERS.get(self.path.partition("{")[2].partition("}")[0])
        self._read_body = None if self.body is None else body_reader(self.body)
        self.run: Run = self.handler if self.is_raw else self._answer
        if self.warns:
            self.run = self._warned

    def fields(self) -> frozenset[str]:
        """Return the names of the body's fields."""
        return _NOTHING if self.body is None else frozenset(self.body.__struct_fields__)

    def _answer(self, request: Request, param: bytes | None) -> Answer:
        read_param, read_body = self._read_param, self._read_body
        if read_param is not None:
            assert param is not None
            parsed = read_param(param)
            if read_body is None:
                return sent(self.status, self.handler(parsed))
            if self.is_body_optional:
                return sent(self.status, self._handled(parsed, request))
            return sent(self.status, self.handler(parsed, read_body(request)))
        if read_body is None:
            if self.query:
                return sent(self.status, self.handler(query_of(request, self.query)))
            return sent(self.status, self.handler())
        return sent(self.status, self.handler(read_body(request)))

    def _warned(self, request: Request, param: bytes | None) -> Answer:
        """Answers with a warning of unknown fields. Of a registration it is logged too: it may be
        in use for long, for another model than meant."""
        from lean_selector.api.header_warnings import unread_fields

        answer = self._answer(request, param)
        warnings = unread_fields(request, self.fields())
        if not warnings or not isinstance(answer, bytes):
            return answer
        if self.role is ADMIN:
            _log.warning("%s %s: %s", self.method, self.path, "; ".join(warnings))
        head, _, body = answer.partition(b"\r\n\r\n")
        return b"%b\r\n%b\r\n%b" % (head, warning_line(warnings), body)

    def _handled(self, parsed: object, request: Request) -> object:
        """Calls the handler with the optional body, or with None."""
        if not request.body or not is_json(request.headers.content_type):
            return self.handler(parsed, None)
        assert self._read_body is not None
        try:
            body = self._read_body(request)
        except (SelectorError, msgspec.ValidationError) as error:
            fault = (
                shape_fault(request, error) if isinstance(error, msgspec.ValidationError) else error
            )
            done = self.handler(parsed, None)
            return Reply(self.status, done, [f"the body was ignored: {fault}"])
        return self.handler(parsed, body)


# -- changes that are on disk before they are answered ---------------------------------------------


class Saving(Protocol):
    """Writes changes of workers and settings to the state directory (--state-dir)."""

    def note(self) -> None: ...

    def when_saved(self, then: Callable[[], None]) -> bool: ...


def durable(routes: Sequence[Route], saving: Saving) -> tuple[Route, ...]:
    """Wraps the routes that need the role ADMIN, which change workers and settings. Their answers
    are delayed until the change has been written to disk or could not be written."""
    for route in routes:
        if route.role == ADMIN:
            route.run = _durable(route.run, saving)
    return tuple(routes)


def _durable(run: Run, saving: Saving) -> Run:
    def answer(request: Request, param: bytes | None) -> Answer:
        made = run(request, param)
        saving.note()
        if not isinstance(made, bytes):
            return made
        response: bytes = made
        later = LaterReply(is_being_made=True)
        return later if saving.when_saved(lambda: later.resolve(response)) else response

    return answer
