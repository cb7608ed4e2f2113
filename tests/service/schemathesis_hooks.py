"""What schemathesis loads at its start: how bodies are made that it would make otherwise, and a
check of its own."""

import os
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


ROLES = ("open", "read", "write", "admin")  # each may what those before it may


@schemathesis.check
def asks_for_its_role(ctx: Any, response: Any, case: Any) -> None:
    """Of who is ROLE, as the environment has it; `open` is whoever has no token. Without one there
    is nothing to ask for."""
    role, asked = os.environ["ROLE"], case.operation.definition.raw["x-role"]
    if not role:
        return
    refusal = 401 if role == "open" else 403
    may = ROLES.index(role) >= ROLES.index(asked)
    wrong = response.status_code in (401, 403) if may else response.status_code != refusal
    assert not wrong, f"{role} is answered {response.status_code} where {asked} is asked for"
