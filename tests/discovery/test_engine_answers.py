"""What engines say of themselves, in the words of their versions, and how they are asked."""

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from lean_selector.discovery.engine_questions import (
    ask_engine,
    model_of,
    reachable,
    read_sglang_info,
    read_vllm_metrics,
    read_vllm_sources,
)
from lean_selector.discovery.particulars import Particulars
from lean_selector.discovery.roster import Asking, KnownWorker, WorkerState
from lean_selector.http.outbound import OutboundFailed
from tests.support.fake_engine import FakeEngine
from tests.support.on_loop import on_loop, until
from tests.support.outbound_server import client, response, says, serving
from tests.support.running_service import free_port

HOST = "10.0.0.7"


def encoded(value: object) -> bytes:
    return msgspec.json.encode(value)


# -- models ----------------------------------------------------------------------------------------


def test_the_model_is_the_first_that_is_no_adapter_if_any() -> None:
    rows = [
        {"id": "sql-lora", "object": "model", "owned_by": "vllm", "parent": "llama"},
        {"id": "llama", "object": "model", "owned_by": "vllm", "root": "/models/l", "parent": None},
        {"id": "llama-alias", "object": "model", "owned_by": "vllm"},
    ]
    assert model_of(encoded({"object": "list", "data": rows})) == ("llama", "vllm")
    assert model_of(b'{"object":"list","data":[]}') == (None, None)


# -- vLLM ------------------------------------------------------------------------------------------

METRICS = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:num_requests_running{engine="0",model_name="llama"} 0.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="7000",\
num_gpu_blocks_override="None",prefix_caching_hash_algo="sha256\\"x",sliding_window="None"} 1.0
"""


def read_metrics(body: bytes) -> Particulars:
    into = Particulars()
    assert read_vllm_metrics(body, into)
    return into


def test_vllm_tells_block_size_and_count_in_a_metric() -> None:
    assert read_metrics(METRICS) == Particulars(block_size=32, total_kv_blocks=7000)


def test_vllm_has_a_rank_for_each_of_its_engines() -> None:
    second = METRICS.replace(b'engine="0"', b'engine="1"').replace(b"7000", b"7001")
    told = read_metrics(METRICS + second)
    assert (told.data_parallel_start_rank, told.data_parallel_size) == (0, 2)
    assert (told.block_size, told.total_kv_blocks) == (32, 7001)
    unknown_yet = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0'
    assert read_metrics(unknown_yet) == Particulars(block_size=16)


def test_metrics_of_others_are_not_those_of_vllm() -> None:
    for body in (b"", b"# HELP vllm:cache_config_info{x}\n", b"sglang:num_used_tokens 5\n"):
        assert not read_vllm_metrics(body, Particulars())


ROWS = [
    {"data_parallel_rank": 1, "endpoint": "tcp://*:5558", "replay_endpoint": None, "topic": ""},
    {
        "data_parallel_rank": 0,
        "endpoint": "tcp://10.0.0.9:41001",
        "replay_endpoint": "tcp://*:5600",
    },
]


def test_vllm_tells_where_each_rank_tells_its_events() -> None:
    into = Particulars()
    read_vllm_sources(encoded(ROWS), HOST, into)
    assert into.kv_events_endpoints == {1: "tcp://10.0.0.7:5558", 0: "tcp://10.0.0.9:41001"}
    assert into.replay_endpoints == {0: "tcp://10.0.0.7:5600"}
    assert (into.data_parallel_start_rank, into.data_parallel_size) == (0, 2)


def test_vllm_0_32_tells_each_rank_s_configuration_by_its_number() -> None:
    rank = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "replay_endpoint": "tcp://*:5600",
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": "",
    }
    into = Particulars()
    body = {
        "0": {**rank, "endpoint": "tcp://*:5557"},
        "1": {**rank, "endpoint": "tcp://*:5558", "replay_endpoint": None},
        "2": {"publisher": "null", "endpoint": "tcp://*:5559"},
    }
    read_vllm_sources(encoded(body), HOST, into)
    assert into.kv_events_endpoints == {0: "tcp://10.0.0.7:5557", 1: "tcp://10.0.0.7:5558"}
    assert into.replay_endpoints == {0: "tcp://10.0.0.7:5600"}


def test_a_rank_that_is_served_alone_keeps_its_number_and_none_tells_of_none() -> None:
    into = Particulars()
    for none in (b"[]", b"{}"):
        read_vllm_sources(none, HOST, into)
    assert into == Particulars()
    read_vllm_sources(encoded([{"data_parallel_rank": 3, "endpoint": "tcp://*:1"}]), HOST, into)
    assert (into.data_parallel_start_rank, into.data_parallel_size) == (3, 1)


# -- SGLang ----------------------------------------------------------------------------------------

INFO = {
    "model_path": "meta/llama",
    "served_model_name": "llama",
    "page_size": 64,
    "dp_size": 2,
    "max_total_num_tokens": 1000,
    "max_prefill_tokens": 16384,
    "internal_states": [{"memory_usage": {}}],
}


def read_info(**more: object) -> Particulars:
    into = Particulars()
    read_sglang_info(encoded({**INFO, **more}), HOST, into)
    return into


def test_sglang_tells_what_it_is_in_one_answer() -> None:
    told = read_info(
        kv_events={
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": 5557,
            "topic": "",
            "block_size": 128,
            "dp_size": 2,
            "load_topic": "load",
            "replay_endpoint_port_base": 5757,
        }
    )
    assert told == Particulars(
        block_size=128,
        total_kv_blocks=8,
        max_num_batched_tokens=16384,
        data_parallel_size=2,
        kv_events_endpoints={0: "tcp://10.0.0.7:5557", 1: "tcp://10.0.0.7:5558"},
        replay_endpoints={0: "tcp://10.0.0.7:5757", 1: "tcp://10.0.0.7:5758"},
    )


def test_sglang_on_several_hosts_names_each_rank() -> None:
    rows = [{"dp_rank": 0, "endpoint": "tcp://10.0.0.1:1"}, {"dp_rank": 1, "endpoint": "tcp://*:2"}]
    told = read_info(kv_events={"endpoint_host": "*", "endpoint_port_base": 1, "publishers": rows})
    assert told.kv_events_endpoints == {0: "tcp://10.0.0.1:1", 1: "tcp://10.0.0.7:2"}


def test_an_older_sglang_tells_its_flag() -> None:
    config = '{"publisher":"zmq","endpoint":"tcp://0.0.0.0:7000","replay_endpoint":"tcp://*:7100"}'
    told = read_info(kv_events_config=config)
    assert told.kv_events_endpoints == {0: "tcp://10.0.0.7:7000", 1: "tcp://10.0.0.7:7001"}
    assert told.replay_endpoints == {0: "tcp://10.0.0.7:7100", 1: "tcp://10.0.0.7:7101"}


def test_sglang_that_publishes_nothing_tells_of_no_events() -> None:
    assert read_info(kv_events=None, kv_events_config=None).kv_events_endpoints is None
    assert read_info(kv_events_config='{"publisher":"null"}').kv_events_endpoints is None


def test_sglang_with_eagle_hashes_pairs() -> None:
    for algorithm, is_eagle in (("EAGLE3", True), ("NGRAM", None), (None, None)):
        assert read_info(speculative_algorithm=algorithm).is_eagle is is_eagle


# -- hosts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "host", "expected"),
    [
        ("tcp://*:5557", "a", "tcp://a:5557"),
        ("tcp://0.0.0.0:5557", "::1", "tcp://[::1]:5557"),
        ("tcp://[::]:5557", "a", "tcp://a:5557"),
        ("tcp://:::5557", "a", "tcp://a:5557"),
        ("tcp://10.0.0.1:5557", "a", "tcp://10.0.0.1:5557"),
        ("ipc:///tmp/x", "a", "ipc:///tmp/x"),
    ],
)
def test_a_wildcard_is_the_host_of_the_engine(bound: str, host: str, expected: str) -> None:
    assert reachable(bound, host) == expected


# -- asked over HTTP, until they say it and again afterwards ---------------------------------------


@pytest.mark.parametrize(
    ("kind", "tells_sources", "asked"),
    [
        ("vllm", True, ["/v1/models", "/metrics", "/kv_event_sources"]),
        ("vllm", False, ["/v1/models", "/metrics", "/kv_event_sources"]),  # an older one
        ("sglang", True, ["/v1/models", "/server_info", "/get_server_info"]),
    ],
)
@on_loop
async def test_an_engine_is_asked_as_its_kind_is(
    kind: str, tells_sources: bool, asked: list[str]
) -> None:
    with FakeEngine(kind=kind, tells_sources=tells_sources) as engine:
        told = await ask_engine(client(), engine.url)
        events = {0: f"tcp://127.0.0.1:{engine.events_port}"} if tells_sources else None
        assert (told.model_name, told.block_size, told.total_kv_blocks) == ("m", 16, 1000)
        assert told.kv_events_endpoints == events
        assert sorted(engine.asked) == sorted(asked)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"data":[]}', "it serves no model yet"),
        (b"<html>", "unknown form of response"),
        (b'{"data":[{"id":5}]}', "unknown form of response"),
        (b'{"data":' + b"[" * 100_000, "unknown form of response"),
    ],
)
@on_loop
async def test_other_services_are_told_from_engines(body: bytes, reason: str) -> None:
    async with serving(says(response(body))) as served:
        with pytest.raises(OutboundFailed, match=reason):
            await ask_engine(client(), served.url)


class Engines:
    """What was heard of one engine that is asked again and again."""

    def __init__(self, url: str) -> None:
        self.heard: list[Particulars] = []
        self.failures: list[str] = []
        self.known = KnownWorker(url, Particulars(endpoint=url))
        ask = functools.partial(ask_engine, client())
        self.asking = Asking(
            ask,
            lambda _, told: self.heard.append(told),
            lambda _, reason: self.failures.append(reason),
            refresh_s=0.005,
            again_first_s=0.001,
        )


@asynccontextmanager
async def asking(url: str, state: WorkerState = WorkerState.ASKING) -> AsyncIterator[Engines]:
    engines = Engines(url)
    engines.known.state = state
    engines.asking.begin(engines.known)
    engines.asking.begin(engines.known)  # nobody is asked twice at a time
    try:
        yield engines
    finally:
        engines.asking.end(engines.known)
        await engines.asking.close()


@on_loop
async def test_an_engine_that_is_not_up_yet_is_asked_again() -> None:
    with FakeEngine() as engine:
        engine.status = 503
        async with asking(engine.url) as it:
            await until(lambda: len(it.failures) >= 3)
            assert "status 503: starting" in it.failures[0]
            assert not it.heard
            engine.status = 200
            await until(lambda: it.heard)
            engine.block_size = 32
            await until(lambda: it.heard[-1].block_size == 32)


@on_loop
async def test_a_port_where_nobody_listens_is_asked_again() -> None:
    async with asking(f"http://127.0.0.1:{free_port()}") as it:
        await until(lambda: len(it.failures) >= 3)
        assert "Connection refused" in it.failures[-1]


@on_loop
async def test_who_is_known_over_http_is_not_asked() -> None:
    with FakeEngine() as engine, FakeEngine() as other:
        async with asking(engine.url, WorkerState.BY_HTTP) as it, asking(other.url) as beside:
            await until(lambda: len(beside.heard) > 3)
            assert not engine.asked
            it.known.state = WorkerState.ASKING
            await until(lambda: it.heard)
