"""What `--allow-endpoint` says of a worker, before it is registered."""

from collections.abc import Callable, Iterator

from lean_selector.core.endpoints import replay_endpoint_for
from lean_selector.core.errors import BadRequest
from lean_selector.core.numbers import MAX_RANKS
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.http.endpoints import AllowedEndpoints


def worker_check(allowed: AllowedEndpoints) -> Callable[[WorkerSpec], None]:
    """Raises BadRequest for a worker with an endpoint that is not allowed, naming its field."""

    def check(spec: WorkerSpec) -> None:
        for field, endpoint in _endpoints(spec):
            refusal = allowed.refusal(endpoint) if endpoint else None
            if refusal is not None:
                raise BadRequest(f"{field}: {refusal}")

    return check


def _endpoints(spec: WorkerSpec) -> Iterator[tuple[str, str]]:
    """(field, endpoint): all that we may ever connect to because of this worker."""
    if spec.endpoint:
        yield "endpoint", spec.endpoint
    if spec.kv_events_endpoint:
        yield "kv_events_endpoint", spec.kv_events_endpoint
    for rank, endpoint in sorted(spec.kv_events_endpoints.items()):
        yield f"kv_events_endpoints[{rank}]", endpoint
    if spec.replay_endpoint:
        yield "replay_endpoint", spec.replay_endpoint
        for offset in range(1, min(len(spec.ranks), MAX_RANKS)):
            try:  # each rank has a port of its own
                endpoint = replay_endpoint_for(spec.replay_endpoint, offset)
            except ValueError:
                break
            if endpoint == spec.replay_endpoint:
                break
            yield "replay_endpoint", endpoint
    for rank, endpoint in sorted(spec.replay_endpoints.items()):
        yield f"replay_endpoints[{rank}]", endpoint
