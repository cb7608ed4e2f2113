"""A publisher that asks for keys: its thread ends with it, and it tells of those it refuses."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from lean_selector.events.curve_keys import give_keys, new_pair
from lean_selector.publisher import KvEventPublisher
from lean_selector.tools.keys import write_pair

ANY_PORT = "tcp://127.0.0.1:*"
DEADLINE_MS = 20_000
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
    words = f"a client's public key is not admitted: {STRANGER.public.decode()}"
    assert told == [words]
