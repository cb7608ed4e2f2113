"""Services of Kubernetes, followed over real TLS: lists, watches, and what goes wrong with them."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lean_selector.discovery import kubernetes
from lean_selector.discovery.finders import Sighting
from lean_selector.discovery.kubernetes import KubernetesFinder, Slice, endpoints_of
from lean_selector.discovery.particulars import FoundEndpoint, target_of
from lean_selector.http.trust import TokenFile, Trust
from lean_selector.tasks import supervise
from tests.support.certificates import Authority
from tests.support.kube_api import NAMESPACE, SERVICE, KubeApi, slice_of
from tests.support.on_loop import on_loop, until
from tests.support.outbound_server import client, response, says, serving


class Following:
    """A finder that runs, and what it found last."""

    def __init__(self, api: KubeApi, folder: Path, port: str | None = None) -> None:
        self.sighting = Sighting("kubernetes")
        self.ready: list[str] = []
        self.leaving: list[str] = []
        self.token_file = folder / "token"
        self.token_file.write_text(api.token)
        trust = Trust(str(folder / "ca.crt"))
        self.finder = KubernetesFinder(
            self.sighting,
            client(TokenFile(str(self.token_file)), trust),
            api.url,
            target_of(f"kubernetes:{NAMESPACE}/{SERVICE}{f':{port}' if port else ''}"),
            self._found,
            again_first_s=0.001,
        )

    def _found(self, ready: Iterable[FoundEndpoint], leaving: Iterable[FoundEndpoint]) -> None:
        self.ready = [str(endpoint) for endpoint in ready]
        self.leaving = [str(endpoint) for endpoint in leaving]

    async def finds(self, *endpoints: str) -> None:
        await until(lambda: self.ready == list(endpoints), lambda: f"{self.ready} != {endpoints}")


@asynccontextmanager
async def following(folder: Path, **slices: list[str]) -> AsyncIterator[tuple[Following, KubeApi]]:
    authority = Authority()
    (folder / "ca.crt").write_bytes(authority.pem)
    with KubeApi(authority.server("127.0.0.1")) as api:
        for name, addresses in slices.items():
            api.put(slice_of(name, addresses))
        it = Following(api, folder)
        running = supervise("finder", it.finder.run)
        try:
            await until(lambda: api.watches == 1, "it watches")
            yield it, api
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@on_loop
async def test_what_is_listed_is_found_and_what_changes_too(tmp_path: Path) -> None:
    async with following(tmp_path, one=["10.0.0.2", "10.0.0.1"]) as (it, api):
        await it.finds("10.0.0.1:8000", "10.0.0.2:8000")
        api.put(slice_of("two", ["10.0.0.3"]))
        await it.finds("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
        api.put(slice_of("one", ["10.0.0.1"]))
        await it.finds("10.0.0.1:8000", "10.0.0.3:8000")
        api.delete("two")
        await it.finds("10.0.0.1:8000")
        api.put(slice_of("one", []))
        await it.finds()
        assert (api.lists, api.watches) == (1, 1)
        assert (it.sighting.state, it.sighting.failures) == ("watching", 0)


@on_loop
async def test_a_list_may_have_pages(tmp_path: Path) -> None:
    async with following(tmp_path) as (it, api):
        api.page = 2
        for at in range(5):
            api.put_unheard(slice_of(f"s{at}", [f"10.0.0.{at}"]))
        api.compact()
        api.cut_watches()
        await it.finds(*(f"10.0.0.{at}:8000" for at in range(5)))
        assert api.lists == 4


@on_loop
async def test_a_watch_that_ends_goes_on_from_where_it_was(tmp_path: Path) -> None:
    async with following(tmp_path, one=["10.0.0.1"]) as (it, api):
        await it.finds("10.0.0.1:8000")
        for at in range(2, 6):
            watches = api.watches
            api.cut_watches()
            api.put(slice_of("one", [f"10.0.0.{at}"]))
            await it.finds(f"10.0.0.{at}:8000")
            await until(lambda watches=watches: api.watches > watches)  # type: ignore[misc]
        assert api.lists == 1, "nothing was missed, so nothing is listed again"
        assert it.sighting.failures <= 5


@on_loop
async def test_a_bookmark_moves_the_place_to_go_on_from(tmp_path: Path) -> None:
    async with following(tmp_path, one=["10.0.0.1"]) as (it, api):
        await it.finds("10.0.0.1:8000")
        api.bookmark()
        await until(lambda: it.finder.version == "102", "the bookmark was heard")
        api.cut_watches()
        await until(lambda: api.watches == 2)
        assert api.requests[-1].endswith("resourceVersion=102")


@pytest.mark.parametrize("form", ["a status", "an event"])
@on_loop
async def test_who_is_told_gone_lists_again(tmp_path: Path, form: str) -> None:
    async with following(tmp_path, one=["10.0.0.1"]) as (it, api):
        await it.finds("10.0.0.1:8000")
        api.put_unheard(slice_of("one", ["10.0.0.9"]))
        if form == "a status":
            api.compact()
            api.cut_watches()
        else:
            api.tell_gone()
        await it.finds("10.0.0.9:8000")
        assert api.lists == 2


@on_loop
async def test_who_is_told_gone_each_time_lists_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    really_sleep = asyncio.sleep

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        await really_sleep(0)

    async with following(tmp_path, one=["10.0.0.1"]) as (it, api):
        monkeypatch.setattr(kubernetes, "asyncio", SimpleNamespace(sleep=sleep))
        api.forget_everything()
        await until(lambda: len(pauses) >= 8)
        assert it.ready == ["10.0.0.1:8000"]
    for before, later in zip(pauses, pauses[2:8], strict=False):
        assert later > before


@on_loop
async def test_while_the_server_fails_what_was_found_holds(tmp_path: Path) -> None:
    async with following(tmp_path, one=["10.0.0.1"]) as (it, api):
        await it.finds("10.0.0.1:8000")
        api.fails_with = 500
        api.cut_watches()
        await until(lambda: it.sighting.failures >= 3)
        assert (it.ready, it.sighting.state) == (["10.0.0.1:8000"], "failing")
        assert "status 500" in (it.sighting.error or "")
        api.put(slice_of("one", ["10.0.0.2"]))
        api.fails_with = None
        await it.finds("10.0.0.2:8000")
        assert it.sighting.error is None


@on_loop
async def test_an_answer_that_is_nested_too_deeply_is_a_failure_as_any_other() -> None:
    async with serving(says(response(b'{"items":' + b"[" * 100_000))) as served:
        sighting = Sighting("kubernetes:a/b")
        told: list[object] = []
        finder = KubernetesFinder(
            sighting,
            client(),
            served.url,
            target_of("kubernetes:a/b"),
            lambda *endpoints: told.append(endpoints),
        )
        running = asyncio.create_task(finder.run())
        await until(lambda: sighting.failures)
        assert "unknown form of response" in str(sighting.error)
        assert (running.done(), told) == (False, [])


@on_loop
async def test_who_is_said_to_end_is_told_apart_from_who_is_not_ready(tmp_path: Path) -> None:
    async with following(tmp_path, one=["10.0.0.1"]) as (it, api):
        await it.finds("10.0.0.1:8000")
        api.put(slice_of("one", ["10.0.0.1"], conditions={"ready": False}))
        await it.finds()
        assert it.leaving == []
        gone = {"ready": False, "serving": True, "terminating": True}
        api.put(slice_of("one", ["10.0.0.1"], conditions=gone))
        await until(lambda: it.leaving == ["10.0.0.1:8000"])


# -- slices ----------------------------------------------------------------------------------------


def found(*slices: dict[str, Any], port: str | None = None) -> list[str]:
    ready, _ = endpoints_of(msgspec.convert(list(slices), list[Slice]), port)
    return [endpoint.url for endpoint in ready]


def test_of_both_families_the_older_stands_for_both() -> None:
    v4 = slice_of("a", ["10.0.0.1"], conditions={})  # without any it is ready
    v6 = slice_of("b", ["fd00::1"], family="IPv6")
    assert found(v6, v4) == ["http://10.0.0.1:8000"]
    assert found(v6, slice_of("a", [])) == ["http://[fd00::1]:8000"]


def test_each_endpoint_has_the_uid_of_its_pod_and_the_same_of_several_each_time() -> None:
    old, new = (slice_of(uid, ["10.0.0.1"], uid=uid) for uid in "ab")
    bare = slice_of("c", ["10.0.0.2"])
    del bare["endpoints"][0]["targetRef"]
    for slices in ([old, new, bare], [bare, new, old]):
        ready, _ = endpoints_of(msgspec.convert(slices, list[Slice]), None)
        assert [(str(endpoint), uid) for endpoint, uid in ready.items()] == [
            ("10.0.0.1:8000", "b"),
            ("10.0.0.2:8000", ""),
        ]


def test_the_label_of_a_service_tells_the_role_of_its_workers() -> None:
    labelled = slice_of("a", ["10.0.0.1"])
    labelled["metadata"]["labels"] = {"role": "prefill"}
    slices = msgspec.convert([labelled, slice_of("b", ["10.0.0.2"])], list[Slice])
    ready, _ = endpoints_of(slices, None, "role")
    assert [(each.host, each.role) for each in ready] == [("10.0.0.1", "prefill"), ("10.0.0.2", "")]
    assert {each.role for each in endpoints_of(slices, None, "another")[0]} == {""}


def test_the_port_that_is_meant_is_named_or_usual_or_the_first() -> None:
    several = slice_of("a", ["10.0.0.1"], port=1, port_name="metrics")
    several["ports"] += [{"name": "http", "port": 2}, {"name": "replica-sync", "port": 3}]
    assert found(several) == ["http://10.0.0.1:2"]
    assert found(several, port="replica-sync") == ["http://10.0.0.1:3"]
    assert found(several, port="1") == ["http://10.0.0.1:1"]
    assert found(several, port="other") == []
    assert found(slice_of("a", ["10.0.0.1"], port=5, port_name=None)) == ["http://10.0.0.1:5"]
    assert found({"metadata": {"name": "x"}, "addressType": "IPv4", "endpoints": None}) == []


def test_a_port_says_that_it_is_secure_by_its_protocol_or_its_name() -> None:
    assert found(slice_of("a", ["a"], port_name="https")) == ["https://a:8000"]
    assert found(slice_of("a", ["a"], port_name="x", app_protocol="https")) == ["https://a:8000"]
    assert found(slice_of("a", ["a"], port_name="https", app_protocol="http")) == ["http://a:8000"]
