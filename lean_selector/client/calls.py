"""Builds requests to the selection service, and parses its responses. Does no I/O.

Sections 1.3 and 1.5 of docs/spec/selection.md describe the requests and responses. Only the
response fields that the clients use are parsed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from lean_selector.core.hashing import hash_seed, local_hashes, sequence_hashes_bytes, unpack_signed
from lean_selector.core.selection.shapes import Disaggregated, Overlap, PrefillPlacement

T = TypeVar("T")
Fields = Mapping[str, object]


class Call(msgspec.Struct, Generic[T], frozen=True):
    """One request to the service. `waits`: the response may be delayed until a worker is free.

    `body`: encoded JSON, or a dict, in which lists of hashes are packed bytes. `has_prompt`: the
    body is a dict with a prompt, so it may be sent as MessagePack."""

    method: str
    path: str
    read: Callable[[bytes], T]
    body: bytes | Fields | None = None
    waits: bool = False
    has_prompt: bool = False
    headers: Mapping[str, str] = {}

    def json(self) -> bytes | None:
        """Return the body as JSON, with hashes as signed integers. Return None without a body."""
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return msgspec.json.encode(
            {
                name: unpack_signed(value) if isinstance(value, bytes) else value
                for name, value in self.body.items()
            }
        )

    def msgpack(self) -> bytes:
        """Return the body as MessagePack, which only this project's service accepts."""
        return msgspec.msgpack.encode(self.body)


class Selected(msgspec.Struct, frozen=True):
    """The service's answer to a request to choose a rank."""

    worker_id: int
    dp_rank: int
    endpoint: str
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    prefill: PrefillPlacement | None = None  # of a pair
    disaggregation: Disaggregated | None = None  # only if the request asks for a pair

    @property
    def overlap_blocks(self) -> int:
        """The number of the prompt's blocks that the chosen rank has in device memory."""
        return self.overlap.dp.get(str(self.dp_rank), 0) // self.block_size


class Worker(msgspec.Struct, frozen=True):
    """A worker in the answer of GET /workers, with the fields that routing needs."""

    worker_id: int
    model_name: str
    lifecycle: str
    block_size: int | None = None
    is_eagle: bool | None = None


class Scope(msgspec.Struct, frozen=True):
    """Model and tenant of requests, and the block size of the model's workers (None: unknown)."""

    model_name: str
    tenant_id: str
    block_size: int | None = None
    is_eagle: bool = False


def prompt_fields(
    token_ids: Sequence[int], scope: Scope, lora_name: str | None, cache_salt: str | None
) -> dict[str, object]:
    """Return a request's fields for model, tenant and prompt. The prompt is given as block hashes
    or, if the block size is unknown, as token ids.

    Raises ValueError for token ids beyond 32 bits."""
    fields: dict[str, object] = {"model_name": scope.model_name, "tenant_id": scope.tenant_id}
    if scope.block_size is None:
        named = _without_none(lora_name=lora_name, cache_salt=cache_salt)
        return {**fields, "token_ids": list(token_ids), **named}
    seed = hash_seed(lora_name, cache_salt)
    local = local_hashes(token_ids, scope.block_size, seed, is_eagle=scope.is_eagle)
    fields["block_hashes"] = local
    fields["sequence_hashes"] = sequence_hashes_bytes(local)
    fields["isl_tokens"] = len(token_ids)
    return fields


# -- the calls -------------------------------------------------------------------------------------

_read_selected = msgspec.json.Decoder(Selected).decode
_read_workers = msgspec.json.Decoder(list[Worker]).decode
_read_rows = msgspec.json.Decoder(list[dict[str, int]]).decode
_read_object = msgspec.json.Decoder(dict[str, Any]).decode


def _nothing(_: bytes) -> None:
    """Ignores the body of a response that only reports success."""


def select(fields: Fields) -> Call[Selected]:
    """Return the call that chooses a rank without reserving the rank."""
    return Call("POST", "/select", _read_selected, fields, waits=True, has_prompt=True)


def select_and_reserve(reservation_id: str, fields: Fields) -> Call[Selected]:
    # 1.6 reads the reservation's id from the second name, and ignores the first; 1.3 echoes the
    # second.
    body = {**fields, "reservation_id": reservation_id, "selection_id": reservation_id}
    return Call("POST", "/select_and_reserve", _read_selected, body, waits=True, has_prompt=True)


def route(reservation_id: str, path: str, body: bytes | Fields) -> Call[Selected]:
    text = body if isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {"accept": "application/json", "x-reservation-id": reservation_id}
    return Call("POST", "/route" + quote(path), _read_selected, text, waits=True, headers=headers)


def workers(tenant_id: str, model_name: str | None = None) -> Call[list[Worker]]:
    query = urlencode(_without_none(tenant_id=tenant_id, model_name=model_name))
    return Call("GET", "/workers?" + query, _read_workers)


def potential_loads(fields: Fields) -> Call[list[dict[str, int]]]:
    return Call("POST", "/potential_loads", _read_rows, fields, has_prompt=True)


def overlap_scores(fields: Fields) -> Call[dict[str, Any]]:
    return Call("POST", "/overlap_scores", _read_object, fields, has_prompt=True)


def dump() -> Call[dict[str, Any]]:
    return Call("GET", "/dump", _read_object)


def prefill_complete(reservation_id: str) -> Call[None]:
    return Call("POST", f"{_reservation(reservation_id)}/prefill_complete", _nothing)


def output_block(reservation_id: str, decay_fraction: float | None = None) -> Call[None]:
    body = _without_none(decay_fraction=decay_fraction)
    return Call("POST", f"{_reservation(reservation_id)}/output_block", _nothing, body)


def free(reservation_id: str, **reported: object) -> Call[None]:
    """Return the call that frees a reservation. `reported`, without None: the request's outcome."""
    return Call("DELETE", _reservation(reservation_id), _nothing, _without_none(**reported) or None)


def report(worker_id: int, **reported: object) -> Call[None]:
    return Call("POST", f"/workers/{worker_id}/report", _nothing, _without_none(**reported))


def _without_none(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _reservation(reservation_id: str) -> str:
    return "/reservations/" + quote(reservation_id, safe="")
