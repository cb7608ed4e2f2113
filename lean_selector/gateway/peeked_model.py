"""The model that a JSON body names, of a request that the gateway does not read otherwise."""

import msgspec

from lean_selector.gateway.request_shapes import NamesModel

_decode = msgspec.json.Decoder(NamesModel).decode


def peeked_model(body: bytes | bytearray) -> str | None:
    """None where it is no JSON object that names one."""
    if not body.startswith(b"{"):
        return None
    try:
        return _decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
