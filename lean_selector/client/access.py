"""What a client of a service brings along: whom it believes over TLS, what it shows, its token."""

import ssl
from collections.abc import Callable
from os import PathLike, fspath
from typing import NoReturn

Verify = bool | str | PathLike[str] | ssl.SSLContext
Cert = str | PathLike[str] | tuple[str | PathLike[str], str | PathLike[str]]
Token = str | Callable[[], str]


class Access:
    """For the service alone: workers see nothing of it."""

    def __init__(
        self, verify: Verify = True, cert: Cert | None = None, token: Token | None = None
    ) -> None:
        """
        verify: True for the system's authorities, the path of a PEM file with others, False to
            believe anybody, or a context.
        cert: paths of our certificate and its key, or of one file with both.
        token: the bearer token, or what gives that of now.

        Raises ValueError for a token that no header can carry.
        """
        self.verify = verify
        self.cert = cert
        self._token = token
        if isinstance(token, str):
            _checked(token)

    def context(self) -> ssl.SSLContext:
        """Raises OSError for files that cannot be used."""
        if isinstance(self.verify, ssl.SSLContext):
            context = self.verify
        else:
            ca_file = None if isinstance(self.verify, bool) else fspath(self.verify)
            context = ssl.create_default_context(cafile=ca_file)
            if self.verify is False:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
        if self.cert is not None:
            cert_file, key_file = self.cert if isinstance(self.cert, tuple) else (self.cert, None)
            try:
                context.load_cert_chain(cert_file, key_file, _no_passphrase)
            except _Locked:
                locked = fspath(key_file or cert_file)
                raise OSError(f"{locked}: a key with a passphrase is not supported") from None
        return context

    def headers(self) -> dict[str, str]:
        """Of each request. Raises ValueError as __init__ does."""
        token = self._token
        if token is None:
            return {}
        text = token if isinstance(token, str) else _checked(token())
        return {"authorization": f"Bearer {text}"}


class _Locked(Exception):
    """The key has a passphrase."""


def _no_passphrase() -> NoReturn:
    """OpenSSL would ask for it on the terminal, and wait."""
    raise _Locked


def _checked(token: str) -> str:
    if not token or not all("!" <= letter <= "~" for letter in token):
        raise ValueError("a token is printable ASCII without blanks")
    return token
