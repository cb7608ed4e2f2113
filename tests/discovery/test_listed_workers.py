"""Files that list workers: what they say, and what is said of what they say wrongly."""

import json

import pytest

from lean_selector.discovery.finders import MOST_WORKERS, listed_workers
from lean_selector.discovery.particulars import Particulars, defaults_of

YAML = b"""
workers:
  - endpoint: http://worker-1:8000
    worker_id: 18446744073709551615
    model_name: llama
    block_size: 16
    kv_events_endpoints: {0: tcp://worker-1:5557, 1: tcp://worker-1:5558}
    data_parallel_size: 2
    taints: [spot]
  - endpoint: http://worker-2:8000
    events_port: 5557
"""


def test_a_file_has_registrations() -> None:
    first, second = listed_workers(YAML, is_yaml=True).entries
    assert first == Particulars(
        endpoint="http://worker-1:8000",
        worker_id=2**64 - 1,
        model_name="llama",
        block_size=16,
        kv_events_endpoints={0: "tcp://worker-1:5557", 1: "tcp://worker-1:5558"},
        data_parallel_size=2,
        taints=frozenset({"spot"}),
    )
    assert second == Particulars(endpoint="http://worker-2:8000", events_port=5557)


def test_json_and_a_bare_list_will_do() -> None:
    content = [{"endpoint": "http://a:1"}, {"endpoint": "http://b:1"}]
    for text, is_yaml in ((json.dumps(content), False), (json.dumps({"workers": content}), True)):
        found = listed_workers(text.encode(), is_yaml)
        assert [entry.endpoint for entry in found.entries] == ["http://a:1", "http://b:1"]
    for empty in (b"workers: []", b"workers:\n"):
        assert listed_workers(empty, is_yaml=True).entries == ()


def test_the_endpoints_of_llm_d_are_read_as_they_are() -> None:
    text = b"""
endpoints:
  - name: vllm-0
    address: 10.0.0.1
    port: "8000"
    labels: {model: Qwen3-32B, llm-d.ai/role: decode}
  - {name: vllm-1, address: 10.0.0.2, port: 8001, namespace: default}
"""
    assert listed_workers(text, is_yaml=True).entries == (
        Particulars(endpoint="http://10.0.0.1:8000", model_name="Qwen3-32B", worker_role="decode"),
        Particulars(endpoint="http://10.0.0.2:8001"),
    )
    with pytest.raises(ValueError, match="`encode` is none of the roles"):
        listed_workers(text.replace(b"role: decode", b"role: encode"), is_yaml=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "expected a list of workers, or an object with"),
        (b"hello", "expected a list of workers, or an object with"),
        (b"workers: [", "expected"),
        (b"\x00", "not allowed"),
        (b"workers: [{endpoint: 'http://a:1', modle_name: x}]", r"modle_name.*\$.workers\[0\]"),
        (b"workers: [{endpoint: 'http://a:1', block_size: '16'}]", r"\$.workers\[0\].block_size"),
        (b"workers: [{model_name: x}]", "worker 0 has no endpoint"),
        (b"[{endpoint: 'http://a:80'}, {endpoint: 'http://A/'}]", "0 and 1 have the same endpoint"),
        (
            b"[{endpoint: 'http://a', worker_id: 1}, {endpoint: 'http://b', worker_id: 1}]",
            "workers 0 and 1 have the same worker_id 1",
        ),
        (b"[{endpoint: 'http://a', worker_id: 18446744073709551616}]", "exceeds"),
        (b"[{endpoint: 'http://a', events_port: 0}]", "events_port 0 is no port"),
        (b"endpoints: [{address: a, port: http}]", "`http` of a is no port"),
        (b"endpoints: [{port: 1}]", "missing required field `address`"),
        (b"[{endpoint: 'http://a', topology_domains: {on: rack1}}]", "a key is not text"),
        (b"{no: 1, workers: [{~: 2}]}", "a key is not text"),
        (b"workers: &a [*a]", "nested too deeply, or within themselves"),
        (b"workers: &a {b: *a, on: *a}", "nested too deeply, or within themselves"),
        # PyYAML 6.0.4 has a bound of its own, which strikes while its scanner looks ahead.
        (b"workers: " + b"[" * 100_000, "nested too deeply|nesting depth"),
        (b"workers: " + b"{a: " * 1000 + b"}" * 1000, "nested too deeply"),
        (b"[{endpoint: 'http://a', is_eagle: !!bool maybe}]", "does not match its tag: .*'maybe'"),
        (b"[{endpoint: 'http://a', block_size: !!int ''}]", "does not match its tag"),
        (b"[{endpoint: 'http://a', block_size: !!timestamp 1}]", "does not match its tag"),
        (b"[{endpoint: 'http://a', block_size: 2026-13-45}]", "month must be in"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_counts(text: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        listed_workers(text, is_yaml=True)
    assert "\n" not in str(caught.value)


def test_json_may_be_nested_too_deeply_too_and_what_stands_side_by_side_is_not_nested() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        listed_workers(b"[" * 100_000, is_yaml=False)
    rows = [f"- {{endpoint: 'http://a:{1 + at}', taints: [a]}}" for at in range(500)]
    assert len(listed_workers("\n".join(rows).encode(), is_yaml=True).entries) == 500


def test_a_list_of_too_many_workers_is_refused() -> None:
    workers = [{"endpoint": f"http://a:{1 + at}"} for at in range(MOST_WORKERS + 1)]
    with pytest.raises(ValueError, match="16385 workers, more than 16384"):
        listed_workers(json.dumps(workers).encode(), is_yaml=False)
    assert len(listed_workers(json.dumps(workers[1:]).encode(), False).entries) == MOST_WORKERS


def test_defaults_are_fields_of_a_registration() -> None:
    assert defaults_of('{"tenant_id":"a","events_port":5557}') == Particulars(
        tenant_id="a", events_port=5557
    )
    for text, reason in (
        ('{"worker_id":1}', "worker_id differs between workers"),
        ('{"tenant":"a"}', "unknown field `tenant`"),
        ("[]", "Expected `object`"),
        ("{", "malformed|truncated"),
    ):
        with pytest.raises(ValueError, match=reason):
            defaults_of(text)
