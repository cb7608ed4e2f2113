"""The access log, which has one line per request. `with_access_log` adds the log to an application.

Ids of workers and reservations are taken from the path, the body and the answer; a body that is not
a JSON object yields no ids. Text from clients is truncated here."""

import logging
import re
from time import perf_counter
from typing import Final

import msgspec

from lean_selector.api.gate import HUNG_UP
from lean_selector.api.logs import ACCESS_LOG
from lean_selector.api.routes import Route
from lean_selector.http.head import Request
from lean_selector.http.protocol import App
from lean_selector.http.response import PendingReply, Response, status_of
from lean_selector.http.routes_by_path import RouteTable, percent_decode
from lean_selector.wire.selection_bodies import BodyIds

MAX_ID_CHARACTERS = 256  # of text from a client; uuids have 36
MAX_TARGET_CHARACTERS = 1024

# Headers in answers of POST /route, and the log fields that they fill.
_IN_HEADERS: Final = {b"x-reservation-id": "reservation_id", b"x-lean-prompt": "prompt"}
_HEADERS: Final = re.compile(rb"\r\n(%b): ([!-~]+)" % b"|".join(_IN_HEADERS))

_log = logging.getLogger(ACCESS_LOG)

_decode = msgspec.json.Decoder(BodyIds).decode


def with_access_log(app: App, routes: tuple[Route, ...]) -> App:
    """Wraps `app`, so that a line is logged when a request is answered."""
    table: RouteTable[str] = RouteTable([(each.method, each.path, each.path) for each in routes])

    def logged(request: Request) -> bytes | PendingReply:
        started = perf_counter()
        answer = app(request)
        seconds = perf_counter() - started
        fields = _said_in(table, request)
        if isinstance(answer, bytes):
            _write(fields, status_of(answer), answer, seconds)
            return answer

        # Only the fields are kept until then, because the body may be large.
        def write(status: bytes, response: Response) -> None:
            _write(fields, status, response, perf_counter() - started)

        answer.observe(
            lambda response: write(status_of(response), response), lambda: write(HUNG_UP, b"")
        )
        return answer

    return logged


def _said_in(table: RouteTable[str], request: Request) -> dict[str, object]:
    """Return the log fields that are known before the answer, in the order of the log line."""
    found = table.match(request.method, request.path)
    fields: dict[str, object] = {
        "method": request.method.decode("latin-1")[:MAX_ID_CHARACTERS],
        "route": None,
        "status": 0,
        "duration_us": 0,
    }
    if isinstance(found, tuple):
        route, param = found
        fields["route"] = route
        if param is not None and "*}" not in route:
            name = "worker_id" if "{worker_id}" in route else "reservation_id"
            fields[name] = percent_decode_or_raw(param)
    else:
        fields["path"] = request.path.decode("latin-1")[:MAX_TARGET_CHARACTERS]
    if request.method == b"POST":
        fields.update(_ids(request.body))
    if request.headers.traceparent is not None:
        fields["traceparent"] = request.headers.traceparent.decode("latin-1")[:MAX_ID_CHARACTERS]
    return fields


def _write(fields: dict[str, object], status: bytes, response: Response, seconds: float) -> None:
    fields["status"] = int(status)
    fields["duration_us"] = round(seconds * 1e6)
    if fields["method"] == "POST":
        # A generated reservation id is only in the answer; that of a refused request only in the
        # body.
        head, _, answer = response.partition(b"\r\n\r\n")
        fields.update(_ids(answer))
        fields.update(_told_in(head))
    _log.info("request", extra=fields)


def _told_in(head: bytes | bytearray) -> dict[str, object]:
    """Return the log fields that are taken from an answer's headers."""
    return {
        _IN_HEADERS[bytes(name)]: value.decode("latin-1")[:MAX_ID_CHARACTERS]
        for name, value in _HEADERS.findall(head)
    }


def percent_decode_or_raw(param: bytes) -> str:
    try:
        return percent_decode(param)[:MAX_ID_CHARACTERS]
    except ValueError:
        return param.decode("latin-1")[:MAX_ID_CHARACTERS]


def _ids(body: bytes | bytearray) -> dict[str, object]:
    try:
        ids = _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    found = msgspec.structs.asdict(ids).items()
    return {name: value[:MAX_ID_CHARACTERS] for name, value in found if isinstance(value, str)}
