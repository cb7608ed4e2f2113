"""No request leaves a cycle behind: what a pass allocates is freed with it, and no collection is
due because of it. A collection amid requests is what their slowest wait for.
"""

import gc
import json

import pytest

from lean_selector.http.connections import Connections
from lean_selector.http.protocol import HttpProtocol
from tests.http.test_protocol import FakeTransport
from tests.support.asked import worker
from tests.support.gates import selection_gate

PROMPT = {"block_hashes": [1, 2], "sequence_hashes": [3, 4], "isl_tokens": 32}

Call = tuple[str, str, object]
CALLS: dict[str, list[Call]] = {
    "a life": [
        ("POST", "/select_and_reserve", {"reservation_id": "a", **PROMPT}),
        ("POST", "/reservations/a/output_block", {"decay_fraction": 0.5}),
        ("POST", "/reservations/a/prefill_complete", None),
        ("DELETE", "/reservations/a", None),
    ],
    "a select": [("POST", "/select", PROMPT)],
    "a life whose rank the client chose": [
        ("POST", "/reservations", {"reservation_id": "a", "worker_id": 1, **PROMPT}),
        ("DELETE", "/reservations/a", None),
    ],
    "an end of nothing": [("DELETE", "/reservations/a", None)],
    "no such route": [("GET", "/nothing", None)],
    "a body that is none": [("POST", "/select", [])],
}


def http(method: str, path: str, body: object) -> bytes:
    text = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n%b" % (len(text), text)


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_a_request_leaves_no_cycle_behind(calls: list[Call]) -> None:
    transport = FakeTransport()
    protocol = HttpProtocol(selection_gate(), Connections(call_soon=lambda callback: None))
    protocol.connection_made(transport)
    protocol.data_received(http("POST", "/workers", worker()))
    texts = [http(*call) for call in calls]
    for text in texts:  # what is made once, and remembered
        protocol.data_received(text)
    while gc.collect():  # what other tests left behind may end only in several turns
        pass
    gc.disable()
    try:
        for text in texts * 10:
            protocol.data_received(text)
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert len(transport.writes) == 1 + 11 * len(calls)
