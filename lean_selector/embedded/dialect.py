"""Converts between SelectionService's Python values and the bodies of Dynamo 1.6's HTTP API.

In the Python values, the keys of maps by dp_rank are ints (in JSON, strings). Callers may pass any
sequence for a list. This module checks only types; the code that serves HTTP checks the values."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

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
_NO_SUCH_RANK = "Worker WorkerWithDpRank"


def refusal(error: SelectorError) -> ValueError | SelectionServiceError:
    """Return the exception that SelectionService raises for an error of the selector."""
    if error.status in (400, 413, 415, 422):
        return ValueError(error.message)
    kind = _KINDS.get(error.status, "internal")
    if isinstance(error, NoWorkers):
        kind = "not_ready"
    elif error.message.startswith(_NO_SUCH_RANK):
        kind = "sequence"
    return SelectionServiceError(error.message, error.status, kind)


def shut_down() -> SelectionServiceError:
    return SelectionServiceError("selection service is shutting down", 503, "not_ready")


# -- requests and records --------------------------------------------------------------------------

T = TypeVar("T")
Fields = dict[str, Any]
Done = tuple[()]  # the result of methods that only report success

_PACKED = ("block_hashes", "sequence_hashes")  # may be bytes, 8 per hash


def body_of(kind: type[T], name: str, given: object) -> T:
    """Return `given`, a map of any type, as the body of a route. Raises ValueError."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{name}: expected a dict, got {type(given).__name__}")
    fields: dict[object, object] = {}
    for field, value in given.items():
        try:
            fields[field] = _as_json(field, value)
        except (ValueError, OverflowError, NotImplementedError) as error:
            raise ValueError(f"{field}: {error}") from None
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _as_json(field: object, value: object) -> object:
    """Return a value of the types that a body has: those of JSON, and bytes."""
    if isinstance(value, memoryview):  # perhaps with gaps, which the encoder refuses
        is_packed = field in _PACKED and value.itemsize == 1
        value = value.tobytes() if is_packed else value.tolist()
    if isinstance(value, list | tuple) and value and type(value[0]) is int:
        return value  # many tokens or hashes, whose reader checks them
    return msgspec.msgpack.decode(_encode(value))


def _plain(value: object) -> object:
    """Return a value of a type that JSON lacks as one that it has. Raises ValueError."""
    for kind in (str, int, float):
        if isinstance(value, kind):  # of a subclass
            return kind(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise ValueError(f"{type(value).__name__} is not a JSON type")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def record(decoded: Fields) -> Fields:
    """Return `decoded`, a worker's record. Changes the keys of its maps by dp_rank to ints."""
    for field in BY_RANK:
        if field in decoded:
            decoded[field] = {int(rank): value for rank, value in decoded[field].items()}
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
