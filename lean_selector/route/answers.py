"""What the door answers: a worker in headers, or an error in OpenAI's shape.

A gateway may hand an error to its client as it is, so it looks like one of an engine.
"""

from typing import Final

from lean_selector.core.errors import (
    AllWorkersBusy,
    NotFound,
    SelectorError,
    Unavailable,
    WaitedTooLong,
)
from lean_selector.core.selection.shapes import Selection
from lean_selector.http.endpoints import Url, url_at
from lean_selector.http.response import encode_response
from lean_selector.prompts.unknown import Unknown
from lean_selector.service.access import Refusal
from lean_selector.wire.selection import OpenAiErrorBody

RETRY_AFTER: Final = b"retry-after: 1\r\n"
SHED: Final = 429  # some gateways rewrite a 503, or take it for ours being down
# No worker is known for a model: a gateway that balances by itself then may know one.
UNKNOWN: Final = 503
_MAX_KNOWN: Final = 4096

_authorities: dict[str, bytes] = {}  # of endpoints


def worker_headers(selection: Selection, why_not: Unknown | None) -> bytes:
    """An empty 200 that names the worker, and says `why_not` all blocks of the prompt are known.
    Raises Unavailable for a worker that speaks no HTTP."""
    overlap = selection.overlap.longest_matched
    lines = (
        b"x-gateway-destination-endpoint: %b\r\nx-worker-id: %d\r\nx-data-parallel-rank: %d\r\n"
        b"x-reservation-id: %b\r\nx-overlap-tokens: %d\r\n"
    )
    assert isinstance(selection.reservation_id, str)
    reservation_id = selection.reservation_id.encode("ascii")
    where = _authority_of(selection.endpoint)
    extra = lines % (where, selection.worker_id, selection.dp_rank, reservation_id, overlap)
    if why_not is not None:
        extra += b"x-lean-prompt: %b\r\n" % why_not.why.encode("ascii")
    return encode_response(200, b"", b"", extra)


def _authority_of(endpoint: str) -> bytes:
    known = _authorities.get(endpoint)
    if known is None:
        if len(_authorities) >= _MAX_KNOWN:
            _authorities.clear()
        try:
            authority = Url(url_at(endpoint, "") or endpoint).authority
        except ValueError as error:
            raise Unavailable(f"the worker that was chosen takes no HTTP: {error}") from None
        known = _authorities[endpoint] = authority.encode("ascii")
    return known


def error_of(error: SelectorError) -> bytes:
    """The answer that tells of it."""
    if isinstance(error, (AllWorkersBusy, WaitedTooLong)):
        return refusal(SHED, error.message)
    if isinstance(error, NotFound):
        return refusal(UNKNOWN, error.message, "model_not_found")
    return refusal(error.status, error.message)


def unauthorized(refused: Refusal) -> bytes:
    """To a gateway whose token may not ask."""
    body = OpenAiErrorBody.encoded(refused.status, refused.text, refused.code)
    return encode_response(refused.status, body, extra=refused.line)


def refusal(status: int, message: str, code: str | None = None) -> bytes:
    extra = RETRY_AFTER if status in (SHED, 503) else b""
    return encode_response(status, OpenAiErrorBody.encoded(status, message, code), extra=extra)
