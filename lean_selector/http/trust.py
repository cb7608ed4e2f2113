"""Credentials for the service's own requests: a bearer token, trusted CAs, a certificate.

The credentials come from files that may be replaced at run time. Changed files are read again. If
the new content is invalid, the last valid version stays in use."""

import logging
import os
import re
import ssl
from typing import Final, NoReturn

log = logging.getLogger("lean_selector.outbound")

MOST_FILE_BYTES: Final = 1 << 20
_TOKEN: Final = re.compile(rb"[!-~]+")  # characters allowed in a header
_MOST_TOKEN_BYTES: Final = 64 * 1024


class WatchedFile:
    """A file that may change while we run. Each check for a change is one stat call, which follows
    symbolic links, because mounted Kubernetes secrets are links."""

    def __init__(self, path: str, most_bytes: int = MOST_FILE_BYTES, *, keeps: bool = True) -> None:
        """`keeps=False`: the content is not stored, and `read` returns it only after a change."""
        self.path: Final = path
        self._keeps = keeps
        self._most_bytes = most_bytes
        self._known: tuple[int, int, int] | None = None
        self._bytes = b""

    def read(self) -> tuple[bytes, bool]:
        """Return the content (empty if it is unchanged and not stored), and whether the file
        changed since the last read. Raises OSError."""
        status = os.stat(self.path)
        known = status.st_mtime_ns, status.st_ino, status.st_size
        if known == self._known:
            return self._bytes, False
        with open(self.path, "rb") as file:
            found = file.read(self._most_bytes + 1)
        if len(found) > self._most_bytes:
            raise OSError(f"{self.path} has more than {self._most_bytes} bytes")
        self._known = known
        if self._keeps:
            self._bytes = found
        return found, True

    def forget(self) -> None:
        """Make the next `read` load the file, even if the file looks unchanged."""
        self._known = None


class TokenFile:
    """The bearer token in a file. While the file cannot be read, the last token is used."""

    def __init__(self, path: str) -> None:
        """Raises OSError or ValueError, with a one-line message, if the file has no valid token."""
        self._file = WatchedFile(path, _MOST_TOKEN_BYTES)
        self._complains = False
        self._token = _token(path, self._file.read()[0])

    def token(self) -> bytes:
        try:
            text, is_new = self._file.read()
            if is_new:
                self._token = _token(self._file.path, text)
            self._complains = False
        except (OSError, ValueError) as error:
            if not self._complains:
                log.warning("token file is invalid, the last token stays in use: %s", error)
            self._complains = True
        return self._token


def _token(path: str, text: bytes) -> bytes:
    token = text.strip()
    if _TOKEN.fullmatch(token) is None:
        raise ValueError(f"{path} has no bearer token")
    return token


class Trust:
    """The TLS context for the service's own requests. It is created on first use, and again after a
    file has changed. Two threads may both create the context, which does no harm."""

    def __init__(
        self, ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None
    ) -> None:
        """`ca_file` has PEM certificates, which replace the system's CAs. `cert_file` has our
        certificate with its chain, and also the private key if `key_file` is not given."""
        self._ca_file: Final = ca_file
        self._cert_file: Final = cert_file
        self._key_file: Final = key_file
        self._files: Final = [WatchedFile(path) for path in (ca_file, cert_file, key_file) if path]
        self._context: ssl.SSLContext | None = None
        self._held: list[bytes] = []  # contents of the files at the last attempt to load them
        self._is_unfit = False  # whether these contents were invalid
        self._complains = False

    def context(self) -> ssl.SSLContext:
        """Return the current TLS context. Raises OSError if the files have never been valid."""
        try:
            held = [file.read()[0] for file in self._files]
            if self._context is None or held != self._held:
                # Only after a change: to load the system's CAs takes some 20 ms.
                self._held, self._is_unfit = held, True
                self._context = self._new_context()
                self._is_unfit = False
            self._complains = self._is_unfit
        except OSError as error:
            if self._context is None:
                raise
            if not self._complains:
                log.warning("certificate files are invalid, the last ones stay in use: %s", error)
            self._complains = True
        return self._context

    def _new_context(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self._ca_file)
        except ssl.SSLError as error:
            raise OSError(f"{self._ca_file} has no certificates in PEM: {error}") from None
        if self._cert_file is not None:
            key_file = self._key_file or self._cert_file
            try:
                load_certificate(context, self._cert_file, key_file)
            except LockedKey as locked:
                raise OSError(str(locked)) from None
            except ssl.SSLError:
                raise OSError(
                    f"{self._cert_file} and {key_file} are not a certificate and its key in PEM"
                ) from None
        return context


class LockedKey(Exception):
    """The private key has a passphrase, so it cannot be loaded."""


def load_certificate(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    """Load certificate and key into `context`. Raises LockedKey if the key has a passphrase."""

    def refuse() -> NoReturn:
        raise LockedKey(f"{key_file}: a key with a passphrase is not supported")

    context.load_cert_chain(cert_file, key_file, refuse)


class Credentials:
    """Token and TLS settings for the service's own requests. Changed files are read again."""

    def __init__(
        self,
        token: TokenFile | None = None,
        trust: Trust | None = None,
        tls_name: str | None = None,
    ) -> None:
        """`tls_name`: the name that a server's certificate must have; None: the URL's host."""
        self.token: Final = token
        self.trust: Final = Trust() if trust is None else trust
        self.tls_name: Final = tls_name

    def authorization(self) -> bytes | None:
        """Return the value of the `authorization` header; None without a token."""
        return None if self.token is None else b"Bearer " + self.token.token()
