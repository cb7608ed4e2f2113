"""The texts of --discover and --replica-sync-discover, and the ids of workers that have none.

Replicas must agree on those ids, so they never change.
"""

import msgspec
import pytest

from lean_selector.discovery.particulars import (
    Particulars,
    Target,
    endpoint_key,
    peer_target_of,
    spec_of,
    target_of,
    worker_id_of,
)
from lean_selector.wire.selection_bodies import WorkerRequest


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("file:/etc/workers.yaml", Target("", "file", "/etc/workers.yaml")),
        ("file:a:b.json", Target("", "file", "a:b.json")),
        ("url:http://host:8000", Target("", "url", "http://host:8000")),
        ("url:http://host:8000/v1", Target("", "url", "http://host:8000/v1")),
        ("url:http://host/engine-a", Target("", "url", "http://host/engine-a")),
        ("url:http://host:8#prefill", Target("", "url", "http://host:8", role="prefill")),
        ("dns:vllm.default.svc:8000", Target("", "dns", "vllm.default.svc", port="8000")),
        ("dns:https://vllm:443", Target("", "dns", "vllm", port="443", is_secure=True)),
        ("kubernetes:default/vllm", Target("", "kubernetes", "vllm", "default")),
        ("kubernetes:default/vllm:api", Target("", "kubernetes", "vllm", "default", "api")),
        ("kubernetes:default/vllm:8000", Target("", "kubernetes", "vllm", "default", "8000")),
    ],
)
def test_a_target_is_taken_apart(text: str, target: Target) -> None:
    found = target_of(text)
    assert found == msgspec.structs.replace(target, text=text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expected file:PATH"),
        ("workers.yaml", "expected file:PATH"),
        ("file:", "expected file:PATH"),
        ("etcd:a", "expected file:PATH"),
        ("url:ftp://host:8000", "not an http:// or https:// URL"),
        ("url:http://host:8000?x", "`url:http://host:8000\\?x`: expected a URL without a query"),
        ("url:http://host:8000/v1?", "expected a URL without a query"),
        ("url:http://host:8000#x", "`x` is none of the roles"),
        ("url:http://host:8000#", "`` is none of the roles"),
        ("dns:vllm", "expected dns:NAME:PORT"),
        ("dns:vllm:0", "expected dns:NAME:PORT"),
        ("dns:vllm:65536", "expected dns:NAME:PORT"),
        ("dns::8000", "expected dns:NAME:PORT"),
        ("dns:a b:8000", "expected dns:NAME:PORT"),
        ("dns:_http._tcp.vllm", "SRV records are no longer read: give dns:NAME:PORT"),
        ("dns:https://_http._tcp.vllm.svc", "SRV records are no longer read"),
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


@pytest.mark.parametrize(
    ("key", "worker_id"),
    [
        ("http://10.0.0.1:8000", 8074049618474979),
        ("http://vllm-0.vllm.default.svc:8000", 5219868622580999),
        ("https://[fe80::1]:443/engine-a", 5264964761560798),
    ],
)
def test_an_endpoint_has_this_id_for_ever(key: str, worker_id: int) -> None:
    assert worker_id_of(key) == worker_id


def test_ids_are_read_as_they_stand_by_those_who_know_floats_alone() -> None:
    ids = [worker_id_of(f"http://10.0.{n // 256}.{n % 256}:8000") for n in range(20_000)]
    assert len(set(ids)) == len(ids)
    assert all(int(float(each)) == each < 2**53 for each in ids)


@pytest.mark.parametrize(
    ("endpoint", "key"),
    [
        ("http://Worker:80/", "http://worker:80"),
        ("http://worker", "http://worker:80"),
        ("https://worker/engine-a/", "https://worker:443/engine-a"),
        ("http://worker:8000/v1", "http://worker:8000"),
        ("http://worker:8000/v1/", "http://worker:8000"),
        ("https://worker/engine-a/v1", "https://worker:443/engine-a"),
        ("http://v1", "http://v1:80"),
        ("http://worker/of-v1", "http://worker:80/of-v1"),
        ("ray://replica", "ray://replica"),
        ("worker-1", "http://worker-1:80"),
        ("Worker:8000/", "http://worker:8000"),
        ("[FE80::1]:8000/engine-a", "http://[fe80::1]:8000/engine-a"),
        ("worker one", "worker one"),
    ],
)
def test_one_endpoint_has_one_key_however_it_is_spelled(endpoint: str, key: str) -> None:
    assert endpoint_key(endpoint) == key


def test_ports_of_events_need_an_endpoint_that_has_a_host() -> None:
    entry = Particulars(endpoint="worker one", events_port=5557)
    with pytest.raises(ValueError, match="events_port"):
        spec_of(1, entry, None, Particulars())


def test_a_discovery_may_have_any_field_of_a_registration() -> None:
    hints = {"router_hint_worker_type": "a", "router_hint_source_control_endpoints": {0: "tcp://w"}}
    spec = spec_of(
        1, msgspec.convert({"endpoint": "http://w", **hints}, Particulars), None, Particulars()
    )
    assert {name: getattr(spec, name) for name in hints} == hints
    assert {*WorkerRequest.__struct_fields__} <= {*Particulars.__struct_fields__}
