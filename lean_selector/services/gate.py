"""What every request passes on its way to a handler and back.

Route, path parameter, content type, body size, decoding, the call, encoding; errors become their
status and `{"error": ...}`. Handlers translate between wire and core and do none of this. The order
of the checks is that of spec selection.md 1.1; strictness of JSON as decision D8.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, TypeVar

import msgspec

from lean_selector.core.errors import AllWorkersBusy, BadRequest, SelectorError
from lean_selector.core.u64 import U64_MAX
from lean_selector.http1.protocol import PendingReply
from lean_selector.http1.reader import Request
from lean_selector.http1.response import JSON, encode_response, status_of
from lean_selector.http1.router import (
    Match,
    MethodNotAllowed,
    RepeatedQueryField,
    RouteTable,
    parse_query,
    percent_decode,
)
from lean_selector.observing.metrics import FASTEST_S, LATENCY_BOUNDS_S, RouteMeter
from lean_selector.wire.body_text import (
    MOST_COSTLY_NUMBERS,
    has_costly_numbers,
    json_fault,
    messagepack_fault,
)
from lean_selector.wire.busy import overload_body
from lean_selector.wire.prompt import PromptFields, binary_form, prompt_decoder
from lean_selector.wire.selection import ErrorBody

Answer = bytes | PendingReply
Endpoint = Callable[[Request, bytes | None], Answer]
Route = tuple[str, str, Endpoint]  # method, path template, what answers
Query = dict[str, str]
T = TypeVar("T")

_log = logging.getLogger("lean_selector.http")
_encode = msgspec.json.Encoder().encode

NOT_JSON = "Expected request with `Content-Type: application/json`"
MSGPACK = b"application/msgpack"
LONGEST_TRANSCODED = 64 * 1024  # a millisecond of work; only dumps are longer
# A body as short as this cannot hold the loop for long, whatever it says.
LONG_BODY_BYTES = 32 * 1024
COSTLY_NUMBERS = (
    "Failed to parse the request body as JSON: "
    f"more than {MOST_COSTLY_NUMBERS} numbers with an exponent of three digits"
)
TOO_LARGE = "Failed to buffer the request body: length limit exceeded"
# Where the document's clients begin: 2 ** 0 seconds, and up to one more by chance.
RETRY_AFTER = b"retry-after: 1\r\n"
_TWO, _ZERO = b"20"
HUNG_UP = b"499"  # in the counts only: the client left before its answer
QUERY_FIELDS = frozenset({"model_name", "tenant_id", "routing_group"})


def reply(status: int, body: object) -> bytes:
    """A finished JSON answer."""
    return encode_response(status, _encode(body), JSON)


def error_reply(status: int, text: str, extra: bytes = b"") -> bytes:
    return encode_response(status, _encode(ErrorBody(text)), JSON, extra)


class Gate:
    """The application that the HTTP protocol calls: request in, answer out, never raises.

    `meters` count what became of the requests of each route; the last is for those of none.
    """

    def __init__(self, routes: Iterable[Route], overload_status: int = 503) -> None:
        """`overload_status` answers what is shed because all workers are busy."""
        metered = [
            (method, path, (endpoint, RouteMeter(method, path)))
            for method, path, endpoint in routes
        ]
        self._table: RouteTable[tuple[Endpoint, RouteMeter]] = RouteTable(metered)
        self._unrouted = RouteMeter("", "none")
        self.meters = [*(meter for _, _, (_, meter) in metered), self._unrouted]
        self._overload_status = overload_status

    def __call__(self, request: Request) -> Answer:
        started = perf_counter()
        found = self._table.match(request.method, request.path)
        if isinstance(found, Match):
            endpoint, meter = found.value
            try:
                answer = endpoint(request, found.param)
            except Exception as error:
                answer = self._failed(request, meter, error)
            if not isinstance(answer, bytes):
                _meter_later(answer, meter, started)
                if _is_msgpack(request.accept):
                    answer.reshape = as_msgpack
                return answer
        elif isinstance(found, MethodNotAllowed):
            meter = self._unrouted
            answer = error_reply(405, "method not allowed", b"allow: %b\r\n" % found.allow)
        else:
            meter = self._unrouted
            answer = error_reply(404, "route not found")
        # RouteMeter.add, spelled out: a quarter of a microsecond, and a call would double it
        seconds = perf_counter() - started
        if seconds <= FASTEST_S:
            meter.fastest += 1
        else:
            meter.slower[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        meter.seconds += seconds
        # status_of, spelled out for the same reason: not 200, and no other 2?0 is used
        if answer[9] != _TWO or answer[11] != _ZERO:
            status = status_of(answer)
            meter.others[status] = meter.others.get(status, 0) + 1
        accept = request.headers.accept
        return as_msgpack(answer) if accept is not None and _is_msgpack(accept) else answer

    def _failed(self, request: Request, meter: RouteMeter, error: Exception) -> bytes:
        """The answer to a request that a handler did not take."""
        if isinstance(error, AllWorkersBusy):
            meter.shed += 1
            body = _encode(overload_body(error.message, self._overload_status))
            return encode_response(self._overload_status, body, JSON, RETRY_AFTER)
        if isinstance(error, SelectorError):
            return error_reply(error.status, error.message)
        if isinstance(error, msgspec.ValidationError):
            return error_reply(*_judged(request, error))
        _log.error(
            "a handler failed", exc_info=error, extra={"path": request.path.decode("latin-1")}
        )
        return error_reply(500, "internal error")


def _meter_later(reply: PendingReply, meter: RouteMeter, started: float) -> None:
    """Counts an answer that is still to come, or that its client hangs up on."""
    reply.observe(
        lambda response: meter.add(perf_counter() - started, status_of(response)),
        lambda: meter.add(perf_counter() - started, HUNG_UP),
    )


# -- the kinds of routes --------------------------------------------------------------------------


def plain(handler: Callable[[], object], status: int = 200) -> Endpoint:
    """No input at all."""

    def answer(request: Request, param: bytes | None) -> Answer:
        return _sent(status, handler())

    return answer


def with_query(handler: Callable[[Query], object], status: int = 200) -> Endpoint:
    """Filters in the query string: model_name, and tenant_id under either of its names."""

    def answer(request: Request, param: bytes | None) -> Answer:
        return _sent(status, handler(_query(request)))

    return answer


def with_param(
    parse: Callable[[bytes], T], handler: Callable[[T], object], status: int = 200
) -> Endpoint:
    """A path parameter, and a body that nobody reads."""

    def answer(request: Request, param: bytes | None) -> Answer:
        assert param is not None
        return _sent(status, handler(parse(param)))

    return answer


def with_body(body_type: type[T], handler: Callable[[T], object], status: int = 200) -> Endpoint:
    """A JSON body; where it holds a prompt, or a MessagePack one."""
    read = _reader(body_type)
    binary: type[Any] = binary_form(body_type) if issubclass(body_type, PromptFields) else body_type
    read_binary = _binary_reader(binary) if binary is not body_type else None

    def answer(request: Request, param: bytes | None) -> Answer:
        kind = request.headers.content_type
        if kind != JSON and read_binary is not None and _is_msgpack(kind):
            body = read_binary(request)
        else:
            body = read(request)
        if isinstance(body, bytes):
            return body
        try:
            return _sent(status, handler(body))
        except SelectorError:
            if isinstance(body, PromptFields):
                body.check_shape()  # a wrong shape is named before any other fault
            raise

    return answer


def with_param_and_body(
    parse: Callable[[bytes], Any],
    body_type: type[T],
    handler: Callable[[Any, T], object],
    status: int = 200,
) -> Endpoint:
    """A path parameter and a JSON body; the parameter is judged first."""
    read = _reader(body_type)

    def answer(request: Request, param: bytes | None) -> Answer:
        assert param is not None
        parsed = parse(param)
        body = read(request)
        return body if isinstance(body, bytes) else _sent(status, handler(parsed, body))

    return answer


def _reader(body_type: type[T]) -> Callable[[Request], T | bytes]:
    """What turns a request into its decoded body, or into the answer that refuses it.

    Raises msgspec.ValidationError for a body of the wrong shape.
    """
    decode: Callable[[bytes | bytearray], T] = msgspec.json.Decoder(body_type).decode
    if issubclass(body_type, PromptFields):
        decode = prompt_decoder(body_type)

    def read(request: Request) -> T | bytes:
        content_type = request.headers.content_type
        if content_type != JSON or request.body_too_large or not request.body.isascii():
            refusal = _refused(request)
            if refusal is not None:
                return refusal
        if len(request.body) >= LONG_BODY_BYTES and has_costly_numbers(request.body):
            return error_reply(400, COSTLY_NUMBERS)
        try:
            return decode(request.body)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return error_reply(400, f"Failed to parse the request body as JSON: {error}")

    return read


def _binary_reader(body_type: type[T]) -> Callable[[Request], T | bytes]:
    """What `_reader` does, for MessagePack."""
    decode = msgspec.msgpack.Decoder(body_type).decode

    def read(request: Request) -> T | bytes:
        if request.body_too_large:
            return error_reply(413, TOO_LARGE)
        try:
            return decode(request.body)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return error_reply(400, f"Failed to parse the request body as MessagePack: {error}")

    return read


def _sent(status: int, result: object) -> Answer:
    if isinstance(result, (bytes, PendingReply)):
        return result
    return encode_response(status, _encode(result), JSON)


# -- what is checked ------------------------------------------------------------------------------


def worker_id_param(param: bytes) -> int:
    """A u64 in a path: decimal digits, leading zeros and a plus sign allowed, after decoding."""
    text = _text_param("worker_id", param)
    digits = text[1:] if text.startswith("+") else text
    if digits.isascii() and digits.isdigit():
        significant = digits.lstrip("0") or "0"
        if len(significant) <= 20 and (value := int(significant)) <= U64_MAX:
            return value
    raise BadRequest(f"Invalid URL: Cannot parse `{text}` to a `u64`")


def reservation_id_param(param: bytes) -> str:
    return _text_param("reservation_id", param)


def _text_param(name: str, param: bytes) -> str:
    try:
        return percent_decode(param)
    except ValueError:
        raise BadRequest(f"Invalid URL: Invalid UTF-8 in `{name}`") from None


def _query(request: Request) -> Query:
    if not request.query:
        return {}
    try:
        query = parse_query(request.query, QUERY_FIELDS)
    except RepeatedQueryField as error:
        raise BadRequest(f"Failed to deserialize query string: {error}") from None
    group = query.pop("routing_group", None)
    if group is not None and query.setdefault("tenant_id", group) != group:
        raise BadRequest(
            "Failed to deserialize query string: tenant_id and routing_group are two names of one "
            "thing and must not differ"
        )
    return query


def _refused(request: Request) -> bytes | None:
    """The answer to a body that is not looked at, or None."""
    content_type = request.content_type
    if content_type != JSON and not _is_json(content_type):
        return error_reply(415, NOT_JSON)
    if request.body_too_large:
        return error_reply(413, TOO_LARGE)
    if not request.body.isascii():
        try:
            request.body.decode()
        except UnicodeDecodeError as error:
            return error_reply(400, f"Failed to parse the request body as JSON: {error}")
    return None


def _is_msgpack(header: bytes | None) -> bool:
    """Whether a content-type or accept header names MessagePack."""
    return header is not None and MSGPACK in header.lower()


def as_msgpack(response: bytes) -> bytes:
    """A JSON answer as MessagePack, unless it is a long one: its content-type says what it is."""
    head, _, body = response.partition(b"\r\n\r\n")
    if len(body) > LONGEST_TRANSCODED or b"\r\ncontent-type: application/json\r\n" not in head:
        return response
    packed = msgspec.msgpack.encode(msgspec.json.decode(body))
    head = head.replace(b"content-type: application/json", b"content-type: " + MSGPACK)
    before, _, after = head.partition(b"content-length: ")
    rest = after.partition(b"\r\n")[2]
    lines = b"content-length: %d\r\n" % len(packed) + (rest + b"\r\n" if rest else b"")
    return b"%b%b\r\n%b" % (before, lines, packed)


def _is_json(content_type: bytes | None) -> bool:
    """`application/json` or `application/*+json`, in any case, parameters allowed."""
    if not content_type:
        return False
    media = content_type.partition(b";")[0].strip().lower()
    return media == JSON or (media.startswith(b"application/") and media.endswith(b"+json"))


def _judged(request: Request, error: msgspec.ValidationError) -> tuple[int, str]:
    """Status and text for a body of the wrong shape: 400 if it is broken as a whole (D8)."""
    is_binary = _is_msgpack(request.content_type)
    form = "MessagePack" if is_binary else "JSON"
    fault = messagepack_fault(request.body) if is_binary else json_fault(request.body)
    if fault:
        return 400, f"Failed to parse the request body as {form}: {fault}"
    return 422, f"Failed to deserialize the {form} body into the target type: {error}"
