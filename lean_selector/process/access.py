"""The tokens that a service asks for."""

from lean_selector.process.host import StartError, os_reason
from lean_selector.server.service_flags import Listen
from lean_selector.service.access import AccessTokens


def tokens_of(listen: Listen) -> AccessTokens | None:
    """None where none are asked for. Raises StartError."""
    path = listen.auth_token_file
    if path is None:
        return None
    try:
        return AccessTokens(path)
    except OSError as error:
        raise StartError(f"--auth-token-file: {os_reason(error)}: {path}") from None
    except ValueError as error:
        raise StartError(f"--auth-token-file: {error}") from None
