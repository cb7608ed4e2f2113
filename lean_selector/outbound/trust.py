"""Whom we believe over TLS, and what we show of ourselves there.

Believed are those whom the system's authorities vouch for, or those of a file; shown is a
certificate, where there is one. Files that change are read again, and while they cannot be used
the last ones are.
"""

import logging
import ssl
from typing import Final, NoReturn

from lean_selector.outbound.watched_file import WatchedFile

log = logging.getLogger("lean_selector.outbound")


class Trust:
    """Makes the TLS context when it is first needed, and anew when a file has changed.

    From any thread: two at once make it twice, which harms nobody.
    """

    def __init__(
        self, ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None
    ) -> None:
        """`ca_file` holds PEM certificates, which then are the only authorities; `cert_file` our
        own with its chain, and `key_file` its key, unless that is in there too."""
        self._ca_file: Final = ca_file
        self._cert_file: Final = cert_file
        self._key_file: Final = key_file
        self._files: Final = [WatchedFile(path) for path in (ca_file, cert_file, key_file) if path]
        self._context: ssl.SSLContext | None = None
        self._is_stale = True
        self._is_unfit = False  # what the files hold since they changed last
        self._complains = False

    def context(self) -> ssl.SSLContext:
        """Raises OSError when the files cannot be used, and could not be before."""
        try:
            for file in self._files:
                if file.read()[1]:
                    self._is_stale = True
            if self._context is None or self._is_stale:
                # Once for each change: the system's authorities alone take some 20 ms.
                self._is_stale, self._is_unfit = False, True
                self._context = self._made()
                self._is_unfit = False
            self._complains = self._is_unfit
        except OSError as error:
            if self._context is None:
                raise
            if not self._complains:
                log.warning("the last certificates are used: %s", error)
            self._complains = True
        return self._context

    def _made(self) -> ssl.SSLContext:
        context = _believing(self._ca_file)
        if self._cert_file is not None:
            key_file = self._key_file or self._cert_file
            try:
                context.load_cert_chain(self._cert_file, key_file, _no_passphrase)
            except _Locked:
                raise OSError(f"{key_file}: a key with a passphrase is not supported") from None
            except ssl.SSLError:
                raise OSError(
                    f"{self._cert_file} and {key_file} hold no certificate and its key in PEM"
                ) from None
        return context


def _believing(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise OSError(f"{ca_file} holds no certificates in PEM: {error}") from None


class _Locked(Exception):
    """The key has a passphrase."""


def _no_passphrase() -> NoReturn:
    """OpenSSL would ask for it on the terminal, and wait."""
    raise _Locked
