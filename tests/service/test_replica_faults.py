"""A replica that stops, dies or never reads: the others go on, and agree with it afterwards."""

import signal
from collections.abc import Iterator

import pytest
import zmq

from lean_selector.wire.replica_frames import TOPIC
from tests.support.replica_member import BOOKED, IDLE, TOKENS, Member, mesh
from tests.support.running_service import free_port

LIFECYCLES = 100


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """Three that all hear each other; the last is the one that fails."""
    with mesh(("tracker", None), ("selector", None), ("tracker", None)) as running:
        for member in running:
            for other in running:
                if member is not other:
                    member.hears(other)
        yield running


def live_through(members: list[Member], name: str) -> None:
    """Lifecycles through each, and one request that stays: (2 * TOKENS, 3) on rank 0."""
    for at, member in enumerate(members):
        for n in range(LIFECYCLES):
            member.add(f"{name}-{at}-{n}", n % 2)
            member.complete(f"{name}-{at}-{n}")
            member.free(f"{name}-{at}-{n}")
        member.add(f"{name}-{at}-stays")


STAYS = [(2 * TOKENS, BOOKED[1]), (0, 0)]


def test_a_stopped_replica_holds_up_nobody_and_agrees_when_it_goes_on(
    members: list[Member],
) -> None:
    *others, failing = members
    failing.process.send_signal(signal.SIGSTOP)
    try:
        live_through(others, "stopped")
        for member in others:
            member.shows(STAYS)
    finally:
        failing.process.send_signal(signal.SIGCONT)
    failing.shows(STAYS)
    for member in others:
        member.hears(failing, STAYS)  # a long stop may have cost a connection
    failing.free("stopped-0-stays")
    failing.free("stopped-1-stays")
    for member in members:
        member.shows(IDLE)


@pytest.mark.parametrize("catches_up", [False, True])
def test_a_killed_replica_agrees_again_fully_only_by_catching_up(
    members: list[Member], catches_up: bool
) -> None:
    *others, failing = members
    failing.add("of the dead", 1)  # known to the others
    for member in others:
        member.shows([(0, 0), BOOKED])
    failing.stop(signal.SIGKILL)
    live_through(others, "killed")
    urls = ",".join(f"http://127.0.0.1:{member.port}" for member in others)
    flags = ["--replica-sync-catch-up", urls] if catches_up else []
    sync_port = int(failing.endpoint.rpartition(":")[2])
    peers = [member.endpoint for member in others]
    with Member("tracker", *flags, peers=peers, sync_port=sync_port) as again:
        again.register()
        if catches_up:
            loads = [STAYS[0], BOOKED]
            again.hears(others[0], loads)
            for member in others:
                member.hears(again, loads)
            again.free("of the dead")
        else:
            again.hears(others[0], IDLE)  # best effort: history is gone until it ends
            others[0].free("of the dead")
        others[0].free("killed-0-stays")
        others[1].free("killed-1-stays")
        for member in (*others, again):
            member.shows(IDLE)


def test_a_subscriber_that_never_reads_keeps_nothing_from_the_others(
    members: list[Member],
) -> None:
    context = zmq.Context()
    mute = context.socket(zmq.SUB)
    mute.linger, mute.rcvhwm = 0, 1
    mute.subscribe(TOPIC)
    mute.connect(members[0].endpoint)
    mute.connect(f"tcp://127.0.0.1:{free_port()}")  # and one who is not there
    try:
        live_through(members[:2], "mute")
        for member in members:
            member.shows(STAYS)
    finally:
        mute.close()
        context.term()
