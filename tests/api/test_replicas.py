"""Replicas as their users see them: what one is told shows on the others, over real sockets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from lean_selector.wire.replica_frames import HEARTBEAT_TOPIC, TOPIC
from tests.support.prometheus_tools import scrape
from tests.support.replica_member import (
    BOOKED,
    IDLE,
    PAIR_BOOKED,
    PAIR_DECODES,
    PAIR_IDLE,
    Member,
    hear_each_other,
    mesh,
    shown_everywhere,
)
from tests.support.running_service import RunningService, free_port, wait_until


@contextmanager
def ours(*kinds: str) -> Iterator[list[Member]]:
    """Members of ours that all hear each other."""
    with mesh(*((kind, None) for kind in kinds)) as members:
        hear_each_other(members)
        yield members


# -- catch-up --------------------------------------------------------------------------------------


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
            wait_until(
                lambda: late.detail()["catch_up"]["unfit"] >= 151, "it has no rank for any of them"
            )
            selector.free("r2")
            late.register()
            loads[0] = (148 * 48, 3)
            shown_everywhere([*members, late], loads)
            assert late.detail()["catch_up"]["booked"] == 150
            for member in members:
                peer = {"endpoint": late.endpoint}
                assert member.post("/replica_sync/register_peer", peer)[0] == 201
                member.hears(late, loads)
            for number in range(150):
                if number != 2:
                    members[number % 2].free(f"r{number}")
            late.free("on rank 1")  # of another: whoever is called says so to all
            shown_everywhere([*members, late], [(0, 0), (0, 0)])


# -- events that never arrive: counted, and mended where the peer can be asked ---------------------


class Wire:
    """Passes on what a replica publishes; while `loses` is set, all but its heartbeats are lost."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> None:
        self.loses = threading.Event()
        self._ends = threading.Event()
        self._sub = context.socket(zmq.SUB)
        self._sub.subscribe(TOPIC)
        self._sub.connect(endpoint)
        self._pub = context.socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._pass_on)
        self._thread.start()

    def _pass_on(self) -> None:
        while not self._ends.is_set():
            if not self._sub.poll(20):
                continue
            frames = self._sub.recv_multipart()
            if frames[0] == HEARTBEAT_TOPIC or not self.loses.is_set():
                self._pub.send_multipart(frames)

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._sub.close(0)
        self._pub.close(0)


@contextmanager
def wire(owner: Member) -> Iterator[Wire]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = Wire(context, owner.endpoint)
    try:
        yield made
    finally:
        made.close()
        context.term()


@contextmanager
def listener(kind: str, lossy: Wire, *urls_of: Member) -> Iterator[Member]:
    """A member that hears a replica through a wire, and may ask some how things are."""
    urls = ",".join(f"http://127.0.0.1:{member.port}" for member in urls_of)
    flags = ["--replica-sync-catch-up", urls] if urls else []
    with Member(kind, *flags, peers=[lossy.endpoint]) as member:
        member.register()
        yield member


def missed_by(member: Member) -> int:
    missed = member.detail()["missed"]
    assert isinstance(missed, int)
    return missed


def publisher_of(member: Member) -> dict[str, Any]:
    (publisher,) = member.detail()["publishers"]
    assert isinstance(publisher, dict)
    return publisher


@pytest.mark.parametrize(("owners", "listens"), [("tracker", "selector"), ("selector", "tracker")])
def test_what_was_lost_is_mended_where_the_owner_can_be_asked(owners: str, listens: str) -> None:
    with Member(owners) as owner:
        owner.register()
        with wire(owner) as lossy, listener(listens, lossy, owner) as member:
            member.hears(owner)
            owner.add("ends unheard")
            owner.add("stays", 1)
            member.shows([BOOKED, BOOKED])
            lossy.loses.set()
            owner.free("ends unheard")
            owner.complete("stays")
            owner.add("begins unheard")
            # Nothing follows: the heartbeat tells.
            wait_until(lambda: missed_by(member) == 3, "the loss is seen")
            lossy.loses.clear()
            member.shows([BOOKED, (0, BOOKED[1])])
            wait_until(lambda: not publisher_of(member)["is_behind"], "it knows that it is mended")
            assert publisher_of(member)["missed"] == 3
            assert "lean_selector_replica_missed_events_total 3\n" in scrape(member.port)
            owner.free("begins unheard")
            owner.free("stays")
            member.shows(IDLE)
            assert missed_by(member) == 3


def test_peers_come_and_go_under_both_families_of_routes_and_flags() -> None:
    peer = "tcp://slot-tracker-b:8092"
    bind, advertised = f"tcp://127.0.0.1:{free_port()}", "tcp://slot-tracker-a:8092"
    flags = ["--replica-sync-bind", bind, "--replica-sync-advertise", advertised]
    peers = ["--replica-sync-peers", " tcp://127.0.0.1:9 ,, tcp://127.0.0.1:8 "]
    more = ["--replica-sync-peers", "tcp://127.0.0.1:9"]
    initial = ["tcp://127.0.0.1:8", "tcp://127.0.0.1:9"]
    with RunningService(*flags, *peers, *more, module="lean_selector.slot_tracker") as tracker:
        assert tracker.get("/peers") == (200, initial)
        assert tracker.post("/register_peer", {"url": peer}) == (201, {"status": "ok"})
        assert tracker.post("/replica_sync/register_peer", {"endpoint": peer}) == (
            200,
            {"status": "ok"},
        )
        listed = (200, [*initial, peer])
        assert tracker.get("/peers") == tracker.get("/replica_sync/peers") == listed
        assert tracker.post("/register_peer", {"url": advertised}) == (
            400,
            {"error": "peer endpoint matches this replica's advertised endpoint"},
        )
        assert tracker.post("/deregister_peer", {"url": peer}) == (200, {"status": "ok"})
        assert tracker.post("/deregister_peer", {"url": peer}) == (404, {"error": "peer not found"})
        status, answer = tracker.post("/register_peer", {"endpoint": peer})
        assert status == 422
        assert "url" in str(answer)


# -- pairs -----------------------------------------------------------------------------------------


def test_both_legs_of_a_pair_count_everywhere_and_end_wherever_the_request_does() -> None:
    """Also where a peer ends it that knows no legs, as the tracker."""
    with ours("selector", "selector", "tracker") as members:
        one, other, tracker = members
        for member in members:
            member.register_pair()

        def book(name: str) -> None:
            shown_everywhere(members, PAIR_IDLE)
            one.book_pair(name)
            shown_everywhere(members, PAIR_BOOKED)

        book("completed")
        other.complete("completed")
        shown_everywhere(members, PAIR_DECODES)
        other.free("completed")
        for name, member in (("freed", other), ("ended by the tracker", tracker)):
            book(name)
            member.free(name)
        book("leg alone")
        other.free("leg alone#prefill")
        shown_everywhere(members, PAIR_DECODES)
        one.free("leg alone")
        shown_everywhere(members, PAIR_IDLE)
