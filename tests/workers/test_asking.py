"""Engines are asked what they are, over real HTTP, until they say it and again afterwards."""

import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from lean_selector.http.outbound import OutboundFailed
from lean_selector.workers.engine_questions import ask_engine
from lean_selector.workers.particulars import Particulars
from lean_selector.workers.roster import Asking, KnownWorker, State
from tests.support.fake_engine import FakeEngine
from tests.support.on_loop import on_loop, until
from tests.support.outbound_server import client, response, says, serving
from tests.support.running_service import free_port


@on_loop
async def test_vllm_is_asked_three_questions() -> None:
    with FakeEngine() as engine:
        assert await ask_engine(client(), engine.url) == Particulars(
            model_name="m",
            block_size=16,
            total_kv_blocks=1000,
            kv_events_endpoints={"0": f"tcp://127.0.0.1:{engine.events_port}"},
        )
        assert set(engine.asked) == {"/v1/models", "/metrics", "/kv_event_sources"}


@on_loop
async def test_an_older_vllm_does_not_tell_its_events() -> None:
    with FakeEngine(tells_sources=False) as engine:
        told = await ask_engine(client(), engine.url)
        assert (told.model_name, told.block_size, told.kv_events_endpoints) == ("m", 16, None)


@on_loop
async def test_sglang_is_asked_under_both_names_of_its_route() -> None:
    with FakeEngine(kind="sglang") as engine:
        assert await ask_engine(client(), engine.url) == Particulars(
            model_name="m",
            block_size=16,
            total_kv_blocks=1000,
            kv_events_endpoints={"0": f"tcp://127.0.0.1:{engine.events_port}"},
        )
        assert list(engine.asked) == ["/v1/models", "/server_info", "/get_server_info"]


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
async def asking(url: str, state: State = State.ASKING) -> AsyncIterator[Engines]:
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
        engine.is_up = False
        async with asking(engine.url) as it:
            await until(lambda: len(it.failures) >= 3)
            assert "status 503: starting" in it.failures[0]
            assert not it.heard
            engine.is_up = True
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
        async with asking(engine.url, State.BY_HTTP) as it, asking(other.url) as beside:
            await until(lambda: len(beside.heard) > 3)
            assert not engine.asked
            it.known.state = State.ASKING
            await until(lambda: it.heard)
