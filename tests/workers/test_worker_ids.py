"""Ids that nobody gave: replicas must agree, so they never change."""

import pytest

from lean_selector.workers.particulars import endpoint_key, worker_id_of


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
