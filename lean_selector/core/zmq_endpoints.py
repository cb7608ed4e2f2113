"""ZMQ endpoints: validation with the documented error texts, and comparison.

The texts are part of the API (spec: indexer.md 1.1, selection.md 2, slot_tracker.md 3.6). This
module resolves and connects nothing: `tcp://*:5` and unknown hosts are valid, although libzmq may
refuse them later."""

from collections.abc import Iterator

from lean_selector.core.numbers import MAX_RANKS

_PORT_MAX = 0xFFFF


def check_endpoint(endpoint: str) -> None:
    """Raise ValueError, with the documented text, unless this is a tcp, ipc or inproc endpoint."""
    reason = _fault(endpoint)
    if reason is not None:
        raise ValueError(f"invalid ZMQ endpoint `{endpoint}`: {reason}")


def replay_endpoint_for(endpoint: str, rank_offset: int) -> str:
    """Return a rank's replay endpoint. As in vLLM and TensorRT-LLM, it is `endpoint` (that of the
    first rank) with `rank_offset` added to the port. An endpoint without a port (ipc, inproc) is
    returned unchanged. Raises ValueError if the endpoint is invalid or the resulting port would
    exceed 65535."""
    check_endpoint(endpoint)
    if rank_offset == 0 or not endpoint.startswith("tcp://"):
        return endpoint
    address, _, port = endpoint.rpartition(":")
    shifted = int(port) + rank_offset
    if shifted > _PORT_MAX:
        raise ValueError(
            f"invalid ZMQ endpoint `{endpoint}`: TCP port {shifted} of rank offset {rank_offset}"
            " does not exist"
        )
    return f"{address}:{shifted}"


def rank_endpoints(endpoint: str, ranks: int) -> Iterator[str]:
    """Yield one endpoint per rank: `endpoint`, then the same on the next ports, up to 65535. If
    `endpoint` has no port, yields only `endpoint`. Raises ValueError for an invalid endpoint."""
    check_endpoint(endpoint)
    yield endpoint
    for offset in range(1, min(ranks, MAX_RANKS)):
        try:
            shifted = replay_endpoint_for(endpoint, offset)
        except ValueError:
            return
        if shifted == endpoint:
            return
        yield shifted


def zmq_key(endpoint: str) -> str:
    """Return a key that is equal for every spelling of an endpoint that `check_endpoint` accepts:
    for tcp, the host in lower case, and the port without leading zeros."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host.lower()}:{port.lstrip('+0') or '0'}"


def _fault(endpoint: str) -> str | None:
    scheme, separator, address = endpoint.partition("://")
    if not separator:
        return "missing scheme"
    if not address:
        return "missing address"
    if scheme not in ("tcp", "ipc", "inproc"):
        return f"unsupported scheme `{scheme}`"
    if scheme != "tcp":
        return None
    host, colon, port = address.rpartition(":")
    if not colon:
        return "missing TCP port"
    if not host:
        return "missing TCP host"
    if host.startswith("["):
        if not host.endswith("]"):
            return "missing closing `]`"
    elif ":" in host:
        return "missing TCP port"
    return _port_fault(port)


def _port_fault(port: str) -> str | None:
    """Return the error text for an invalid TCP port; None if the port is valid."""
    if not port:
        return "invalid TCP port: cannot parse integer from empty string"
    digits = port[1:] if len(port) > 1 and port[0] == "+" else port
    value = 0
    for digit in digits:
        if digit not in "0123456789":
            return "invalid TCP port: invalid digit found in string"
        value = value * 10 + int(digit)
        if value > _PORT_MAX:
            return "invalid TCP port: number too large to fit in target type"
    return None
