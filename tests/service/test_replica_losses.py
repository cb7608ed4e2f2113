"""Events that never arrive: they are counted, and mended where the peer can be asked.

Between real services stands a wire that takes what it is told to.
"""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq

from lean_selector.core.replication.shapes import EventKind
from lean_selector.wire.replica_frames import HEARTBEAT_TOPIC, TOPIC, encode_event
from tests.support.bookings import replica_event
from tests.support.replica_member import BOOKED, IDLE, MODEL, Member
from tests.support.running_service import wait_until

IDLE_RANK = (0, 0)


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


def metric(member: Member, name: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", member.port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return line.split()[1]


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
            assert metric(member, "lean_selector_replica_missed_events_total") == "3"
            owner.free("begins unheard")
            owner.free("stays")
            member.shows(IDLE)
            assert missed_by(member) == 3


def test_what_another_replica_never_heard_the_end_of_is_not_taken_from_it() -> None:
    with Member("tracker") as owner:
        owner.register()
        with (
            wire(owner) as to_third,
            wire(owner) as lossy,
            listener("tracker", to_third) as third,
            listener("tracker", lossy, third, owner) as member,
        ):
            third.hears(owner)
            member.hears(owner)
            owner.add("a phantom elsewhere")
            third.shows([BOOKED, IDLE_RANK])
            member.shows([BOOKED, IDLE_RANK])
            to_third.loses.set()
            owner.free("a phantom elsewhere")
            member.shows(IDLE)
            third.shows([BOOKED, IDLE_RANK])
            lossy.loses.set()
            owner.add("begins unheard", 1)
            member.shows([IDLE_RANK, BOOKED])
            caught_up = member.detail()["catch_up"]
            assert caught_up["booked"] == 1


def test_what_is_held_of_one_that_numbers_nothing_is_not_taken_after_a_loss_of_another() -> None:
    """The third may have missed its end, and nobody could tell."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plain = context.socket(zmq.PUB)
    plain.linger = 0
    endpoint = f"tcp://127.0.0.1:{plain.bind_to_random_port('tcp://127.0.0.1')}"
    try:
        with Member("tracker") as owner:
            owner.register()
            with (
                Member("tracker", peers=[endpoint]) as third,
                wire(owner) as lossy,
                listener("tracker", lossy, owner, third) as member,
            ):
                third.register()
                member.hears(owner)
                event = replica_event(EventKind.ADD, MODEL, "t1", 16, "unnumbered", 7, 0, 99)

                def is_held() -> bool:
                    plain.send_multipart([TOPIC, encode_event(event)])
                    return bool(third.get("/replica_sync/snapshot")[1]["reservations"])

                wait_until(is_held, "the third holds it")
                lossy.loses.set()
                owner.add("begins unheard", 1)
                wait_until(lambda: missed_by(member) == 1, "the loss is seen")
                wait_until(lambda: not publisher_of(member)["is_behind"], "it is mended")
                live = member.get("/replica_sync/snapshot")[1]["reservations"]
                assert [booking["request_id"] for booking in live] == ["begins unheard"]
    finally:
        plain.close()
        context.term()
