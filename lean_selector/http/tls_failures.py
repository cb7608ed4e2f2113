"""Why a TLS handshake failed, in the words of a metric and of the log."""

import ssl
from typing import Final

_CLIENT_CERTIFICATE: Final = frozenset(
    {"CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE"}
)
_NOTHING_COMMON: Final = frozenset(
    {
        "UNSUPPORTED_PROTOCOL",
        "VERSION_TOO_LOW",
        "UNKNOWN_PROTOCOL",
        "WRONG_VERSION_NUMBER",
        "WRONG_SSL_VERSION",
        "NO_SHARED_CIPHER",
        "NO_SHARED_GROUP",
        "NO_SUITABLE_KEY_SHARE",
        "NO_SUITABLE_SIGNATURE_ALGORITHM",
        "NO_SHARED_SIGNATURE_ALGORITHMS",
    }
)


def kind_of(error: ssl.SSLError) -> str:
    """The label of a failure, one of `tls_counts.REASONS`, from OpenSSL's name of it."""
    reason = error.reason or ""
    if reason in _CLIENT_CERTIFICATE:
        return "client_certificate"
    if reason in _NOTHING_COMMON:
        return "version_or_cipher"
    return "refused_by_client" if "_ALERT_" in reason else "other"


def text_of(error: ssl.SSLError) -> str:
    """For the log."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    words = (error.reason or "the TLS handshake failed").lower().replace("_", " ")
    return f"it says: {words.partition(' alert ')[2]}" if " alert " in words else words
