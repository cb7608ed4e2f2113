"""Where lines are read from, and from whom."""

import pytest

from lean_selector.gateway.access_logs import (
    Place,
    Senders,
    is_loopback,
    networks_of,
    place_of,
    places_of,
)


def test_places_are_addresses_or_paths() -> None:
    assert place_of("syslog:127.0.0.1:5140") == Place(host="127.0.0.1", port=5140)
    assert place_of("syslog:[::1]:5140") == Place(host="::1", port=5140)
    assert place_of("unixgram:/run/a:b.sock") == Place(path="/run/a:b.sock")
    both = "syslog:127.0.0.1:1, unixgram:/x,syslog:127.0.0.1:1"
    assert places_of(both) == ["syslog:127.0.0.1:1", "unixgram:/x"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected syslog:HOST:PORT or unixgram:PATH, not ``"),
        ("tcp:127.0.0.1:1", "expected syslog:HOST:PORT or unixgram:PATH, not `tcp:127.0.0.1:1`"),
        ("unixgram:", "expected syslog:HOST:PORT or unixgram:PATH, not `unixgram:`"),
        ("syslog:5140", "`syslog:5140` lacks a host or a port: syslog:HOST:PORT"),
        ("syslog::1", "`syslog::1` lacks a host or a port: syslog:HOST:PORT"),
        ("syslog:::1:1", "`syslog:::1:1`: an IPv6 address stands in brackets"),
        ("syslog:h:0", "`syslog:h:0` has no port from 1 to 65535"),
        ("syslog:h:x", "`syslog:h:x` has no port from 1 to 65535"),
        ("syslog:h:65536", "`syslog:h:65536` has no port from 1 to 65535"),
    ],
)
def test_what_is_no_place_is_told_why(text: str, why: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is what is tested
        place_of(text)
    assert str(refused.value) == why


def test_loopback_may_write_and_others_by_name() -> None:
    assert networks_of("10.0.0.0/8, 192.168.1.7,10.0.0.0/8") == ["10.0.0.0/8", "192.168.1.7/32"]
    senders = Senders(["10.0.0.0/8", "fd00::/8"])
    may = ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "10.1.2.3", "::ffff:10.1.2.3")
    assert [each for each in (*may, "fd00::7") if not senders.may_write(each)] == []
    assert [each for each in ("11.0.0.1", "fe80::1", "::") if senders.may_write(each)] == []
    assert (is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("10.0.0.1")) == (
        *(True, False, False),
    )


@pytest.mark.parametrize("text", ["10.0.0.0/33", "10.0.0.1/8", "host", "10.0.0.0/8/8"])
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        networks_of(text)
