"""Whom we believe over TLS: those whom the system's authorities vouch for, or those of a file."""

import logging
import ssl
from typing import Final

from lean_selector.outbound.watched_file import WatchedFile

log = logging.getLogger("lean_selector.outbound")


class Trust:
    """Makes the TLS context when it is first needed, and anew when the file has changed."""

    def __init__(self, ca_file: str | None = None) -> None:
        """`ca_file` holds PEM certificates, which then are the only authorities."""
        self._file: Final = None if ca_file is None else WatchedFile(ca_file)
        self._context: ssl.SSLContext | None = None
        self._complains = False

    def context(self) -> ssl.SSLContext:
        """Raises OSError when the file cannot be used, and none was there before."""
        if self._file is None:
            if self._context is None:
                self._context = ssl.create_default_context()
            return self._context
        try:
            pem, is_new = self._file.read()
            if is_new or self._context is None:
                self._context = _context_of(self._file.path, pem)
            self._complains = False
        except OSError as error:
            if self._context is None:
                raise
            if not self._complains:
                log.warning("the last certificate authorities are used: %s", error)
            self._complains = True
        return self._context


def _context_of(path: str, pem: bytes) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise OSError(f"{path} holds no certificates in PEM: {error}") from None
