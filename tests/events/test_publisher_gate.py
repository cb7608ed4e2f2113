"""A publisher that asks for keys: its thread ends with it, and it tells of those it refuses."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from lean_selector.events.curve_keys import give_keys
from lean_selector.publisher import KvEventPublisher
from tests.support.key_files import KeyFiles

ANY_PORT = "tcp://127.0.0.1:*"
DEADLINE_MS = 20_000


@pytest.fixture
def keys(tmp_path: Path) -> KeyFiles:
    return KeyFiles(tmp_path, "engine", "service", "stranger")


@pytest.fixture
def publisher(keys: KeyFiles) -> Iterator[KvEventPublisher]:
    with KvEventPublisher(
        kv_block_size=4,
        endpoint=ANY_PORT,
        replay_endpoint=ANY_PORT,
        curve_secret_key_file=keys.secret("engine"),
        curve_client_keys_file=keys.list("clients", "service"),
    ) as made:
        yield made


@pytest.mark.parametrize("taken", ["endpoint", "replay_endpoint"])
def test_a_taken_port_raises_and_leaves_no_thread_that_fails(
    taken: str,
    publisher: KvEventPublisher,
    keys: KeyFiles,
    capfd: pytest.CaptureFixture[str],
) -> None:
    endpoints = {"endpoint": ANY_PORT, taken: getattr(publisher, taken)}
    threads = threading.active_count()
    with pytest.raises(zmq.ZMQError, match="in use"):
        KvEventPublisher(kv_block_size=4, curve_secret_key_file=keys.secret("engine"), **endpoints)
    assert threading.active_count() == threads
    assert capfd.readouterr().err == ""


def test_one_who_is_refused_again_and_again_is_told_of_once(
    publisher: KvEventPublisher, keys: KeyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context, caplog.at_level(logging.WARNING, "lean_selector.curve"):
        for _ in range(3):
            stranger = context.socket(zmq.SUB)
            monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            give_keys(stranger, keys.pairs["stranger"], keys.pairs["engine"].public)
            stranger.connect(publisher.endpoint)
            assert monitor.poll(DEADLINE_MS)
            stranger.disable_monitor()
            monitor.close(0)
            stranger.close(0)
    told = [record.getMessage() for record in caplog.records]
    words = f"a client's public key is not admitted: {keys.public('stranger')}"
    assert told == [words]
