"""Replicas as their users see them: what one is told shows on the others, over real sockets."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import zmq

from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.wire.replica_frames import TOPIC
from tests.support.replica_frames import decode_event
from tests.support.replica_member import (
    BOOKED,
    HASHES,
    MODEL,
    SCOPE,
    Loads,
    Member,
    mesh,
)
from tests.support.running_service import free_port, wait_until


@contextmanager
def ours(*kinds: str) -> Iterator[list[Member]]:
    """Members of ours that all hear each other."""
    with mesh(*((kind, None) for kind in kinds)) as members:
        for member in members:
            for other in members:
                if other is not member:
                    member.hears(other)
        yield members


def shown_everywhere(members: list[Member], loads: Loads) -> None:
    for member in members:
        member.shows(loads)


def test_a_selector_and_slot_trackers_share_every_step_in_every_direction() -> None:
    with ours("selector", "tracker", "tracker") as members:
        for booking in members:
            for completing in members:
                for freeing in members:
                    booking.add("r")
                    shown_everywhere(members, [BOOKED, (0, 0)])
                    completing.complete("r")
                    shown_everywhere(members, [(0, 3), (0, 0)])
                    freeing.free("r")
                    shown_everywhere(members, [(0, 0), (0, 0)])


@pytest.mark.parametrize(
    ("body", "tracks", "tokens"),
    [
        ({"effective_prefill_tokens": 48}, True, 48),
        ({"effective_prefill_tokens": 48, "override": False}, True, 48),
        ({}, True, None),
        ({"override": False}, False, None),
        ({"override": True}, True, None),
    ],
)
def test_a_booking_is_published_as_tracked_as_it_was_asked_to_be(
    body: dict[str, object], tracks: bool, tokens: int | None
) -> None:
    """As Dynamo 1.3.1 publishes the same requests."""
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.linger, sub.rcvtimeo = 0, 50
    sub.subscribe(TOPIC)
    try:
        with Member("selector") as selector:
            selector.register()
            sub.connect(selector.endpoint)
            fields = {"worker_id": 7, "isl_tokens": 48, "sequence_hashes": HASHES, **body}
            if "override" in fields:
                override = fields.pop("override")
                fields["router_config_override"] = {"track_prefill_tokens": override}
            events: list[ReplicaEvent] = []

            def heard() -> bool:
                request = {**SCOPE, **fields, "reservation_id": f"r{len(events)}"}
                assert selector.post("/reservations", request)[0] == 201
                assert selector.request("DELETE", f"/reservations/r{len(events)}")[0] == 200
                with contextlib.suppress(zmq.Again):
                    topic, payload = sub.recv_multipart()
                    # The first that is heard may be an end, or a sign of life.
                    if topic == TOPIC and decode_event(payload).kind is EventKind.ADD:
                        events.append(decode_event(payload))
                return bool(events)

            wait_until(heard, "a booking")
    finally:
        sub.close()
        context.term()
    assert (events[0].booking.track_prefill_tokens, events[0].booking.prefill_tokens) == (
        tracks,
        tokens,
    )


# -- catch-up -------------------------------------------------------------------------------------


def test_a_restarted_replica_catches_up_fully() -> None:
    with ours("selector", "tracker") as members:
        selector, tracker = members
        for number in range(150):  # more than are answered at once
            members[number % 2].add(f"r{number}")
        selector.complete("r0")
        tracker.add("on rank 1", 1)
        loads = [(149 * 48, 3), BOOKED]
        shown_everywhere(members, loads)
        port = free_port()
        urls = [f"http://127.0.0.1:{member.port}" for member in (selector, tracker)]
        catch_up = ["--replica-sync-catch-up", ",".join(urls)]
        peers = (selector.endpoint, tracker.endpoint)
        with Member("tracker", *catch_up, peers=peers, sync_port=port) as late:
            wait_until(lambda: late.detail()["catch_up"] == {"waiting": 151}, "all of them wait")
            selector.free("r2")  # ends while it waits
            wait_until(lambda: late.detail()["catch_up"].get("ended") == 1, "its end was heard")
            late.register()
            loads[0] = (148 * 48, 3)
            shown_everywhere([*members, late], loads)
            assert late.detail()["catch_up"] == {"booked": 150, "ended": 1}
            for member in members:
                peer = {"endpoint": late.endpoint}
                assert member.post("/replica_sync/register_peer", peer)[0] == 201
                member.hears(late, loads)
            for number in range(150):
                if number != 2:
                    members[number % 2].free(f"r{number}")
            late.free("on rank 1")  # of another: whoever is called says so to all
            shown_everywhere([*members, late], [(0, 0), (0, 0)])


class _Answer(BaseHTTPRequestHandler):
    """A peer that answers everything with what its server was given."""

    def do_GET(self) -> None:
        status, body = self.server.answer  # type: ignore[attr-defined] # set below
        self.server.asked.append(self.path)  # type: ignore[attr-defined] # set below
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def peer_answering(status: int, body: bytes) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and the paths that it was asked for."""
    server = HTTPServer(("127.0.0.1", 0), _Answer)
    asked: list[str] = []
    server.answer = status, body  # type: ignore[attr-defined] # read above
    server.asked = asked  # type: ignore[attr-defined] # read above
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_peers_without_a_usable_snapshot_are_passed_over() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        line = {
            **{"model_name": MODEL, "tenant_id": "t1", "block_size": 16, "worker_id": 7},
            **{"request_id": "r", "dp_rank": 0, "router_id": 9, "age_s": 1.0},
            **{"prefill_tokens": 48, "prefill_done": False, "prefill_duration_s": None},
            **{"expected_output_tokens": None, "lora_name": None, "sequence_hashes": HASHES},
        }
        lines = [b"{}", b"nonsense", json.dumps(line).encode()]
        good = b'{"version":1,"router_id":9,"reservations":[\n%b\n]}' % b",\n".join(lines)
        with (
            peer_answering(404, b'{"error":"route not found"}') as (reference, asked),
            peer_answering(200, b"no snapshot") as (broken, _),
            peer_answering(200, good) as (usable, _),
        ):
            flag = "--replica-sync-catch-up"
            urls = [flag, f"{nobody},{reference}/", flag, f"{broken},{usable}"]
            with Member("tracker", *urls) as late:
                late.register()
                wait_until(lambda: late.loads() == [BOOKED, (0, 0)], "the usable one is used")
                assert asked == ["/replica_sync/snapshot"]
                _, log = late.stop()
    assert f"{reference} has no snapshot" in log
    assert f"nothing from {nobody}" in log
    assert f"nothing from {broken}" in log
    assert f"a reservation of {usable} skipped" in log


# -- a replica that stops or dies: the others go on, and agree with it afterwards -----------------
