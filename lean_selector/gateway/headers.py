"""Header lines to forward, ids of requests, and answers of the gateway itself.

Fields about one connection are removed: the hop-by-hop fields of RFC 9110 section 7.6.1, and the
fields that the field `connection` names, except those that describe the body. The input was
validated: every line break is CRLF, and no line is folded."""

import functools
import os
import re
from itertools import count
from math import ceil
from time import monotonic
from typing import Final

from msgspec import UnsetType

from lean_selector.api.access import AccessTokens
from lean_selector.core.errors import BadRequest
from lean_selector.core.selection.shapes import Disaggregated
from lean_selector.gateway.model_request import session_id_of
from lean_selector.gateway.prompts import Routed
from lean_selector.http.response import encode_response
from lean_selector.wire.selection_bodies import OpenAiErrorBody

_HOP: Final = (
    rb"connection|keep-alive|proxy-connection|proxy-authenticate|proxy-authorization|te|trailer|"
    rb"transfer-encoding|upgrade"
)
# Without and with `accept-encoding`
_NOT_TO_WORKER: Final = tuple(
    re.compile(
        rb"\r\n(?:" + _HOP + rb"|host|expect|content-length|x-request-id|x-data-parallel-rank|"
        rb"x-prefill[^:\r]*+%b)[ \t]*:[^\r]*+(?=\r\n|\Z)" % more,
        re.IGNORECASE,
    )
    for more in (b"", b"|accept-encoding")
)
_NOT_TO_CLIENT: Final = re.compile(
    rb"\r\n(?:" + _HOP + rb"|x-request-id|x-lean-[^:\r]*)[ \t]*:[^\r]*+(?=\r\n|\Z)", re.IGNORECASE
)
_LENGTH: Final = re.compile(rb"\r\ncontent-length[ \t]*:[^\r]*+(?=\r\n|\Z)", re.IGNORECASE)
_AUTHORIZATION: Final = re.compile(rb"\r\nauthorization[ \t]*:[^\r]*+(?=\r\n|\Z)", re.IGNORECASE)
_TYPE: Final = re.compile(rb"\r\ncontent-type[ \t]*:[ \t]*+([^\r;]*+)", re.IGNORECASE)
_TRACEPARENT: Final = re.compile(rb"\r\ntraceparent[ \t]*:[ \t]*+([^\r]*+)(?=\r\n|\Z)", re.I)
_CONNECTION: Final = re.compile(rb"\r\nconnection[ \t]*:([^\r]*+)", re.IGNORECASE)
_REQUEST_ID: Final = re.compile(rb"\r\nx-request-id[ \t]*:[ \t]*([!-~]{1,200}+)[ \t]*+\r\n", re.I)
_SESSION: Final = re.compile(rb"\r\nx-session-id[ \t]*:[ \t]*+([!-~]++)[ \t]*+\r\n", re.I)
_WEBSOCKET: Final = re.compile(rb"\r\nupgrade[ \t]*:[^\r]*websocket", re.IGNORECASE)
_WORD: Final = re.compile(rb"[!-~]{1,256}+")
_SECONDS: Final = re.compile(rb"[0-9]{1,6}+(?:\.[0-9]{1,9}+)?+")
_PRIORITIES: Final = {b"high": 1, b"normal": 0, b"low": -1}
RETRY_AFTER: Final = b"retry-after: 1\r\n"
_MOST_RETRY_AFTER_S: Final = 60
_NONE: Final = frozenset[bytes]()
_USUAL: Final = frozenset({b"close", b"keep-alive", b"te", b"upgrade", b""})


def request_lines(
    section: bytes,
    *,
    without_codings: bool = False,
    drops_authorization: bool = False,
    drops_traceparent: bool = False,
) -> bytes:
    """Return the client's header lines for the worker, each preceded by CRLF. `section`: the
    request from its HTTP version to the blank line. `without_codings` drops `accept-encoding`."""
    lines = section[3:-4]
    named = _named(lines)
    lines = _NOT_TO_WORKER[without_codings].sub(b"", lines)
    if drops_authorization:
        lines = _AUTHORIZATION.sub(b"", lines)
    if drops_traceparent:
        lines = _TRACEPARENT.sub(b"", lines)
    return _without(lines, named) if named else lines


def without_authorization(section: bytes) -> bytes:
    """Return the header section without `authorization`, which is for the gateway only."""
    return _AUTHORIZATION.sub(b"", section)


@functools.lru_cache(maxsize=256)  # servers repeat theirs
def answer_lines(lines: bytes, *, without_length: bool = False) -> bytes:
    """Converts a worker's header lines to lines for the client, each preceded by CRLF."""
    named = _named(lines)
    lines = _NOT_TO_CLIENT.sub(b"", lines)
    if without_length:
        lines = _LENGTH.sub(b"", lines)
    return _without(lines, named) if named else lines


@functools.lru_cache(maxsize=256)
def is_stream(lines: bytes, streams: bool) -> bool:
    """Whether a worker's answer consists of server-sent events. `streams`: it was requested."""
    found = _TYPE.search(lines)
    return streams if found is None else found[1].rstrip(b" \t").lower() == b"text/event-stream"


def request_id_of(section: bytes) -> bytes | None:
    """Return the request id that the client sent, if it is a single word."""
    found = _REQUEST_ID.search(section)
    return None if found is None else found[1]


def read_session(routed: Routed, section: bytes) -> None:
    """Sets the session id that the client sent, if it is a single word, and the body has none."""
    if routed.session_id is None and (found := _SESSION.search(section)) is not None:
        routed.session_id = session_id_of(found[1].decode("ascii"))


def _line(name: str) -> re.Pattern[bytes]:
    return re.compile(rb"\r\n%b[ \t]*:[ \t]*+([^\r]*+)\r\n" % re.escape(name.encode("ascii")), re.I)


def _value(line: re.Pattern[bytes], section: bytes) -> bytes | None:
    found = line.search(section)
    return None if found is None else found[1].rstrip(b" \t")


_TIMEOUT: Final = _line("x-request-timeout-secs")


class QueueHeaders:
    """Reads what the headers of a request say about its place in the queue."""

    def __init__(
        self,
        fairness: str,
        priority: str,
        tokens: AccessTokens | None,
        *,
        trusts: bool,
        by_name: bool,
    ) -> None:
        """`fairness`, `priority`: names of headers. `trusts`: without tokens, every request may be
        urgent. `by_name`: tokens are those of clients, so their names come before the header."""
        self._fairness, self._priority = _line(fairness), _line(priority)
        self._priority_name = priority
        self._tokens, self._trusts, self._by_name = tokens, trusts, by_name

    def read(self, routed: Routed, section: bytes, credential: bytes | None) -> None:
        """Set the fairness id: the name of the request's token, or else the header, if it is one
        word of at most 256 characters. Set the strict priority: the header's, or else the body's,
        which is there already; at most 0 without the right to more. Set the deadline, from now on.
        Raises BadRequest."""
        tokens = self._tokens
        name = None if tokens is None or not self._by_name else tokens.names.get(credential)
        if name is None:
            word = _value(self._fairness, section) or b""
            name = "" if _WORD.fullmatch(word) is None else word.decode("ascii")
        routed.fairness_id = name
        priority = _value(self._priority, section)
        if priority is not None:
            if priority.lower() not in _PRIORITIES:
                raise BadRequest(f"{self._priority_name}: expected high, normal or low")
            routed.strict_priority = _PRIORITIES[priority.lower()]
        if not (self._trusts if tokens is None else credential in tokens.urgent):
            routed.strict_priority = min(routed.strict_priority, 0)
        timeout = _value(_TIMEOUT, section)
        if timeout is not None:
            if _SECONDS.fullmatch(timeout) is None:
                raise BadRequest("x-request-timeout-secs: expected seconds, up to 999999")
            routed.deadline = monotonic() + float(timeout)


def traceparent_of(section: bytes) -> str | None:
    """Return the client's `traceparent` (W3C Trace Context), unvalidated."""
    found = _TRACEPARENT.search(section)
    return None if found is None else found[1].decode("latin-1").strip()[:64]


def wants_websocket(section: bytes) -> bool:
    return _WEBSOCKET.search(section) is not None


def _named(lines: bytes) -> frozenset[bytes]:
    """Return the fields that a `connection` line names, except those that are always removed, and
    those of the body (`content-length`, ...), without which its reader waits or misreads."""
    found = _CONNECTION.findall(lines)
    if not found:
        return _NONE
    named = frozenset(map(bytes.strip, b",".join(found).lower().split(b","))) - _USUAL
    return frozenset([each for each in named if not each.startswith(b"content-")])


def _without(lines: bytes, names: frozenset[bytes]) -> bytes:
    kept = [
        line
        for line in lines.split(b"\r\n")
        if line.partition(b":")[0].rstrip(b" \t").lower() not in names
    ]
    return b"\r\n".join(kept)


_PROCESS: Final = os.urandom(8).hex()
_numbers: Final = count(1)


def new_id() -> str:
    """Return a new id that is unique across processes."""
    return f"{_PROCESS}-{next(_numbers):x}"


def retry_after(wait_s: float) -> bytes:
    """Return the header line `retry-after`, with 1 to 60 seconds."""
    return b"retry-after: %d\r\n" % min(max(1, ceil(wait_s)), _MOST_RETRY_AFTER_S)


def id_line(request_id: bytes) -> bytes:
    """Return the header line with the request id, which every answer has."""
    return b"x-request-id: %b\r\n" % request_id


def pair_line(told: Disaggregated | UnsetType) -> bytes:
    """Return the header line that says whether a pair of workers serves a request, and why; empty
    if nobody asked for a pair."""
    return b"" if isinstance(told, UnsetType) else b"x-lean-pd: %b\r\n" % pair_text(told).encode()


def pair_text(told: Disaggregated) -> str:
    return f"{'pair' if told.used else 'local'}; {told.reason}"


def refusal(status: int, message: str, code: str | None = None, extra: bytes = b"") -> bytes:
    """Return a complete error response. `extra` has header lines, each followed by CRLF."""
    return encode_response(status, OpenAiErrorBody.encoded(status, message, code), extra=extra)
