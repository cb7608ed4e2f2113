"""What schemathesis loads at its start: how bodies are made that it would make otherwise."""

from typing import Any

import msgspec
import schemathesis


@schemathesis.hook
def map_body(ctx: Any, body: Any) -> Any:
    """A whole number is written as one. JSON Schema calls 1.0 an integer; the service, as the
    reference, does not."""
    return _whole(body)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and abs(value) < 2**64 and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {name: _whole(each) for name, each in value.items()}
    return value


@schemathesis.serializer("application/msgpack")
def messagepack(ctx: Any, value: Any) -> bytes | None:
    return msgspec.msgpack.encode(_packable(value))


def _packable(value: Any) -> Any:
    """A whole number that MessagePack has not is another that is as large; or as wrong."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        try:
            return float(value)
        except OverflowError:
            return str(value)
    if isinstance(value, list):
        return [_packable(each) for each in value]
    if isinstance(value, dict):
        return {name: _packable(each) for name, each in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
