"""Authorities for tests over TLS, and certificates of every kind: right, wrong and expired.

Keys are elliptic: a fresh one takes no time.
"""

import datetime
import ssl
from pathlib import Path

import trustme

HOST = "127.0.0.1"
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)

# Of nobody: made for these tests, with the passphrase `x`.
LOCKED_KEY = """\
-----BEGIN ENCRYPTED PRIVATE KEY-----
MIHsMFcGCSqGSIb3DQEFDTBKMCkGCSqGSIb3DQEFDDAcBAg8yu5BaPH00wICCAAw
DAYIKoZIhvcNAgkFADAdBglghkgBZQMEAQIEENISAkithS7Ua9esU6sLnz8EgZCn
kIK59+N+WdnOCo6X1oOYDyiQ4kd9fX0JGWbXyQibCHxHczwh2RbP1Kou5U3hhMXz
HuXuzZ4j0xRRqEuYR6EReMFoPEy1g18v3PXVRnGWRzqxXpP5V85zcNozgcI24Vkb
BwGITy36O5Tp39JVez6kEoBMkMMlYHf4pxYlsIFsA54rCyo5vlRdVnFxPje0X+w=
-----END ENCRYPTED PRIVATE KEY-----
"""


class Authority:
    """A certificate authority, and the contexts of those who hold what it issued."""

    def __init__(self) -> None:
        self._authority = trustme.CA()
        self.pem: bytes = self._authority.cert_pem.bytes()

    def issue(
        self, *names: str, expired: bool = False, not_after: datetime.datetime | None = None
    ) -> trustme.LeafCert:
        return self._authority.issue_cert(*names, not_after=PAST if expired else not_after)

    def server(self, *names: str, clients: "Authority | None" = None) -> ssl.SSLContext:
        """Of a server with these names; with `clients`, of one that lets in only theirs."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.issue(*(names or (HOST,))).configure_cert(context)
        if clients is not None:
            context.load_verify_locations(cadata=clients.pem.decode())
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, own: trustme.LeafCert | None = None) -> ssl.SSLContext:
        """Of a client that believes this authority, perhaps with a certificate of its own."""
        context = ssl.create_default_context(cadata=self.pem.decode())
        if own is not None:
            own.configure_cert(context)
        return context


class Files:
    """A certificate, its key and its authority as files of a directory, which can be replaced."""

    def __init__(self, folder: Path, authority: Authority, leaf: trustme.LeafCert) -> None:
        self.cert, self.key, self.ca = (folder / f"{name}.pem" for name in ("cert", "key", "ca"))
        self.ca.write_bytes(authority.pem)
        self.write(leaf)

    def write(self, leaf: trustme.LeafCert) -> None:
        self.key.write_bytes(leaf.private_key_pem.bytes())
        self.cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
