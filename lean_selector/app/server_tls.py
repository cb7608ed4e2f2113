"""Loads and reloads a service's certificate, its key, and the authorities for client certificates.

Reloaded files apply to new handshakes, not to open connections. Files that do not fit together
prevent the start. If changed files do not fit together, the error is logged, and the old files stay
in use."""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from typing import Any, Final

from lean_selector.app.service_flags import TlsFiles
from lean_selector.http.connections import Connections
from lean_selector.http.tls import TlsAcceptor
from lean_selector.http.trust import LockedKey, load_certificate

log = logging.getLogger("lean_selector.server")

Marks = tuple[tuple[int, int, int] | None, ...]  # (time of change, inode, size) per file


class ServerTls:
    """Creates the protocol object of each TLS connection of a TCP listener."""

    def __init__(
        self,
        files: TlsFiles,
        connections: Connections,
        new_protocol: Callable[[], asyncio.Protocol],
        spoken: str = "http/1.1",
        prefix: str = "--tls",
    ) -> None:
        """Loads the files. Raises ValueError with one line that names the flag and the file.
        `spoken` is the protocol that ALPN names; `prefix` begins the names of the flags."""
        self._files: Final = files
        self._spoken: Final = spoken
        self._prefix: Final = prefix
        self._counts: Final = connections.tls
        self._door: Final = TlsAcceptor(self._context(), connections, new_protocol)
        self._loaded = self._seen = _marks(files)

    def new_connection(self) -> asyncio.Protocol:
        return self._door.new_connection()

    def reload(self, again: bool) -> None:
        """Reloads the files if they have changed, or if `again` is true. Call it periodically.

        A certificate and its key are not replaced in one step, so a change is loaded only when two
        consecutive calls find the same files."""
        marks = _marks(self._files)
        is_settled, self._seen = marks == self._seen, marks
        if again or (is_settled and marks != self._loaded):
            self._load(marks)

    def _context(self) -> ssl.SSLContext:
        context = server_context(self._files, self._spoken, self._prefix)
        self._counts.not_after = not_after_of(self._files.cert)
        return context

    def _load(self, marks: Marks) -> None:
        self._loaded = marks  # unusable files are tried again after their next change
        try:
            self._door.context = self._context()
        except ValueError as error:
            self._counts.reload_failures += 1
            log.error(
                "invalid TLS files; the last ones stay in use",
                extra={"error": str(error)},
            )
            return
        self._counts.reloads += 1
        log.info("the TLS files were reloaded", extra={"cert": self._files.cert})


def server_context(
    files: TlsFiles, spoken: str = "http/1.1", prefix: str = "--tls"
) -> ssl.SSLContext:
    """Creates the server's SSL context, for TLS 1.2 and later. Raises ValueError with one line that
    names the flag and the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Otherwise a TLS 1.2 client could force repeated costly renegotiations.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols([spoken])
    _check_certificates(f"{prefix}-cert", files.cert)
    _read(f"{prefix}-key", files.key)
    try:
        load_certificate(context, files.cert, files.key)
    except LockedKey as error:
        raise ValueError(f"{prefix}-key: {error}") from None
    except ssl.SSLError as error:
        raise ValueError(_unfit(files, error, prefix)) from None
    except OSError as error:
        raise ValueError(f"{prefix}-cert, {prefix}-key: {error.strerror or error}") from None
    if files.client_ca is not None:
        _check_certificates(f"{prefix}-client-ca", files.client_ca)
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def not_after_of(path: str) -> int | None:
    """Return when the first certificate in a PEM file expires, in seconds since 1970; None if the
    file is unreadable."""
    try:
        shown: dict[str, Any] = ssl._ssl._test_decode_cert(path)  # type: ignore[attr-defined]
        return int(ssl.cert_time_to_seconds(shown["notAfter"]))
    except (AttributeError, LookupError, OSError, ValueError):  # ssl has no public function for it
        return None


def _read(flag: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{flag}: {path}: {error.strerror or error}") from None


def _check_certificates(flag: str, path: str) -> None:
    _read(flag, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (OSError, ValueError):
        raise ValueError(f"{flag}: {path} has no certificates in PEM") from None


def _unfit(files: TlsFiles, error: ssl.SSLError, prefix: str) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"{prefix}-key: {files.key} is not the key of the certificate in {files.cert}"
    if error.reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
        why = error.reason.lower().replace("_", " ")
        return f"{prefix}-cert: {files.cert} is too weak: {why}"
    return f"{prefix}-key: {files.key} has no private key in PEM"


def _marks(files: TlsFiles) -> Marks:
    return tuple(map(_mark, filter(None, (files.cert, files.key, files.client_ca))))


def _mark(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
