"""What our requests bring along, of engines and of other services of ours, as the flags say."""

from lean_selector.http.endpoints import AllowedEndpoints
from lean_selector.http.outbound import OutboundClient, Resolve
from lean_selector.http.trust import Credentials, TokenFile, Trust
from lean_selector.process.host import StartError
from lean_selector.server.service_flags import Access


def engine_client(
    access: Access, resolve: Resolve, allowed: AllowedEndpoints | None
) -> OutboundClient:
    """For every request that we make of an engine. Raises StartError."""
    return OutboundClient(resolve, credentials_of(access), allowed)


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
