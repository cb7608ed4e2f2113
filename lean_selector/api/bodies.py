"""Reads the parts of a request: its body, its query, and the id in its path.

Checks a body's content type and size, decodes the body, and reports what is wrong with it, in the
order of spec selection.md 1.1. Decision D8 says how strictly JSON is parsed."""

import re
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from lean_selector.api.replies import is_json
from lean_selector.core.errors import BadRequest, SelectorError
from lean_selector.core.numbers import U64_MAX
from lean_selector.http.head import Request
from lean_selector.http.response import JSON
from lean_selector.http.routes_by_path import RepeatedQueryField, parse_query, percent_decode
from lean_selector.wire.body_text import (
    LONG_PROMPT_BYTES,
    MOST_COSTLY_NUMBERS,
    has_costly_numbers,
    json_excess,
    long_json_reader,
    messagepack_excess,
)
from lean_selector.wire.prompt_forms import binary_form, short_form
from lean_selector.wire.selection_bodies import PromptFields

Query = dict[str, str]
T = TypeVar("T")

MSGPACK = b"application/msgpack"
NOT_JSON = "Expected request with `Content-Type: application/json`"
TOO_LARGE = "Failed to buffer the request body: length limit exceeded"
# A body below this size cannot block the loop for long, whatever its content.
LONG_BODY_BYTES: Final = 32 * 1024
COSTLY_NUMBERS = f"more than {MOST_COSTLY_NUMBERS} numbers with an exponent of three digits"
SCOPE_FIELDS = frozenset({"model_name", "tenant_id", "routing_group"})
DETAIL = frozenset({"detail"})
_U64 = re.compile(r"\+?0*([0-9]{1,20})")
_WORDS = {"": True, "true": True, "1": True, "false": False, "0": False}


class BadBody(SelectorError):
    """The error for a request body that the route does not accept."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BadQuery(BadRequest):
    def __init__(self, fault: str) -> None:
        super().__init__(f"Failed to deserialize query string: {fault}")


# -- bodies ----------------------------------------------------------------------------------------


def body_reader(body_type: type[T]) -> Callable[[Request], T]:
    """Return a decoder for a route's body. All bodies may be JSON; bodies with a prompt may also
    be MessagePack. The decoder raises BadBody, or msgspec's ValidationError."""
    decode: Callable[[bytes | bytearray], T] = msgspec.json.Decoder(body_type).decode
    if issubclass(body_type, PromptFields):
        return _prompt_reader(body_type, decode)

    def read(request: Request) -> T:
        if request.headers.content_type != JSON or request.body_too_large:
            _check_kind(request)
        return _read_json(decode, request.body)

    return read


def _prompt_reader(
    body_type: type[T], decode: Callable[[bytes | bytearray], T]
) -> Callable[[Request], T]:
    """Return a decoder for bodies with a prompt (JSON, MessagePack); fast for long bodies."""
    read_binary = _binary_reader(body_type)
    read_long = long_json_reader(body_type)
    decode_short: Callable[[bytes | bytearray], T] = msgspec.json.Decoder(
        short_form(body_type)
    ).decode

    def read(request: Request) -> T:
        content_type = request.headers.content_type
        if content_type != JSON or request.body_too_large:
            if names_msgpack(content_type):
                return read_binary(request)
            _check_kind(request)
        if len(request.body) < LONG_PROMPT_BYTES:
            try:
                return _read_json(decode_short, request.body)
            except msgspec.ValidationError:  # perhaps because of a list that a later key replaces
                return _read_json(decode, request.body)
        fields = read_long(request.body)
        return _read_json(decode, request.body) if fields is None else fields

    return read


def _binary_reader(body_type: type[T]) -> Callable[[Request], T]:
    binary_type: type[T] = binary_form(body_type)
    decode = msgspec.msgpack.Decoder(binary_type).decode
    names = frozenset(binary_type.__struct_fields__)  # type: ignore[attr-defined]

    def read(request: Request) -> T:
        if request.body_too_large:
            raise BadBody(413, TOO_LARGE)
        if excess := messagepack_excess(request.body, names):
            raise _not_parsed("MessagePack", excess)
        try:
            return decode(request.body)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _not_parsed("MessagePack", error) from None

    return read


def names_msgpack(content_type: bytes | None) -> bool:
    return content_type is not None and MSGPACK in content_type.lower()


def _check_kind(request: Request) -> None:
    content_type = request.headers.content_type
    if content_type != JSON and not is_json(content_type):
        raise BadBody(415, NOT_JSON)
    if request.body_too_large:
        raise BadBody(413, TOO_LARGE)


def _read_json(decode: Callable[[bytes | bytearray], T], body: bytes | bytearray) -> T:
    try:
        if not body.isascii():
            body.decode()
        if excess := json_excess(body):
            raise _not_parsed("JSON", excess)
        if len(body) >= LONG_BODY_BYTES and has_costly_numbers(body):
            raise _not_parsed("JSON", COSTLY_NUMBERS)
        return decode(body)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_parsed("JSON", error) from None


def shape_fault(request: Request, error: msgspec.ValidationError) -> BadBody:
    """Converts a decoder's error about a wrong field to one with the status 422."""
    form = "MessagePack" if names_msgpack(request.headers.content_type) else "JSON"
    return BadBody(422, f"Failed to deserialize the {form} body into the target type: {error}")


def _not_parsed(form: str, fault: object) -> BadBody:
    return BadBody(400, f"Failed to parse the request body as {form}: {fault}")


# -- queries ---------------------------------------------------------------------------------------


def query_of(request: Request, known: frozenset[str] = SCOPE_FIELDS) -> Query:
    """Return the `known` fields of the query. The field `routing_group` becomes `tenant_id`."""
    if not request.query:
        return {}
    try:
        query = parse_query(request.query, known)
    except RepeatedQueryField as error:
        raise BadQuery(str(error)) from None
    group = query.pop("routing_group", None)
    if group is not None and query.setdefault("tenant_id", group) != group:
        raise BadQuery("tenant_id and routing_group are two names of one thing and must not differ")
    return query


def wants_detail(query: Query) -> bool:
    """Whether a query has `detail=true`."""
    try:
        return _WORDS[query.get("detail", "false").lower()]
    except KeyError:
        raise BadQuery("detail must be true or false") from None


# -- ids in the path -------------------------------------------------------------------------------


def worker_id_param(param: bytes) -> int:
    """Parses the worker id in a path: a decimal u64. Percent-encoding, leading zeros and a plus
    sign are accepted."""
    text = _text_param("worker_id", param)
    found = _U64.fullmatch(text)
    if found is not None and (value := int(found[1])) <= U64_MAX:
        return value
    raise BadRequest(f"Invalid URL: Cannot parse `{text}` to a `u64`")


def reservation_id_param(param: bytes) -> str:
    return _text_param("reservation_id", param)


def _text_param(name: str, param: bytes) -> str:
    try:
        return percent_decode(param)
    except ValueError:
        raise BadRequest(f"Invalid URL: Invalid UTF-8 in `{name}`") from None
