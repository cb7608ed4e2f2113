"""What an answer says in headers beside a recorded body: known models, and fields that nobody read.

Looked for only where a request has failed, and where a worker is registered or reported on: no
request that is given a worker pays for it.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

import msgspec

from lean_selector.core.errors import NoWorkers
from lean_selector.http.head import Request
from lean_selector.services.gate import Endpoint
from lean_selector.services.media_types import is_json
from lean_selector.services.replies import Answer, printable, warning_line
from lean_selector.wire.selection import (
    ProjectionRequest,
    ReservationRequest,
    SelectAndReserveRequest,
    SelectRequest,
    WorkerPatch,
    WorkerRequest,
)
from lean_selector.wire.selection_16 import (
    ProjectionRequest16,
    ReservationRequest16,
    SelectAndReserveRequest16,
    SelectRequest16,
    WorkerPatch16,
    WorkerRequest16,
)
from lean_selector.wire.worker_health import WorkerReport

_MOST_MODELS: Final = 32
_MOST_MODELS_BYTES: Final = 2000
_MOST_FIELDS: Final = 64  # of a body, that are looked at
_LONGEST_BODY: Final = 1 << 20
_LONGEST_FIELD: Final = 64
# What other APIs call it.
_OTHER_NAMES: Final = {
    "model": "model_name",
    "model_id": "model_name",
    "tenant": "tenant_id",
    "prompt": "token_ids",
    "prompt_token_ids": "token_ids",
    "input_ids": "token_ids",
    "tokens": "token_ids",
    "messages": "token_ids",
    "lora": "lora_name",
    "salt": "cache_salt",
    "num_tokens": "isl_tokens",
    "id": "worker_id",
    "url": "endpoint",
    "address": "endpoint",
    "page_size": "block_size",
    "dp_size": "data_parallel_size",
    "dp_start": "data_parallel_start_rank",
    "request_id": "reservation_id",
    "reservation_id": "selection_id",
    "rank": "dp_rank",
    "data_parallel_rank": "dp_rank",
    "status": "outcome",
    "result": "outcome",
    "ttft": "ttft_ms",
    "ttft_s": "ttft_ms",
    "ttft_seconds": "ttft_ms",
    "cached": "cached_tokens",
}
BODY_FIELDS: Final = {
    "/select": frozenset(SelectRequest.__struct_fields__),
    "/select_and_reserve": frozenset(SelectAndReserveRequest.__struct_fields__),
    "/reservations": frozenset(ReservationRequest.__struct_fields__),
    "/potential_loads": frozenset(ProjectionRequest.__struct_fields__),
    "/overlap_scores": frozenset(ProjectionRequest.__struct_fields__),
    "/workers": frozenset(WorkerRequest.__struct_fields__),
    "/workers/{worker_id}": frozenset(WorkerPatch.__struct_fields__),
    "/workers/{worker_id}/report": frozenset(WorkerReport.__struct_fields__),
}
BODY_FIELDS_16: Final = {
    "/select": frozenset(SelectRequest16.__struct_fields__),
    "/select_and_reserve": frozenset(SelectAndReserveRequest16.__struct_fields__),
    "/reservations": frozenset(ReservationRequest16.__struct_fields__),
    "/potential_loads": frozenset(ProjectionRequest16.__struct_fields__),
    "/overlap_scores": frozenset(ProjectionRequest16.__struct_fields__),
    "/workers": frozenset(WorkerRequest16.__struct_fields__),
    "/workers/{worker_id}": frozenset(WorkerPatch16.__struct_fields__),
    "/workers/{worker_id}/report": frozenset(WorkerReport.__struct_fields__),
}
_NO_FIELDS: Final = frozenset[str]()
_read_keys: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def known_models_line(models: Iterable[str]) -> bytes:
    """The header line `x-known-models`: JSON strings joined by ", ", as many as there is room for,
    and "..." in place of the others; nothing when there are none."""
    shown: list[str] = []
    size = 0
    for model in models:
        text = printable(msgspec.json.encode(model).decode())
        size += len(text)
        if len(shown) == _MOST_MODELS or size > _MOST_MODELS_BYTES:
            shown.append("...")
            break
        shown.append(text)
    return b"x-known-models: %b\r\n" % ", ".join(shown).encode("ascii") if shown else b""


def refusal_lines(request: Request, error: Exception, route: str) -> bytes:
    """Header lines of an answer that is an error."""
    return _refusal_lines(request, error, BODY_FIELDS.get(route, _NO_FIELDS))


def refusal_lines_16(request: Request, error: Exception, route: str) -> bytes:
    """The same in the 1.6 dialect."""
    return _refusal_lines(request, error, BODY_FIELDS_16.get(route, _NO_FIELDS))


def _refusal_lines(request: Request, error: Exception, fields: frozenset[str]) -> bytes:
    lines, warnings = b"", unread_fields(request, fields)
    if isinstance(error, NoWorkers):
        lines = known_models_line(error.known_models)
        if error.other_tenants is not None:
            warnings.insert(0, error.other_tenants)
    return lines + warning_line(warnings) if warnings else lines


def warning_of_fields(fields: frozenset[str], endpoint: Endpoint) -> Endpoint:
    """An endpoint whose body has these fields, and that warns also where it succeeds."""

    def answer(request: Request, param: bytes | None) -> Answer:
        result = endpoint(request, param)
        warnings = unread_fields(request, fields)
        if not warnings or not isinstance(result, bytes):
            return result
        head, _, body = result.partition(b"\r\n\r\n")
        return b"%b\r\n%b\r\n%b" % (head, warning_line(warnings), body)

    return answer


def unread_fields(request: Request, fields: frozenset[str]) -> list[str]:
    """Fields of a JSON body that are none of these, and look like one of them that is absent."""
    body = request.body
    if not body or not fields or len(body) > _LONGEST_BODY or not is_json(request.content_type):
        return []
    try:
        given = _read_keys(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []  # which is said already
    warnings = []
    for field in list(given)[:_MOST_FIELDS]:
        if field in fields or len(field) > _LONGEST_FIELD:
            continue
        meant = _OTHER_NAMES.get(field.lower())
        if meant not in fields:
            close = get_close_matches(field.lower(), fields, 1, 0.8)
            meant = close[0] if close else None
        if meant is not None and meant not in given:
            warnings.append(f"unknown field {field} is ignored: is {meant} meant?")
    return warnings
