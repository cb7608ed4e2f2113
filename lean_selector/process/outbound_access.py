"""What our requests bring along, of engines and of other services of ours, as the flags say."""

from lean_selector.outbound.allowed_endpoints import AllowedEndpoints
from lean_selector.outbound.client import OutboundClient, Resolve
from lean_selector.outbound.credentials import Credentials
from lean_selector.outbound.token_file import TokenFile
from lean_selector.outbound.trust import Trust
from lean_selector.process.host import StartError
from lean_selector.server.service_flags import Access


def engine_client(
    access: Access, resolve: Resolve, allowed: AllowedEndpoints | None
) -> OutboundClient:
    """For every request that we make of an engine. Raises StartError."""
    credentials = credentials_of(access)
    return OutboundClient(
        resolve, token=credentials.token, trust=credentials.trust, allowed=allowed
    )


def credentials_of(access: Access) -> Credentials:
    """Raises StartError."""
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
