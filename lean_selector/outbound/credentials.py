"""What our requests of one kind of others bring along: a token, and what counts in TLS."""

from typing import Final

from lean_selector.outbound.token_file import TokenFile
from lean_selector.outbound.trust import Trust


class Credentials:
    """Read again when their files change."""

    def __init__(
        self,
        token: TokenFile | None = None,
        trust: Trust | None = None,
        tls_name: str | None = None,
    ) -> None:
        """`tls_name` is what certificates must be for, in place of the host of the URL."""
        self.token: Final = token
        self.trust: Final = Trust() if trust is None else trust
        self.tls_name: Final = tls_name

    def authorization(self) -> bytes | None:
        """The value of the header, if there is one."""
        return None if self.token is None else b"Bearer " + self.token.token()
