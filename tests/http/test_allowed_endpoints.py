"""Patterns of endpoints, and every spelling of what they are to keep out."""

import socket

import pytest

from lean_selector.http.allowed_endpoints import AllowedEndpoints, Url, base_without_version


def allows(pattern: str, endpoint: str) -> bool:
    return AllowedEndpoints([pattern]).refusal(endpoint) is None


def v4(address: str) -> tuple[int, tuple[str, int]]:
    return socket.AF_INET, (address, 5557)


def v6(address: str) -> tuple[int, tuple[str, int, int, int]]:
    return socket.AF_INET6, (address, 5557, 0, 0)


@pytest.mark.parametrize(
    ("pattern", "endpoint"),
    [
        ("tcp://*:*", "tcp://anything.at.all:1"),
        ("tcp://*:*", "tcp://10.0.0.1:1"),
        ("tcp://*:*", "tcp://[fd00::1]:1"),
        ("*://*:*", "https://engine"),
        ("*://10.0.0.0/8:*", "tcp://10.1.2.3:5557"),
        ("tcp://10.1.2.3:5557", "tcp://10.1.2.3:5557"),
        ("tcp://10.0.0.0/8:5557-5564", "tcp://10.1.2.3:5564"),
        ("http://10.0.0.0/8:80", "http://10.1.2.3/v1"),
        ("https://10.0.0.0/8:443", "https://10.1.2.3?a=b"),
        ("http://10.0.0.0/8:8000", "10.1.2.3:8000"),
        ("tcp://[fd00::/8]:*", "tcp://[fd12::1]:5557"),
        ("tcp://[fd00::]/8:*", "tcp://[FD12::1]:5557"),
        ("tcp://[fe80::/10]:*", "tcp://[fe80::1%eth0]:5557"),
        ("tcp://10.0.0.0/8:*", "tcp://[::ffff:10.1.2.3]:5557"),
        ("http://127.0.0.0/8:*", "http://127.1:80"),
        ("http://127.0.0.0/8:*", "http://0x7f000001:80"),
        ("http://127.0.0.0/8:*", "http://2130706433:80"),
        ("tcp://*.engines.svc:*", "tcp://a-0.engines.svc:1"),
        ("TCP://*.Engines.svc.:*", "tcp://A-0.ENGINES.svc.:1"),
        ("http://engine-*:8000", "http://engine-17:8000"),
        ("ipc:///run/engines/*", "ipc:///run/engines/a.sock"),
        ("ipc://@engine-*", "ipc://@engine-1"),
        ("ipc://*", "ipc:///anywhere/at/all"),
        ("inproc://a", "inproc://a"),
    ],
)
def test_what_a_pattern_means_is_allowed(pattern: str, endpoint: str) -> None:
    assert allows(pattern, endpoint)


@pytest.mark.parametrize(
    ("pattern", "endpoint"),
    [
        ("tcp://10.0.0.0/8:*", "tcp://11.0.0.1:5557"),
        ("tcp://10.0.0.0/8:*", "http://10.0.0.1:5557"),
        ("tcp://10.0.0.0/8:5557", "tcp://10.0.0.1:5558"),
        ("tcp://10.0.0.0/8:5557-5558", "tcp://10.0.0.1:5559"),
        ("tcp://10.0.0.0/8:*", "tcp://10.0.0.1"),
        ("tcp://10.0.0.0/8:*", "tcp://10.0.0.1:65536"),
        ("tcp://10.0.0.0/8:*", "tcp://*:5557"),
        ("tcp://*:*", "tcp://*:5557"),
        ("tcp://10.0.0.0/8:*", "tcp://0.0.0.0:5557"),
        ("tcp://10.0.0.0/8:*", "tcp://[::ffff:11.0.0.1]:5557"),
        ("tcp://[::/0]:*", "tcp://[::ffff:11.0.0.1]:5557"),
        ("tcp://[fd00::/8]:*", "tcp://[::1]:5557"),
        ("http://10.0.0.0/8:*", "http://127.1:80"),
        ("http://10.0.0.0/8:*", "http://0x7f.1:80"),
        ("http://10.0.0.0/8:*", "http://127.0.0.1.:80"),
        ("http://*.svc:*", "http://svc:80"),
        ("http://*.svc:*", "http://a.b.svc:80"),
        ("http://*.svc:*", "http://a.svc.evil.com:80"),
        ("http://engine-*:*", "http://engine-1.evil.com:80"),
        ("http://*.svc:*", "http://10.0.0.1:80"),
        ("http://good:*", "http://good@evil:80"),
        ("http://good:*", "http://good:80@evil:80"),
        ("http://good:*", "http://evil:80/@good:80"),
        ("http://good:*", "http://good\\@evil:80"),
        ("http://good:*", "http://good\n.evil:80"),
        ("http://good:*", "http://good .evil:80"),
        ("http://good:*", "http://%67ood:80"),
        ("http://good:*", "ht\ttp://good:80"),
        ("http://good:*", " http://good:80"),
        ("http://good:*", "http://g\uff4fod:80"),
        ("http://good:*", "http://good..:80"),
        ("http://good:*", "http://[good]:80"),
        ("http://good:*", "ftp://good:80"),
        ("http://good:*", "grpc://good:80"),
        ("http://good:*", "evil/x://good:80"),
        ("tcp://good:*", "tcp://eth0;good:5557"),
        ("tcp://good:*", "tcp://good:+5557"),
        ("tcp://good:*", "tcp://good:5557/evil"),
        ("*://*:*", "ipc:///run/engines/a"),
        ("*://*:*", "inproc://a"),
        ("*://*:*", ""),
        ("*://*:*", "://a:1"),
        ("ipc:///run/engines/*", "ipc:///run/engines/../secret"),
        ("ipc:///run/engines/*", "ipc:///run/engines/a/b"),
        ("ipc:///run/engines/*", "ipc:///run//engines/a"),
        ("ipc:///run/engines/*", "inproc:///run/engines/a"),
    ],
)
def test_what_no_pattern_means_is_refused(pattern: str, endpoint: str) -> None:
    assert not allows(pattern, endpoint)


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("10.0.0.0/8", "is not SCHEME://HOST:PORT"),
        ("tcp://", "is not SCHEME://HOST:PORT"),
        ("t_p://a:1", "has no valid scheme"),
        ("tcp://a", "has no port"),
        ("tcp://a:b", "the port is a number"),
        ("tcp://a:5-4", "there are no ports 5-4"),
        ("tcp://a:65536", "there are no ports 65536"),
        ("tcp://10.0.0.1/8:*", "has host bits set"),
        ("tcp://10.0.*:*", "such as 10.0.0.0/8"),
        ("tcp://10.0.0:*", "10.0.0"),
        ("tcp://fd00::/8:*", "brackets"),
        ("tcp://[10.0.0.0/8]:*", "brackets"),
        ("tcp://user@host:*", "has no valid host"),
        ("tcp://h\u00f6st:*", "has no valid host"),
    ],
)
def test_a_pattern_that_cannot_be_read_is_refused_with_its_reason(pattern: str, fault: str) -> None:
    with pytest.raises(ValueError, match=r".+") as told:
        AllowedEndpoints(["tcp://*:*", pattern])
    assert fault in str(told.value)
    assert pattern.partition("://")[2] in str(told.value)


def test_no_pattern_at_all_allows_nothing() -> None:
    assert (
        AllowedEndpoints([]).refusal("tcp://a:1")
        == "`tcp://a:1` is not allowed by --allow-endpoint"
    )


def test_a_name_is_judged_by_what_it_resolves_to_where_only_networks_could_allow_it() -> None:
    allowed = AllowedEndpoints(["tcp://10.0.0.0/8:*", "tcp://[fd00::/8]:*"])
    inside, mapped, six = v4("10.0.0.1"), v6("::ffff:10.0.0.2"), v6("fd00::1")
    outside = [v4("169.254.169.254"), v4("127.0.0.1"), v6("::1"), v6("::ffff:127.0.0.1")]
    assert allowed.refusal("tcp://engine:5557") is None
    assert allowed.among("tcp://engine:5557", [inside, *outside]) == [inside]
    assert allowed.among("tcp://engine:5557", [*outside, mapped, six]) == [mapped, six]
    with pytest.raises(PermissionError) as told:
        allowed.among("tcp://engine:5557", outside)
    assert str(told.value) == (
        "`tcp://engine:5557` is 169.254.169.254, 127.0.0.1, ::1, "
        "which is not allowed by --allow-endpoint"
    )


def test_a_name_that_is_allowed_by_name_may_be_anywhere() -> None:
    allowed = AllowedEndpoints(["tcp://engine:*", "tcp://10.0.0.0/8:*"])
    assert allowed.among("tcp://engine:5557", [v4("192.168.0.1")]) == [v4("192.168.0.1")]
    with pytest.raises(PermissionError):
        allowed.among("tcp://other:5557", [v4("192.168.0.1")])


def test_a_network_of_another_port_does_not_judge_a_name() -> None:
    allowed = AllowedEndpoints(["tcp://10.0.0.0/8:5557"])
    assert allowed.refusal("tcp://engine:5558") is not None
    with pytest.raises(PermissionError):
        allowed.among("tcp://engine:5558", [v4("10.0.0.1")])


# -- URLs taken apart: one endpoint has one origin, however it is spelled --------------------------


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("http://Worker-1:8000", "http://worker-1:8000"),
        ("http://worker-1:8000/", "http://worker-1:8000"),
        ("http://worker-1:8000/v1?a=b#c", "http://worker-1:8000"),
        ("http://worker-1", "http://worker-1:80"),
        ("https://worker-1", "https://worker-1:443"),
        ("HTTPS://worker-1:443", "https://worker-1:443"),
        ("http://[FE80::1]:8000", "http://[fe80::1]:8000"),
    ],
)
def test_every_spelling_of_an_endpoint_has_the_same_origin(text: str, origin: str) -> None:
    assert Url(text).origin == origin


@pytest.mark.parametrize(
    ("endpoint", "base"),
    [
        ("http://a:1/v1", "http://a:1"),
        ("http://a:1/v1/", "http://a:1"),
        ("http://a:1/", "http://a:1"),
        ("http://a/b/v1", "http://a/b"),
        ("a:1", "http://a:1"),
        ("a:1/v1", "http://a:1"),
        ("http://v1", "http://v1"),
        ("v1", "http://v1"),
        ("", ""),
    ],
)
def test_an_endpoint_may_end_in_the_version_that_every_request_begins_with(
    endpoint: str, base: str
) -> None:
    assert base_without_version(endpoint) == base


def test_what_is_asked_of_a_host_is_its_path_and_query() -> None:
    assert Url("http://a/b/c?d=e&f#g").target == "/b/c?d=e&f"
    assert Url("http://a").target == "/"
    assert (Url("http://[::1]:5").host, Url("http://[::1]:5").authority) == ("::1", "[::1]:5")
