"""A selector beside the gateway, scripted: what it is told when its answers come late or never."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from lean_selector.core.settings import EjectionSettings
from lean_selector.gateway.remote_chooser import RemoteChooser
from lean_selector.gateway.remote_fleet import RemoteFleet
from lean_selector.gateway.rotation import Rotation
from lean_selector.gateway.selector_link import SelectorAway, SelectorLink
from lean_selector.sockets.resolver import Resolver
from tests.outbound_server import Served, response, serving

CHOSEN = {
    "worker_id": 1,
    "dp_rank": 0,
    "endpoint": "http://127.0.0.1:1",
    "overlap": {"dp": {"0": 0}},
    "effective_prefill_tokens": 5,
}


class Selector:
    """Answers at once, but a choice not before it `may_choose`."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.may_choose = asyncio.Event()
        self.served: Served | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.served is not None
        body = b"{}"
        if self.served.paths()[-1] == "/select_and_reserve":
            self.is_asked.set()
            await self.may_choose.wait()
            body = json.dumps(CHOSEN).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )


def link_to(served: Served, timeout_s: float) -> SelectorLink:
    """On a clock that stands still."""
    return SelectorLink(served.url, Resolver().resolve, timeout_s, lambda: 100.0)


def routed() -> Any:
    prompt = SimpleNamespace(
        isl_tokens=5, local_hashes=[], sequence_hashes=lambda: [], lora_name=None
    )
    return SimpleNamespace(worker_ids=None, model_name="m", tenant_id="default", prompt=prompt)


def test_a_choice_that_is_given_up_at_the_stop_is_undone() -> None:
    async def play() -> list[str]:
        selector = Selector()
        async with serving(selector.serve) as selector.served:
            link = link_to(selector.served, 60.0)
            fleet = RemoteFleet(link, lambda rows: None)
            chooser = RemoteChooser(link, fleet, Rotation(EjectionSettings(), 0.0))
            choosing = asyncio.ensure_future(chooser.choose(routed(), "r1", frozenset()))
            await selector.is_asked.wait()
            choosing.cancel()
            closing = asyncio.ensure_future(chooser.close(60.0))
            await asyncio.wait({choosing})
            selector.may_choose.set()
            await closing
            return selector.served.paths()

    assert asyncio.run(play()) == ["/select_and_reserve", "/reservations/r1"]


@pytest.mark.parametrize("answers_others", [True, False])
def test_a_call_that_takes_too_long_is_held_against_a_selector_that_answers_nobody(
    answers_others: bool,
) -> None:
    async def play() -> bool:
        selector = Selector()
        async with serving(selector.serve) as selector.served:
            link = link_to(selector.served, 1.0)
            parked = asyncio.ensure_future(link.call("POST", "/select_and_reserve"))
            await selector.is_asked.wait()
            if answers_others:
                await link.call("GET", "/workers")
            with pytest.raises(SelectorAway):
                await parked
            return link.is_away

    assert asyncio.run(play()) is not answers_others


REFUSED = response(b'{"error":"the bearer token is not known"}', "401 Unauthorized")


def test_an_end_that_is_refused_for_its_token_is_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lean_selector.gateway.remote_chooser._AGAIN_S", (0.01,) * 3)

    async def play() -> tuple[list[str], int]:
        answers = [REFUSED, REFUSED, response(b"{}")]

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answers.pop(0))

        async with serving(serve) as served:
            link = link_to(served, 60.0)
            fleet = RemoteFleet(link, lambda rows: None)
            chooser = RemoteChooser(link, fleet, Rotation(EjectionSettings(), 0.0))
            chooser.freed("r1", None, None, None)
            await chooser.close(60.0)
            return served.paths(), chooser.lost_ends

    assert asyncio.run(play()) == (["/reservations/r1"] * 3, 0)


def logged_of_the_fleet(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answers: list[bytes]
) -> list[str]:
    """What is in the log when a selector has told its workers with these answers, one by one."""
    monkeypatch.setattr("lean_selector.gateway.remote_fleet._SOON_S", 0.01)
    caplog.set_level("INFO", "lean_selector.gateway")

    async def play() -> None:
        is_over = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if answers:
                writer.write(answers.pop(0))
            else:
                is_over.set()  # the last of them was read
                await asyncio.Event().wait()

        async with serving(serve) as served:
            running = asyncio.ensure_future(
                RemoteFleet(link_to(served, 60.0), lambda rows: None).run()
            )
            async with asyncio.timeout(60.0):
                await is_over.wait()
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(play())
    return [each.getMessage() for each in caplog.records if each.name == "lean_selector.gateway"]


def test_a_selector_that_does_not_tell_its_workers_is_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [REFUSED, REFUSED, response(b"[]"), response(b"[]")]
    assert logged_of_the_fleet(monkeypatch, caplog, answers) == [
        "the selector does not tell its workers: status 401: the bearer token is not known",
        "the selector tells its workers",
    ]


@pytest.mark.parametrize(
    "body", [b"", b'{"error":"\xff"}', b'{"error":1}', b'{"x":' + b"[" * 9_999]
)
def test_a_refusal_that_cannot_be_read_is_one_without_a_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    answers = [response(body, "500 Internal Server Error")]
    assert logged_of_the_fleet(monkeypatch, caplog, answers) == [
        "the selector does not tell its workers: status 500: no reason"
    ]


def test_workers_that_cannot_be_read_are_in_the_log_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = [b"{}", b"{}", b'[{"worker_id":"1"}]', b'[{"model_name":"\xff"}]', b"[]", b"[]", b"{}"]
    answers = [response(each) for each in told]
    cannot = "the selector's workers cannot be read"
    assert logged_of_the_fleet(monkeypatch, caplog, answers) == [
        f"{cannot}: Expected `array`, got `object`",
        f"{cannot}: Expected `int`, got `str` - at `$[0].worker_id`",
        f"{cannot}: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        "the selector's workers can be read again",
        f"{cannot}: Expected `array`, got `object`",
    ]
