"""URLs taken apart: one endpoint has one origin, however it is spelled."""

import pytest

from lean_selector.http.allowed_endpoints import Url, base_without_version


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
