"""The certificate of a service, its key, and the authorities of its clients: read, and read again.

What is new counts for new handshakes; open connections keep theirs. Files that do not fit together
are refused at the start, and later leave everything as it was, with a log line.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import Callable
from typing import Final

from lean_selector.http.connections import Connections, TlsCounts
from lean_selector.http.tls import TlsAcceptor, not_after_of
from lean_selector.http.trust import LockedKey, load_certificate
from lean_selector.server.service_flags import TlsFiles

log = logging.getLogger("lean_selector.server")

HANDSHAKE_LOG_S: Final = 10.0

Marks = tuple[tuple[int, int, int] | None, ...]  # when changed, which file, how long


class ServerTls:
    """What a listener on TCP has where TLS is spoken: the protocol of each connection."""

    def __init__(
        self,
        files: TlsFiles,
        connections: Connections,
        new_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        """Raises ValueError in one clear line, naming the flag and the file."""
        self._files: Final = files
        self._counts: Final = connections.tls
        self._door: Final = TlsAcceptor(self._context(), connections, new_protocol)
        self._log: Final = HandshakeLog(connections.tls)
        self._loaded = self._seen = _marks(files)

    def new_connection(self) -> asyncio.Protocol:
        return self._door.new_connection()

    def look(self, now: float) -> None:
        """Takes over files that have changed, and logs what failed. Call it now and then.

        What changed is taken when it is the same at two looks: a certificate and its key are not
        replaced in one step.
        """
        self._log.look(now)
        marks = _marks(self._files)
        is_settled, self._seen = marks == self._seen, marks
        if is_settled and marks != self._loaded:
            self._load(marks)

    def reload(self) -> None:
        """Takes them over at once, also when they look as they did."""
        self._load(_marks(self._files))

    def _context(self) -> ssl.SSLContext:
        context = server_context(self._files)
        self._counts.not_after = not_after_of(_read("--tls-cert", self._files.cert))
        return context

    def _load(self, marks: Marks) -> None:
        self._loaded = marks  # what cannot be used is tried again when it has changed again
        try:
            self._door.context = self._context()
        except ValueError as error:
            self._counts.reload_failures += 1
            log.error(
                "the TLS files cannot be used, the last ones stay", extra={"error": str(error)}
            )
            return
        self._counts.reloads += 1
        log.info("the TLS files were read again", extra={"cert": self._files.cert})


class HandshakeLog:
    """Failed handshakes, in one line for all of some seconds: any client can make many."""

    def __init__(self, counts: TlsCounts) -> None:
        self._counts: Final = counts
        self._known = dict(counts.failures)
        self._not_before = 0.0  # monotonic seconds

    def look(self, now: float) -> None:
        """Call it now and then."""
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
    """TLS 1.2 at least. Raises ValueError in one clear line, naming the flag and the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # In TLS 1.2 a client may otherwise ask for one costly handshake after the other.
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
        raise ValueError(f"{flag}: {path} holds no certificates in PEM") from None


def _unfit(files: TlsFiles, error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"--tls-key: {files.key} is not the key of the certificate in {files.cert}"
    if error.reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
        why = error.reason.lower().replace("_", " ")
        return f"--tls-cert: {files.cert} is too weak: {why}"
    return f"--tls-key: {files.key} holds no private key in PEM"


def _marks(files: TlsFiles) -> Marks:
    return tuple(map(_mark, filter(None, (files.cert, files.key, files.client_ca))))


def _mark(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
