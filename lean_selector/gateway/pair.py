"""A request that a prefill worker and a decode worker serve together: its bodies, and its blocks.

This is the protocol `nixl`, of vLLM with its NixlConnector. The request goes to the prefill worker
first, which computes the prompt and one token, holds the prompt's KV blocks for 30 s, and says in
`kv_transfer_params` of its answer where they are. With these params, the same request goes to the
decode worker, which fetches the blocks.

The decode worker trusts the params. With block ids that are missing, empty or too few, its process
ends. With a missing id of the engine or of the request it hangs, and ends when the client leaves.
With those of blocks that were reused it answers wrong text, and keeps it in its prefix cache. So
params are only ever those of an answer to this request, they are checked, and are passed on
unchanged; `proxied_request.py` sends them once. A client cannot set them.

Both bodies have all other fields of the client's that could change the prompt or its tokens, so
both workers compute the same tokens. The prefill worker's body lacks only what makes its answer
long or a stream. Some requests get no pair: see `ModelRequest.bars_pair`."""

from dataclasses import dataclass
from time import monotonic
from typing import Final

import msgspec

from lean_selector.gateway.model_request import BOM, read_fields
from lean_selector.gateway.prompt_shapes import HasTransferParams, TransferParams
from lean_selector.gateway.upstreams import WorkerUse

_read_answer: Final = msgspec.json.Decoder(HasTransferParams).decode
_read_params: Final = msgspec.json.Decoder(TransferParams).decode

_PARAMS: Final = "kv_transfer_params"
_ASKED: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Fields that are 1 for the prefill worker if the client sets them.
_ONE_IF_SET: Final = ("max_completion_tokens", "n")
_DROPPED: Final = ("stream_options", "min_tokens")


# How long after the prefill worker's answer its params may still go to another decode worker. It
# holds the blocks for 30 s, of which connecting may take 5.
_PARAMS_HOLD_S: Final = 20.0


@dataclass(eq=False)
class HeldBlocks:
    """The KV blocks that a prefill worker holds for a request, until a decode worker fetches them.

    `params`: what its answer says of them, as JSON. `sent_at` and `answered_at`: when it got the
    request, and answered. `cached_tokens`: how many of the prompt's it had cached, if it said so.
    `were_moved`: the params go to a second decode worker, because the first refused."""

    leg: WorkerUse
    params: bytes
    sent_at: float
    answered_at: float
    cached_tokens: int | None
    were_moved: bool = False

    @property
    def are_old(self) -> bool:
        """Whether no decode worker may get the params any more."""
        return monotonic() - self.answered_at > _PARAMS_HOLD_S


def prefill_body(body: bytes, path: bytes) -> bytes:
    """Return the body for the prefill worker: it computes one token, and answers in one piece."""
    fields: dict[str, object] = {**read_fields(body.removeprefix(BOM))}
    for name in _DROPPED:
        fields.pop(name, None)
    for name in _ONE_IF_SET:
        if name in fields:
            fields[name] = 1
    fields["max_output_tokens" if path.endswith(b"/responses") else "max_tokens"] = 1
    fields["stream"] = False
    fields[_PARAMS] = _ASKED
    return msgspec.json.encode(fields)


def decode_body(body: bytes, params: bytes) -> bytes:
    """Return the body for the decode worker: with the params of the prefill worker's answer."""
    fields: dict[str, object] = {**read_fields(body.removeprefix(BOM))}
    fields[_PARAMS] = msgspec.Raw(params)
    return msgspec.json.encode(fields)


def params_of(answer: bytes) -> bytes:
    """Return the params in a prefill worker's answer, as JSON, or nothing if there are none that a
    decode worker could use."""
    try:
        found = bytes(_read_answer(answer).kv_transfer_params)
        params = _read_params(found)
    except (msgspec.DecodeError, RecursionError):
        return b""
    has_blocks = any(each != [] for each in params.remote_block_ids)  # of a group of layers
    is_named = bool(params.remote_engine_id and params.remote_request_id and params.remote_host)
    return found if params.do_remote_prefill and has_blocks and is_named else b""
