"""Each recipe of `deploy/` before a selector that asks for tokens, and what clients send to it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.recipes.gateways import chat
from tests.recipes.test_recipes import Fleet
from tests.support.prometheus_tools import scrape
from tests.support.recording_proxy import RecordingProxy
from tests.support.running_service import wait_until

READ, WRITE = "r-0123456789", "w-0123456789"
CLIENTS = "Bearer sk-user-key"  # what a client sends, for its worker


@contextmanager
def running(folder: Path, gateway: str, *, token: str, asks: bool = True) -> Iterator[Fleet]:
    """With this token in the recipe, before a selector that `asks` for one."""
    tokens = folder / "tokens"
    tokens.write_text(f"read {READ}\nwrite {WRITE}\n")
    flags = ("--auth-token-file", str(tokens)) if asks else ()
    fleet = Fleet(folder, gateway, "tcp", *flags)
    fleet.selector.token = READ
    fleet.gateway.token = token
    with fleet:
        yield fleet


def routed(fleet: Fleet) -> dict[str, int]:
    """Answers of /route, by their status."""
    found = re.findall(
        r'^lean_selector_http_requests_total\{.*route="/route/.*status="(\d+)"\} (\d+)',
        scrape(fleet.selector.port, READ),
        re.M,
    )
    return {status: int(count) for status, count in found if int(count)}


def heard(fleet: Fleet) -> list[str]:
    """`authorization` of each completion that came to a worker."""
    return [
        request["headers"].get("authorization", "")
        for worker in fleet.workers
        for request in worker.seen()["requests"]
        if "completions " in request["line"]
    ]


@pytest.mark.parametrize("asks", [True, False], ids=["asking", "not asking"])
def test_the_selector_gets_the_gateways_token_and_the_worker_its_clients(
    gateway: str, asks: bool, tmp_path: Path
) -> None:
    with running(tmp_path, gateway, token=WRITE if asks else "", asks=asks) as fleet:
        fleet.gateway.stop()
        with RecordingProxy(fleet.selector.port) as wire:
            fleet.places.selector_port = wire.port
            with fleet.gateway:
                for _ in range(3):
                    body = chat("three equal prompts " * 20, max_tokens=2)
                    status, _, text = fleet.ask(body, authorization=CLIENTS)
                    assert status == 200
                    fleet.wait_until_free()
                    fleet.wait_until_known()
        assert json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert sorted(fleet.served()) == [0, 3]
        assert heard(fleet) == [CLIENTS] * 3
        assert (routed(fleet), fleet.lines()) == ({"200": 3}, {"freed": 3})
        asked = wire.seen().lower()
        assert asked.count(b"post /route/") == 3
        assert CLIENTS.lower().encode() not in asked
        ours = set(re.findall(rb"\r\n(authorization: [^\r]*)", asked))
        assert ours == ({b"authorization: bearer " + WRITE.encode()} if asks else set())


@pytest.mark.parametrize("token", ["", READ], ids=["none", "read"])
def test_whose_token_is_refused_balances_by_itself_and_the_selector_counts_it(
    gateway: str, token: str, tmp_path: Path
) -> None:
    with running(tmp_path, gateway, token=token) as fleet:
        clients = [CLIENTS, f"Bearer {WRITE}"]  # a client's own opens nothing
        for client in clients:
            status, headers, _ = fleet.ask(chat("hello"), authorization=client)
            assert (status, headers["www-authenticate"]) == (200, None)
        assert sorted(heard(fleet)) == sorted(clients)
        assert routed(fleet) == {"403" if token == READ else "401": 2}
        assert fleet.selector.active() == 0
        wait_until(lambda: "the selector refuses" in fleet.gateway.log(), "the gateway says so")
