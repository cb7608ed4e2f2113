"""The last second of a certificate, of every form that X.509 has for it."""

import base64
import datetime

import pytest
import trustme

from lean_selector.http.tls import not_after_of

SEQUENCE, INTEGER, UTC_TIME, GENERALIZED_TIME, VERSION = 0x30, 0x02, 0x17, 0x18, 0xA0


def der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    octets = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(octets)]) + octets + content


def certificate(tag: int, end: str, *, issuer_bytes: int = 3, version: bytes = b"") -> bytes:
    """As much of one as is looked at."""
    validity = der(SEQUENCE, der(UTC_TIME, b"200101000000Z"), der(tag, end.encode()))
    before = (version, der(INTEGER, b"\1"), der(SEQUENCE), der(SEQUENCE, bytes(issuer_bytes)))
    return der(SEQUENCE, der(SEQUENCE, *before, validity, der(SEQUENCE)), der(SEQUENCE))


def pem(content: bytes, name: str = "CERTIFICATE") -> bytes:
    text = base64.encodebytes(content).decode()
    return f"-----BEGIN {name}-----\n{text}-----END {name}-----\n".encode()


def second(date: str) -> int:
    return int(datetime.datetime.fromisoformat(f"{date}+00:00").timestamp())


@pytest.mark.parametrize("issuer_bytes", [3, 200, 70_000])
@pytest.mark.parametrize("version", [b"", der(VERSION, der(INTEGER, b"\2"))])
def test_it_is_found_however_long_what_stands_before_it_is(
    issuer_bytes: int, version: bytes
) -> None:
    made = certificate(UTC_TIME, "261231235959Z", issuer_bytes=issuer_bytes, version=version)
    assert not_after_of(pem(made)) == second("2026-12-31T23:59:59")


@pytest.mark.parametrize(
    ("tag", "end", "expected"),
    [
        (UTC_TIME, "491231235959Z", second("2049-12-31T23:59:59")),
        (UTC_TIME, "500101000000Z", second("1950-01-01T00:00:00")),
        (GENERALIZED_TIME, "20500101000000Z", second("2050-01-01T00:00:00")),
        (GENERALIZED_TIME, "99991231235959Z", 253_402_300_799),  # RFC 5280: it never ends
    ],
)
def test_both_kinds_of_time_are_read(tag: int, end: str, expected: int) -> None:
    assert not_after_of(pem(certificate(tag, end))) == expected


def test_it_is_that_of_the_first_certificate_whatever_else_is_in_the_file() -> None:
    until = datetime.datetime(2031, 5, 6, 7, 8, 9, tzinfo=datetime.UTC)
    leaf = trustme.CA().issue_cert("a.test", not_after=until)
    chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
    later = pem(certificate(UTC_TIME, "491231235959Z"))
    text = b"subject=a.test\n" + leaf.private_key_pem.bytes() + chain + later
    assert not_after_of(text) == until.timestamp()
    assert not_after_of(text.replace(b"\n", b"\r\n")) == until.timestamp()


@pytest.mark.parametrize("name", ["X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_other_names_of_certificates_in_pem_are_known(name: str) -> None:
    made = pem(certificate(UTC_TIME, "261231235959Z") + der(SEQUENCE), name)
    assert not_after_of(made) == second("2026-12-31T23:59:59")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"hello",
        pem(b""),
        pem(b"\x30"),
        pem(certificate(UTC_TIME, "261231235959Z")[:30]),
        pem(certificate(UTC_TIME, "2612312359Z")),  # as some old ones have it: without seconds
        pem(certificate(UTC_TIME, "261231235959+0100")),
        pem(certificate(UTC_TIME, "269931235959Z")),
        pem(certificate(UTC_TIME, "20261231235959Z")),
        pem(certificate(GENERALIZED_TIME, "261231235959Z")),
        pem(certificate(GENERALIZED_TIME, "20261231235959.5Z")),
        b"-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n",
    ],
)
def test_what_cannot_be_read_is_none(text: bytes) -> None:
    assert not_after_of(text) is None
