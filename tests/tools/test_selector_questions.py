"""What is asked of a selector, and what counts as an answer."""

import asyncio
import json

import pytest

from lean_selector.tools.check_questions import NotASelector, Selector
from tests.support.on_loop import on_loop
from tests.support.outbound_server import Serve, client, serving

WORKERS = 6_000
RECORD = {
    "model_name": "m" * 800,  # as long as a record with its health and sources is
    "lifecycle": "schedulable",
}


def answering(bodies: dict[str, bytes]) -> Serve:
    """One body after the other, in the order of the questions; 404 to what is none of them."""
    asked = iter(bodies.values())

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = next(asked, None)
        status = b"404 Not Found" if body is None else b"200 OK"
        body = body or b""
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    return serve


@on_loop
async def test_a_fleet_of_thousands_is_read_whole() -> None:
    workers = json.dumps([{**RECORD, "worker_id": number} for number in range(WORKERS)]).encode()
    assert len(workers) > 4 << 20
    async with serving(answering({"/ready": b"{}", "/workers": workers})) as served:
        facts = await Selector(client(), served.url, 20.0).facts()
    assert len(facts.workers) == WORKERS
    assert (facts.sources, facts.discoveries) == (None, None)
    assert served.paths() == ["/ready", "/workers?detail=true", "/kv_sources", "/discovery"]


@on_loop
async def test_an_answer_that_is_none_of_a_selectors_is_named_by_its_route() -> None:
    bodies = {"/ready": b"up", "/workers": b"[]", "/kv_sources": b'{"sources": []}'}
    async with serving(answering(bodies)) as served:
        with pytest.raises(NotASelector, match=r"/kv_sources: this is no answer of a selection"):
            await Selector(client(), served.url, 20.0).facts()
