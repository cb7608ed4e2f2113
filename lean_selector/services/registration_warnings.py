"""What is probably wrong with a worker's endpoints, as far as its registration shows.

The answer is as it would be anyway; this goes into its header `x-warning`. What only the network
can tell (nobody listens, it speaks HTTP) is in `GET /kv_sources` later.
"""

from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

from lean_selector.core.endpoints import check_endpoint
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.workers import WorkerSpec

_LISTENING: Final = ("*", "0.0.0.0", "[::]")  # where a socket binds, not where it is reached
_NAMED: Final = 4  # endpoints, and ranks that share one; a worker may have 4 096


def registration_warnings(
    spec: WorkerSpec, listeners: Callable[[str], Sequence[RankKey]], *, listens: bool = True
) -> list[str]:
    """One line for each, in the order of the ranks; few.

    Without `listens` nobody listens to the workers, and only their own endpoint is judged.

    `listeners(endpoint)`: the ranks, this worker's included, whose events are expected there.
    """
    warnings: list[str] = []
    if spec.endpoint and "://" not in spec.endpoint:
        warnings.append(
            f"endpoint {spec.endpoint} has no scheme: http://{spec.endpoint} is probably meant"
        )
    served = _address_of_url(spec.endpoint)
    for field, endpoint, dp_rank in _endpoints(spec) if listens else ():
        fault = _fault(endpoint, served)
        if fault is None and field.startswith("kv_events"):
            others = [rank for rank in listeners(endpoint) if rank != (spec.worker_id, dp_rank)]
            if others:
                fault = f"is also that of {_ranks(others)}"
        if fault is not None:
            if len(warnings) == _NAMED:
                warnings.append("and more of its endpoints")
                break
            warnings.append(f"{field} {endpoint} {fault}")
    return warnings


def _endpoints(spec: WorkerSpec) -> list[tuple[str, str, int | None]]:
    """(field, endpoint, rank): those that are connected to, whatever is wrong with them."""
    found: list[tuple[str, str, int | None]] = []
    if not spec.kv_events_endpoints and spec.kv_events_endpoint is not None:
        found.append(("kv_events_endpoint", spec.kv_events_endpoint, spec.ranks.start))
    for rank, endpoint in sorted(spec.kv_events_endpoints.items()):
        found.append((f"kv_events_endpoints[{rank}]", endpoint, rank))
    if spec.replay_endpoint is not None:
        found.append(("replay_endpoint", spec.replay_endpoint, None))
    for rank, endpoint in sorted(spec.replay_endpoints.items()):
        found.append((f"replay_endpoints[{rank}]", endpoint, rank))
    return found


def _fault(endpoint: str, served: str | None) -> str | None:
    try:
        check_endpoint(endpoint)
    except ValueError:
        if "://" in endpoint:
            return "is no ZMQ endpoint (tcp://host:port)"
        return f"has no scheme: tcp://{endpoint} is probably meant"
    scheme, _, address = endpoint.partition("://")
    if scheme == "inproc":
        return "reaches nobody outside of the engine's process"
    if scheme != "tcp":
        return None
    host, _, port = address.rpartition(":")
    if host in _LISTENING:
        return "is where an engine listens, not where it is reached: name its host"
    if port.isdecimal() and f"{host.lower()}:{int(port)}" == served:
        return "is the address of the worker's HTTP endpoint"
    return None


def _address_of_url(endpoint: str | None) -> str | None:
    """host:port of an HTTP URL, as in a ZMQ endpoint."""
    try:
        url = urlsplit(endpoint or "")
        port = url.port or {"http": 80, "https": 443}.get(url.scheme)
        host = url.hostname
    except ValueError:
        return None
    if host is None or port is None:
        return None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _ranks(ranks: Sequence[RankKey]) -> str:
    named = [f"worker {worker_id} dp_rank {dp_rank}" for worker_id, dp_rank in ranks[:_NAMED]]
    more = len(ranks) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")
