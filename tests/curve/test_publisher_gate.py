"""A publisher that asks for keys: that its thread ends with it, and outlives what fails."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from lean_selector.curve.command import write_pair
from lean_selector.curve.keys import new_pair
from lean_selector.curve.zap import give_keys
from lean_selector.publisher import KvEventPublisher
from tests.descriptors import no_descriptors
from tests.running_service import wait_until

ANY_PORT = "tcp://127.0.0.1:*"
DEADLINE_MS = 20_000
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
ENGINE, SERVICE, STRANGER = new_pair(), new_pair(), new_pair()


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """The engine's pair, and a list of whom it admits."""
    write_pair(str(tmp_path / "engine"), ENGINE)
    (tmp_path / "clients").write_bytes(SERVICE.public)
    return str(tmp_path / "engine.key_secret"), str(tmp_path / "clients")


@pytest.fixture
def publisher(files: tuple[str, str]) -> Iterator[KvEventPublisher]:
    with KvEventPublisher(
        kv_block_size=4,
        endpoint=ANY_PORT,
        replay_endpoint=ANY_PORT,
        curve_secret_key_file=files[0],
        curve_client_keys_file=files[1],
    ) as made:
        yield made


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


def replayed(context: "zmq.Context[zmq.Socket[bytes]]", publisher: KvEventPublisher) -> list[int]:
    """The numbers that a service gets which asks for all."""
    numbers: list[int] = []
    with context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = DEADLINE_MS
        give_keys(dealer, SERVICE, ENGINE.public)
        dealer.connect(str(publisher.replay_endpoint))
        dealer.send_multipart([b"", bytes(8)])
        while (frames := dealer.recv_multipart())[-1]:
            numbers.append(int.from_bytes(frames[-2], "big"))
    return numbers


@pytest.mark.parametrize("taken", ["endpoint", "replay_endpoint"])
def test_a_taken_port_raises_and_leaves_no_thread_that_fails(
    taken: str,
    publisher: KvEventPublisher,
    files: tuple[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    endpoints = {"endpoint": ANY_PORT, taken: getattr(publisher, taken)}
    threads = threading.active_count()
    with pytest.raises(zmq.ZMQError, match="in use"):
        KvEventPublisher(kv_block_size=4, curve_secret_key_file=files[0], **endpoints)
    assert threading.active_count() == threads
    assert capfd.readouterr().err == ""


def test_without_descriptors_it_goes_on_and_lets_services_in_again_once_there_are_some(
    publisher: KvEventPublisher, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    sub = context.socket(zmq.SUB)
    sub.rcvtimeo = DEADLINE_MS
    sub.subscribe(b"")
    give_keys(sub, SERVICE, ENGINE.public)
    sub.connect(publisher.endpoint)
    assert replayed(context, publisher) == []
    cutting_off = threading.Thread(target=publisher._begin_anew)
    with no_descriptors():
        cutting_off.start()
        wait_until(lambda: publisher._pub.closed, "the old socket is closed")
        wait_until(lambda: not publisher._is_replay_stale.is_set(), "and that of replays")
        publisher.publish_all_cleared()
    cutting_off.join()
    publisher.publish_all_cleared()
    assert replayed(context, publisher) == [0, 1]
    heard = threading.Event()

    def publish() -> None:
        while not heard.wait(0.01):
            publisher.publish_all_cleared()

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        assert int.from_bytes(sub.recv_multipart()[1], "big") >= 2
    finally:
        heard.set()
        publishing.join()
        sub.close(0)


def test_a_bug_of_the_gate_costs_a_handshake_and_no_more(
    publisher: KvEventPublisher,
    context: "zmq.Context[zmq.Socket[bytes]]",
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = publisher._gate
    assert gate is not None
    whole, bugs = gate._admitted, [RuntimeError("a bug")]
    assert whole is not None

    def admitted() -> tuple[bytes, ...]:
        if bugs:
            raise bugs.pop()
        return whole()

    gate._admitted = admitted
    for _ in range(2):
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED)
            give_keys(dealer, SERVICE, ENGINE.public)
            dealer.connect(str(publisher.replay_endpoint))
            assert monitor.poll(DEADLINE_MS)
            dealer.disable_monitor()
            monitor.close(0)
    assert replayed(context, publisher) == []
    assert [record.getMessage() for record in caplog.records] == [
        "a handshake is refused for a bug"
    ]


def test_one_who_is_refused_again_and_again_is_told_of_once(
    publisher: KvEventPublisher,
    context: "zmq.Context[zmq.Socket[bytes]]",
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "lean_selector.curve"):
        for _ in range(3):
            stranger = context.socket(zmq.SUB)
            monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            give_keys(stranger, STRANGER, ENGINE.public)
            stranger.connect(publisher.endpoint)
            assert monitor.poll(DEADLINE_MS)
            stranger.disable_monitor()
            monitor.close(0)
            stranger.close(0)
    told = [record.getMessage() for record in caplog.records]
    words = f"a client's public key is not admitted: {STRANGER.public.decode()} from 127.0.0.1"
    assert told == [words]
