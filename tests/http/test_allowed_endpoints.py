"""Allowed endpoints, and every spelling of what is to be kept out; URLs taken apart."""

import socket

import pytest

from lean_selector.http.allowed_endpoints import AllowedEndpoints
from lean_selector.http.urls import Url, base_without_version


def allows(value: str, endpoint: str) -> bool:
    return AllowedEndpoints([value]).refusal(endpoint) is None


def v4(address: str) -> tuple[int, tuple[str, int]]:
    return socket.AF_INET, (address, 5557)


def v6(address: str) -> tuple[int, tuple[str, int, int, int]]:
    return socket.AF_INET6, (address, 5557, 0, 0)


@pytest.mark.parametrize(
    ("value", "endpoint"),
    [
        *(("10.0.0.0/8", "tcp://10.1.2.3:5557"), ("10.0.0.0/8", "https://10.1.2.3")),
        ("10.1.2.3:5557", "tcp://10.1.2.3:5557"),
        *(("10.0.0.0/8:5557-5564", "tcp://10.1.2.3:5564"), ("10.0.0.0/8:80", "http://10.1.2.3/v1")),
        *(("10.0.0.0/8:443", "https://10.1.2.3?a=b"), ("10.0.0.0/8:8000", "10.1.2.3:8000")),
        *(("[fd00::/8]", "tcp://[fd12::1]:5557"), ("fd00::/8", "tcp://[FD12::1]:5557")),
        *(("[FD12::1]:5557", "tcp://[fd12::1]:5557"), ("fd12::1", "tcp://[fd12::1]:5557")),
        ("[fe80::/10]", "tcp://[fe80::1%eth0]:5557"),
        *(("10.0.0.0/8", "tcp://[::ffff:10.1.2.3]:5557"), ("127.0.0.0/8", "http://127.1:80")),
        *(("127.0.0.0/8", "http://0x7f000001:80"), ("127.0.0.0/8", "http://2130706433:80")),
        *(("a-0.Engines.svc.", "tcp://A-0.ENGINES.svc.:1"), (" fade:8000 ", "http://fade:8000")),
    ],
)
def test_what_a_value_means_is_allowed(value: str, endpoint: str) -> None:
    assert allows(value, endpoint)


@pytest.mark.parametrize(
    ("value", "endpoint"),
    [
        *(("10.0.0.0/8", "tcp://11.0.0.1:5557"), ("10.0.0.0/8:5557", "tcp://10.0.0.1:5558")),
        *(("10.0.0.0/8:5557-5558", "tcp://10.0.0.1:5559"), ("10.0.0.0/8", "tcp://10.0.0.1")),
        *(("10.0.0.0/8", "tcp://10.0.0.1:65536"), ("0.0.0.0/0", "tcp://*:5557")),
        *(("10.0.0.0/8", "tcp://0.0.0.0:5557"), ("10.0.0.0/8", "tcp://[::ffff:11.0.0.1]:5557")),
        *(("[::/0]", "tcp://[::ffff:11.0.0.1]:5557"), ("[fd00::/8]", "tcp://[::1]:5557")),
        *(("10.0.0.0/8", "http://127.1:80"), ("10.0.0.0/8", "http://0x7f.1:80")),
        *(("10.0.0.0/8", "http://127.0.0.1.:80"), ("svc", "http://a.svc:80")),
        *(("a.svc", "http://svc:80"), ("a.svc", "http://a.svc.evil.com:80")),
        *(("svc", "http://10.0.0.1:80"), ("good", "http://good@evil:80")),
        *(("good", "http://good:80@evil:80"), ("good", "http://evil:80/@good:80")),
        *(("good", "http://good\\@evil:80"), ("good", "http://good\n.evil:80")),
        *(("good", "http://good .evil:80"), ("good", "http://%67ood:80")),
        *(("good", "ht\ttp://good:80"), ("good", " http://good:80")),
        *(("good", "http://g\uff4fod:80"), ("good", "http://good..:80")),
        *(("good", "http://[good]:80"), ("good", "grpc://good"), ("good", "evil/x://good:80")),
        *(("good", "tcp://eth0;good:5557"), ("good", "tcp://good:+5557")),
        *(("good", "tcp://good:5557/evil"), ("good", "ipc://good"), ("good", "inproc://good")),
        *(("0.0.0.0/0", ""), ("0.0.0.0/0", "://a:1")),
    ],
)
def test_what_no_value_means_is_refused(value: str, endpoint: str) -> None:
    assert not allows(value, endpoint)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("tcp://a:1", "a scheme has no meaning here"),
        ("http://10.0.0.0/8:8000", "a scheme has no meaning here"),
        ("ipc:///run/engine", "a scheme has no meaning here"),
        ("*", "* has no meaning here"),
        ("*.svc:1", "* has no meaning here"),
        ("10.0.0.0/8:*", "* has no meaning here"),
        ("10.0.*", "* has no meaning here"),
        ("a:b", "expected HOST"),
        ("a:", "expected HOST"),
        (":1", "expected HOST"),
        ("a:5-", "expected HOST"),
        ("a:5-4", "there are no ports 5-4"),
        ("a:65536", "there are no ports 65536"),
        ("10.0.0.1/8", "has host bits set"),
        ("10.0.0", "10.0.0"),
        ("0x7f000001", "0x7f000001"),
        ("fd00::/8:5557", "expected HOST"),
        ("[10.0.0.0/8]", "brackets"),
        ("[a]", "expected HOST"),
        ("user@host", "expected HOST"),
        ("h\u00f6st", "expected HOST"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused_with_its_reason(value: str, fault: str) -> None:
    with pytest.raises(ValueError, match=r".+") as told:
        AllowedEndpoints(["10.0.0.0/8", value])
    assert fault in str(told.value)
    assert str(told.value).startswith(f"`{value}`: ")


def test_no_value_at_all_allows_nothing() -> None:
    assert (
        AllowedEndpoints([]).refusal("tcp://a:1")
        == "`tcp://a:1` is not allowed by --allow-endpoint"
    )


def test_a_name_is_judged_by_what_it_resolves_to_where_only_networks_could_allow_it() -> None:
    allowed = AllowedEndpoints(["10.0.0.0/8", "[fd00::/8]"])
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
    allowed = AllowedEndpoints(["engine", "10.0.0.0/8"])
    assert allowed.among("tcp://engine:5557", [v4("192.168.0.1")]) == [v4("192.168.0.1")]
    with pytest.raises(PermissionError):
        allowed.among("tcp://other:5557", [v4("192.168.0.1")])


def test_a_network_of_another_port_does_not_judge_a_name() -> None:
    allowed = AllowedEndpoints(["10.0.0.0/8:5557"])
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
        *(("http://a:1/v1", "http://a:1"), ("http://a:1/v1/", "http://a:1")),
        *(("http://a:1/", "http://a:1"), ("http://a/b/v1", "http://a/b"), ("a:1", "http://a:1")),
        *(("a:1/v1", "http://a:1"), ("http://v1", "http://v1"), ("v1", "http://v1"), ("", "")),
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
