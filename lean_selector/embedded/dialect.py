"""Converts between SelectionService's Python values and the bodies of Dynamo 1.6's HTTP API.

In the Python values, the keys of maps by dp_rank are ints (in JSON, strings). Callers may pass any
sequence for a list. This module checks only types; the code that serves HTTP checks the values."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lean_selector.core.errors import NoWorkers, SelectorError
from lean_selector.core.numbers import U64_MAX, not_a, whole
from lean_selector.core.selection.shapes import BY_RANK


class SelectionCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the cache of choices that `select` made. None means the default: 120 s, 4096
    choices, 256 MiB. If one of the limits is 0, no choice is cached."""

    ttl_secs: float | None = None
    max_entries: int | None = None
    max_bytes: int | None = None


class SelectionServiceError(Exception):
    """A valid request that the service cannot serve. `status_code` is the status in the HTTP API.
    `kind`: not_found, conflict, scheduler (no worker is free now), not_ready (no worker exists, or
    the service is shut down), sequence (the worker has no such rank), internal."""

    def __init__(self, message: str, status_code: int, kind: str) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.kind = kind


_KINDS = {404: "not_found", 409: "conflict", 429: "scheduler", 503: "scheduler"}
# HTTP responses have no kind; these messages mean `not_ready`.
_NOT_READY = ("no schedulable workers", "selection service is shutting down")
_NO_SUCH_RANK = "Worker WorkerWithDpRank"


def refusal_of(status: int, message: str) -> ValueError | SelectionServiceError:
    """Return the exception for an HTTP error response with this status and message."""
    if status in (400, 413, 415, 422):
        return ValueError(message)
    kind = _KINDS.get(status, "internal")
    if message.startswith(_NOT_READY):
        kind = "not_ready"
    elif message.startswith(_NO_SUCH_RANK):
        kind = "sequence"
    return SelectionServiceError(message, status, kind)


def refusal(error: SelectorError) -> ValueError | SelectionServiceError:
    """Return the exception that SelectionService raises for an error of the selector."""
    if isinstance(error, NoWorkers):
        return SelectionServiceError(error.message, error.status, "not_ready")
    return refusal_of(error.status, error.message)


def shut_down() -> SelectionServiceError:
    return SelectionServiceError("selection service is shutting down", 503, "not_ready")


# -- requests and records --------------------------------------------------------------------------

Fields = dict[str, Any]
Done = tuple[()]  # the result of methods that only report success

_PACKED = ("block_hashes", "sequence_hashes")  # may be bytes, 8 per hash


def fields_of(name: str, given: object) -> Fields:
    """Copies `given`, a map of any type, to a dict of JSON types. Raises ValueError."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}: expected a dict, got {type(given).__name__}")
    for key in given:
        _check_text("a field's name", key)
    return {key: _plain(str(key), value) for key, value in given.items()}


def _plain(name: str, value: object) -> object:
    """Converts maps and sequences of any type to dicts and lists, recursively; keeps bytes. Raises
    ValueError for other types that JSON lacks."""
    _check_text(name, value)
    if value is None or isinstance(value, (str, bytes, bytearray)):
        return value
    if isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, Mapping):
        for key in value:
            _check_text(name, key)
        return {key: _plain(f"{name}.{key}", each) for key, each in value.items()}
    if isinstance(value, memoryview):
        if name in _PACKED and value.itemsize == 1:
            return value.tobytes()
        view = value
        try:
            value = view.tolist()
        except NotImplementedError:
            raise ValueError(f"{name}: memoryview of format {view.format!r}") from None
    if not isinstance(value, (Sequence, set, frozenset)):
        raise ValueError(f"{name}: {type(value).__name__} is not a JSON type")
    items = value if isinstance(value, (list, tuple)) else list(value)
    if items and type(items[0]) is int:  # many tokens or hashes, whose reader checks them
        return items
    return [_plain(f"{name}[{place}]", each) for place, each in enumerate(items)]


def _check_text(name: str, value: object) -> None:
    """Raises ValueError for a string that UTF-8 cannot encode. Python allows such strings, JSON
    does not."""
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: not valid Unicode") from None


def _number(value: int | float) -> int | float:
    """Return the number as a plain int or float, if its type is a subclass."""
    if isinstance(value, bool) or type(value) in (int, float):
        return value
    return int(value) if isinstance(value, int) else float(value)


def worker_fields(name: str, given: object) -> Fields:
    """Return the description of a worker as a dict of JSON types. Raises ValueError."""
    fields = fields_of(name, given)
    for field in BY_RANK:
        by_rank = fields.get(field)
        if isinstance(by_rank, Mapping):
            for dp_rank in by_rank:
                if not isinstance(dp_rank, int) or isinstance(dp_rank, bool) or dp_rank < 0:
                    raise ValueError(f"{field}: keys are ranks, as int, not {dp_rank!r}")
            fields[field] = {str(dp_rank): value for dp_rank, value in by_rank.items()}
    return fields


def record(decoded: Fields) -> Fields:
    """Return `decoded`, a worker's record. Changes the keys of its maps by dp_rank to ints."""
    for field in BY_RANK:
        if field in decoded:
            decoded[field] = {int(rank): value for rank, value in decoded[field].items()}
    return decoded


def readiness(decoded: Fields) -> Fields:
    decoded["workers"] = list(map(record, decoded["workers"]))
    return decoded


def worker_id_of(value: object) -> int:
    """Return a worker id. Raises TypeError, or OverflowError for an id outside of 64 bits."""
    worker_id = whole("worker_id", value)
    if not 0 <= worker_id <= U64_MAX:
        raise OverflowError(f"worker_id: expected 0 to {U64_MAX}, got {worker_id}")
    return worker_id


def selection_id_of(value: object) -> str:
    """Return a selection id. Raises TypeError for anything but a string."""
    if not isinstance(value, str):
        raise not_a("selection_id", "a str", value)
    return value
