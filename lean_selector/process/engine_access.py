"""What asks engines over HTTP: with their token, and those certificates that they have."""

from lean_selector.outbound.allowed_endpoints import AllowedEndpoints
from lean_selector.outbound.client import OutboundClient, Resolve
from lean_selector.outbound.token_file import TokenFile
from lean_selector.outbound.trust import Trust
from lean_selector.process.discovery_config import EngineAccess
from lean_selector.process.host import StartError


def engine_client(
    access: EngineAccess, resolve: Resolve, allowed: AllowedEndpoints | None
) -> OutboundClient:
    """For every request that we make of an engine. Raises StartError."""
    try:
        token = None if access.token_file is None else TokenFile(access.token_file)
        trust = Trust(access.ca_file)
        if access.ca_file is not None:
            trust.context()
    except (OSError, ValueError) as error:
        raise StartError(f"requests of engines: {error}") from None
    return OutboundClient(resolve, token=token, trust=trust, allowed=allowed)
