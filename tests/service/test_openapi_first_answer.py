"""The document is made in a thread, once, for all who ask meanwhile."""

import asyncio
import threading

import pytest
import uvloop

from lean_selector.service.application import OpenApiRoutes
from lean_selector.service.gate import Gate
from lean_selector.service.openapi import document as services
from lean_selector.service.replies import LaterReply
from tests.support.gates import request
from tests.support.on_loop import until


def test_the_loop_goes_on_while_the_document_is_made_for_all_who_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go_on = threading.Event()
    made: list[str] = []

    def slow(name: str, *_: object, **__: object) -> bytes:
        made.append(name)
        assert may_go_on.wait(60)
        if len(made) == 1:
            raise RuntimeError("a bug")
        return b"{}"

    monkeypatch.setattr(services, "service_document", slow)
    gate = Gate(OpenApiRoutes("selector", ()).routes())

    def ask() -> LaterReply:
        answer = gate(request("GET", "/openapi.json"))
        assert isinstance(answer, LaterReply)
        return answer

    async def answered(count: int) -> list[bytes]:
        pending = [ask() for _ in range(count)]
        gone = ask()
        gone.hang_up()
        await until(lambda: all(each.response is not None for each in pending))
        return [bytes(each.response or b"")[9:12] for each in pending]

    async def story() -> None:
        asyncio.get_running_loop().call_later(0, may_go_on.set)  # the loop runs, or nothing would
        assert await answered(3) == [b"500"] * 3
        assert await answered(2) == [b"200"] * 2
        assert made == ["selector"] * 2
        assert isinstance(gate(request("GET", "/openapi.json")), bytes)

    uvloop.run(story())
