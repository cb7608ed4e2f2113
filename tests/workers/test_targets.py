"""The texts of --discover and --replica-sync-discover."""

import pytest

from lean_selector.workers.particulars import Target, peer_target_of, target_of


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("file:/etc/workers.yaml", Target("", "file", "/etc/workers.yaml")),
        ("file:a:b.json", Target("", "file", "a:b.json")),
        ("url:http://host:8000", Target("", "url", "http://host:8000")),
        ("url:http://host:8000/v1", Target("", "url", "http://host:8000/v1")),
        ("url:http://host/engine-a", Target("", "url", "http://host/engine-a")),
        ("dns:vllm.default.svc:8000", Target("", "dns", "vllm.default.svc", port="8000")),
        ("dns:https://vllm:443", Target("", "dns", "vllm", port="443", is_secure=True)),
        ("dns:_http._tcp.vllm.svc", Target("", "dns", "_http._tcp.vllm.svc")),
        (
            "dns:https://_http._tcp.vllm.svc",
            Target("", "dns", "_http._tcp.vllm.svc", is_secure=True),
        ),
        ("kubernetes:default/vllm", Target("", "kubernetes", "vllm", "default")),
        ("kubernetes:default/vllm:api", Target("", "kubernetes", "vllm", "default", "api")),
        ("kubernetes:default/vllm:8000", Target("", "kubernetes", "vllm", "default", "8000")),
    ],
)
def test_a_target_is_taken_apart(text: str, target: Target) -> None:
    found = target_of(text)
    assert found == Target(
        text, target.kind, target.name, target.namespace, target.port, target.is_secure
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expected file:PATH"),
        ("workers.yaml", "expected file:PATH"),
        ("file:", "expected file:PATH"),
        ("etcd:a", "expected file:PATH"),
        ("url:host:8000", "not an http:// or https:// URL"),
        ("url:http://host:8000?x", "`url:http://host:8000\\?x`: expected a URL without a query"),
        ("url:http://host:8000/v1?", "expected a URL without a query"),
        ("url:http://host:8000#x", "expected a URL without a query"),
        ("dns:vllm", "expected dns:NAME:PORT"),
        ("dns:vllm:0", "expected dns:NAME:PORT"),
        ("dns:vllm:65536", "expected dns:NAME:PORT"),
        ("dns::8000", "expected dns:NAME:PORT"),
        ("dns:a b:8000", "expected dns:NAME:PORT"),
        ("dns:_http._tcp.vllm:8000", "without a port"),
        ("kubernetes:vllm", "expected kubernetes:NAMESPACE/SERVICE"),
        ("kubernetes:Default/vllm", "expected kubernetes:NAMESPACE/SERVICE"),
        ("kubernetes:default/vllm/x", "expected kubernetes:NAMESPACE/SERVICE"),
        ("kubernetes:default/vllm:", "neither the name of a port nor its number"),
    ],
)
def test_what_is_no_target_says_what_was_expected(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        target_of(text)


@pytest.mark.parametrize("text", ["file:a", "url:http://a", "dns:https://a:1"])
def test_peers_are_found_by_names_and_services_alone(text: str) -> None:
    with pytest.raises(ValueError, match="peers are found by"):
        peer_target_of(text)
    assert peer_target_of("dns:a:1").port == "1"
