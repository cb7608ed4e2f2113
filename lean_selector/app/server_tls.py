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
from lean_selector.http.connections import Connections, TlsCounts
from lean_selector.http.tls import TlsAcceptor
from lean_selector.http.trust import LockedKey, load_certificate

log = logging.getLogger("lean_selector.server")

HANDSHAKE_LOG_S: Final = 10.0

Marks = tuple[tuple[int, int, int] | None, ...]  # (time of change, inode, size) per file


class ServerTls:
    """Creates the protocol object of each TLS connection of a TCP listener."""

    def __init__(
        self,
        files: TlsFiles,
        connections: Connections,
        new_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        """Loads the files. Raises ValueError with one line that names the flag and the file."""
        self._files: Final = files
        self._counts: Final = connections.tls
        self._door: Final = TlsAcceptor(self._context(), connections, new_protocol)
        self._log: Final = HandshakeLog(connections.tls)
        self._loaded = self._seen = _marks(files)

    def new_connection(self) -> asyncio.Protocol:
        return self._door.new_connection()

    def reload_changed(self, now: float) -> None:
        """Reloads changed files, and logs failed handshakes. Call it periodically.

        A certificate and its key are not replaced in one step, so a change is loaded only when two
        consecutive calls find the same files."""
        self._log.log_failures(now)
        marks = _marks(self._files)
        is_settled, self._seen = marks == self._seen, marks
        if is_settled and marks != self._loaded:
            self._load(marks)

    def reload(self) -> None:
        """Reloads the files at once, even if they look unchanged."""
        self._load(_marks(self._files))

    def _context(self) -> ssl.SSLContext:
        context = server_context(self._files)
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


class HandshakeLog:
    """Logs failed handshakes. Any client can cause failures, so at most one line is logged per
    HANDSHAKE_LOG_S seconds."""

    def __init__(self, counts: TlsCounts) -> None:
        self._counts: Final = counts
        self._known = dict(counts.failures)
        self._not_before = 0.0  # monotonic seconds

    def log_failures(self, now: float) -> None:
        """Logs the handshakes that failed since the last line, once in HANDSHAKE_LOG_S at most."""
        failures, known = self._counts.failures, self._known
        if now < self._not_before or failures == known:
            return
        self._not_before, self._known = now + HANDSHAKE_LOG_S, dict(failures)
        new = {reason: count - known[reason] for reason, count in failures.items()}
        log.warning(
            "TLS handshakes failed",
            extra={**{k: n for k, n in new.items() if n}, "last": self._counts.last_failure},
        )


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Creates the server's SSL context, for TLS 1.2 and later. Raises ValueError with one line that
    names the flag and the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Otherwise a TLS 1.2 client could force repeated costly renegotiations.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _check_certificates("--tls-cert", files.cert)
    _read("--tls-key", files.key)
    try:
        load_certificate(context, files.cert, files.key)
    except LockedKey as error:
        raise ValueError(f"--tls-key: {error}") from None
    except ssl.SSLError as error:
        raise ValueError(_unfit(files, error)) from None
    except OSError as error:
        raise ValueError(f"--tls-cert, --tls-key: {error.strerror or error}") from None
    if files.client_ca is not None:
        _check_certificates("--tls-client-ca", files.client_ca)
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


def _unfit(files: TlsFiles, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"--tls-key: {files.key} is not the key of the certificate in {files.cert}"
    if error.reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
        why = error.reason.lower().replace("_", " ")
        return f"--tls-cert: {files.cert} is too weak: {why}"
    return f"--tls-key: {files.key} has no private key in PEM"


def _marks(files: TlsFiles) -> Marks:
    return tuple(map(_mark, filter(None, (files.cert, files.key, files.client_ca))))


def _mark(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
