"""Credentials for engines and replicas; checks of workers' endpoints against the allowlist."""

from collections.abc import Iterable, Iterator

from lean_selector.app.host import StartError
from lean_selector.app.service_flags import AccessFlags
from lean_selector.core.errors import BadRequest
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.core.zmq_endpoints import rank_endpoints
from lean_selector.http.allowed_endpoints import AllowedEndpoints
from lean_selector.http.trust import Credentials, TokenFile, Trust


def credentials_of(access: AccessFlags) -> Credentials:
    """Reads the credentials from the files that the flags name. Raises StartError."""
    flag = "token"
    try:
        token = None if access.token_file is None else TokenFile(access.token_file)
        flag = "ca"
        if access.ca_file is not None:
            Trust(access.ca_file).context()
        flag = "cert"
        trust = Trust(access.ca_file, access.cert_file, access.key_file)
        if access.cert_file is not None:
            trust.context()
    except (OSError, ValueError) as error:
        raise StartError(f"--{access.whose}-{flag}-file: {error}") from None
    return Credentials(token, trust, access.tls_name or None)


# -- endpoint rules --------------------------------------------------------------------------------
# Check a worker's endpoints against `--allow-endpoint` before it is registered.


def check_worker(allowed: AllowedEndpoints, spec: WorkerSpec) -> None:
    """Checks the endpoints in a worker's registration. Raises BadRequest with the name of the field
    if an endpoint is not on the allowlist."""
    for field, endpoint in _endpoints(spec):
        refusal = allowed.refusal(endpoint) if endpoint else None
        if refusal is not None:
            raise BadRequest(f"{field}: {refusal}")


def _endpoints(spec: WorkerSpec) -> Iterator[tuple[str, str]]:
    if spec.endpoint:
        yield "endpoint", spec.endpoint
    if spec.kv_events_endpoint:
        yield "kv_events_endpoint", spec.kv_events_endpoint
    for rank, endpoint in sorted(spec.kv_events_endpoints.items()):
        yield f"kv_events_endpoints[{rank}]", endpoint
    if spec.replay_endpoint:
        for endpoint in _of_each_rank(spec.replay_endpoint, spec):
            yield "replay_endpoint", endpoint
    for rank, endpoint in sorted(spec.replay_endpoints.items()):
        yield f"replay_endpoints[{rank}]", endpoint


def _of_each_rank(endpoint: str, spec: WorkerSpec) -> Iterable[str]:
    try:
        return list(rank_endpoints(endpoint, len(spec.ranks)))
    except ValueError:
        return [endpoint]
