"""KvEventPublisher: golden frames, numbering, batches, replay, and that it never blocks."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from lean_selector import publisher as publisher_module
from lean_selector.publisher import (
    KvEventPublisher,
    ZmqKvEventPublisher,
    rank_endpoint,
    signed_hashes,
)
from loadtest.child_service import ChildService, free_port, plain_environment
from tests.support.running_service import DEADLINE_S, wait_until

ANY_PORT = "tcp://127.0.0.1:0"
DEADLINE_MS = int(1000 * DEADLINE_S)


def decoded(payload: bytes) -> tuple[list[Any], int]:
    """The events of a batch, and its rank."""
    _, events, rank = msgspec.msgpack.decode(payload)
    return events, rank


class Listener:
    """A SUB that is known to be subscribed: a probe batch has come through."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.linger = 0
        self.sub.subscribe(b"")
        self.sub.connect(publisher.endpoint)
        deadline = time.monotonic() + DEADLINE_S
        while not self.sub.poll(20):
            assert time.monotonic() < deadline, "no subscription"
            publisher.publish_all_cleared()
        self.next = publisher.sequence
        while int.from_bytes(self.frames()[1], "big") != self.next - 1:
            pass

    def frames(self) -> list[bytes]:
        assert self.sub.poll(DEADLINE_MS), "no message"
        return self.sub.recv_multipart()

    def events(self) -> list[Any]:
        _, number, payload = self.frames()
        assert int.from_bytes(number, "big") == self.next
        self.next += 1
        return decoded(payload)[0]

    def close(self) -> None:
        self.sub.close()
        self.context.term()


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    with KvEventPublisher(
        kv_block_size=4, endpoint=ANY_PORT, replay_endpoint=ANY_PORT
    ) as publisher:
        yield publisher


@pytest.fixture
def listener(publisher: KvEventPublisher) -> Iterator[Listener]:
    listener = Listener(publisher)
    yield listener
    listener.close()


@contextmanager
def reader(
    publisher: KvEventPublisher, *request: bytes, most_waiting: int = 0
) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER that has sent this request for a replay."""
    assert publisher.replay_endpoint is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger, dealer.rcvhwm = 0, most_waiting
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart(request)
        yield dealer


def replay(publisher: KvEventPublisher, *request: bytes) -> list[list[bytes]]:
    """Frames that a DEALER gets for its request, the end marker left off."""
    got: list[list[bytes]] = []
    with reader(publisher, *request) as dealer:
        while True:
            assert dealer.poll(DEADLINE_MS), "no answer"
            frames = dealer.recv_multipart()
            if frames == [b"", b"\xff" * 8, b""]:
                return got
            got.append(frames)


def start_at(number: int) -> tuple[bytes, bytes]:
    return b"", number.to_bytes(8, "big")


def test_frames_are_those_of_vllm_byte_for_byte(
    publisher: KvEventPublisher, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1.5)
    publisher.publish_stored(
        7, [1, 2, 300, 70_000], [4], [2**64 - 1], lora_id=0, parent_hash=5, lora_name="ad"
    )
    first = listener.frames()
    publisher.publish_removed(8, [2**63])
    publisher.publish_all_cleared()
    payloads = [listener.frames()[2], listener.frames()[2]]

    head = bytes.fromhex("93 cb3ff8000000000000 91")  # [1.5, [...
    assert first == [
        b"",
        (listener.next).to_bytes(8, "big"),
        head
        + b"\x87\xa4type\xabBlockStored"
        + b"\xacblock_hashes\x91\xff"
        + b"\xb1parent_block_hash\x05"
        + b"\xa9token_ids\x94\x01\x02\xcd\x01\x2c\xce\x00\x01\x11\x70"
        + b"\xaablock_size\x04"
        + b"\xa7lora_id\xc0"
        + b"\xa9lora_name\xa2ad"
        + b"\x00",  # rank 0]
    ]
    assert payloads == [
        head
        + b"\x82\xa4type\xacBlockRemoved"
        + b"\xacblock_hashes\x91\xd3\x80\x00\x00\x00\x00\x00\x00\x00"
        + b"\x00",
        head + b"\x81\xa4type\xb0AllBlocksCleared" + b"\x00",
    ]


def test_every_field_travels(publisher: KvEventPublisher, listener: Listener) -> None:
    publisher.publish_stored(
        token_ids=tuple(range(100_000, 100_040)),
        block_hashes=list(range(10)),
        lora_id=3,
        medium="CPU",
        cache_salt="s",
        extra_keys=[["k"]] * 10,
    )
    publisher.publish_removed(block_hashes=[-5], medium="DISK")
    assert listener.events() == [
        {
            "type": "BlockStored",
            "block_hashes": list(range(10)),
            "parent_block_hash": None,
            "token_ids": list(range(100_000, 100_040)),
            "block_size": 4,
            "lora_id": 3,
            "medium": "CPU",
            "extra_keys": [["k"]] * 10,
            "cache_salt": "s",
        }
    ]
    assert listener.events() == [{"type": "BlockRemoved", "block_hashes": [-5], "medium": "DISK"}]


def test_the_printed_publisher_works_as_printed() -> None:
    publisher = ZmqKvEventPublisher(ANY_PORT, 4, topic="kv")
    listener = Listener(publisher)
    publisher.data_parallel_rank = 2
    publisher.publish_stored(1, [1, 2, 3, 4], [4], [11], 0, None)
    publisher.publish_removed(2, [11])
    publisher.publish_all_cleared()
    topic, number, payload = listener.frames()
    assert (topic, number) == (b"kv", (publisher.sequence - 3).to_bytes(8, "big"))
    assert decoded(payload)[1] == 2
    for kind in ("BlockRemoved", "AllBlocksCleared"):
        assert decoded(listener.frames()[2])[0][0]["type"] == kind
    publisher.shutdown()
    publisher.shutdown()
    listener.close()


def test_numbers_start_at_zero_and_are_replayed_in_order(publisher: KvEventPublisher) -> None:
    for block in range(5):
        publisher.publish_removed(block, [block])
    got = replay(publisher, *start_at(0))
    assert [frames[:2] for frames in got] == [[b"", n.to_bytes(8, "big")] for n in range(5)]
    hashes = [decoded(frames[2])[0][0]["block_hashes"] for frames in got]
    assert hashes == [[n] for n in range(5)]
    assert [frames[1][-1] for frames in replay(publisher, *start_at(3))] == [3, 4]
    assert replay(publisher, *start_at(5)) == []


def test_replay_is_bounded_by_count_and_by_bytes(
    publisher: KvEventPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "REPLAY_BATCHES", 3)
    for block in range(10):
        publisher.publish_removed(block, [block])
    assert [frames[1][-1] for frames in replay(publisher, *start_at(1))] == [7, 8, 9]
    monkeypatch.setattr(publisher_module, "REPLAY_BYTES", 120)
    publisher.publish_removed(10, list(range(40)))  # 42 bytes of hashes beside ~50 of frame
    kept = replay(publisher, *start_at(0))
    assert [frames[1][-1] for frames in kept] == [10]


def test_replay_survives_malformed_requests(publisher: KvEventPublisher) -> None:
    publisher.publish_all_cleared()
    with reader(publisher, b"", b"short") as stranger:
        stranger.send_multipart([b"\0" * 8])
        stranger.send_multipart(start_at(0))
        assert stranger.poll(DEADLINE_MS)
        assert stranger.recv_multipart()[1] == b"\0" * 8  # the answer to the good one
    assert len(replay(publisher, *start_at(0))) == 1


def test_a_reader_that_stops_reading_does_not_hold_the_publisher_or_others(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(publisher_module, "REPLAY_SEND_TIMEOUT_MS", 50)
    publisher: KvEventPublisher = request.getfixturevalue("publisher")  # which reads it
    for _ in range(3_000):
        publisher.publish_removed(0, [2**62] * 1_000)  # 9 kB each, 27 MB: more than buffers
    with reader(publisher, *start_at(0), most_waiting=1) as stalled:
        assert stalled.poll(DEADLINE_MS)  # its replay is under way
        publisher.publish_all_cleared()
        got = replay(publisher, *start_at(3_000))
        assert [frames[1] for frames in got] == [(3_000).to_bytes(8, "big")]


def test_events_of_a_batch_travel_in_one_message_also_when_its_block_raises(
    publisher: KvEventPublisher, listener: Listener
) -> None:
    def fail_halfway() -> None:
        with publisher.batch() as batch:
            batch.publish_removed(block_hashes=[1])
            batch.publish_stored(token_ids=[1, 2, 3, 4], block_hashes=[2])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    with publisher.batch():
        pass
    publisher.publish_all_cleared()
    assert [event["type"] for event in listener.events()] == ["BlockRemoved", "BlockStored"]
    assert [event["type"] for event in listener.events()] == ["AllBlocksCleared"]


def test_blocks_from_the_first_partial_one_on_are_left_out(
    publisher: KvEventPublisher, listener: Listener
) -> None:
    publisher.publish_stored(1, list(range(10)), [4, 4, 2], [1, 2, 3], extra_keys=["a", "b", "c"])
    event = listener.events()[0]
    assert event["block_hashes"] == [1, 2]
    assert event["token_ids"] == list(range(8))
    assert event["extra_keys"] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(([1, 2, 3], [4], [1]), "3 token_ids for 1 blocks of 4", id="too few tokens"),
        pytest.param(([1] * 4, [4, 4], [1]), "2 num_block_tokens for 1", id="lengths differ"),
        pytest.param(([1] * 4, [4], [2**64]), "64 bits", id="hash too large"),
        pytest.param(([1] * 4, [4], [-(2**63) - 1]), "64 bits", id="hash too small"),
    ],
)
def test_bad_arguments_raise_and_they_or_no_blocks_send_nothing(
    publisher: KvEventPublisher, arguments: tuple[list[int], list[int], list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        publisher.publish_stored(1, *arguments)
    publisher.publish_stored(1, [], [], [])
    publisher.publish_stored(1, [1], [1], [9])
    publisher.publish_removed(2, [])
    assert publisher.sequence == 0


def test_threads_may_publish_at_once_without_losing_a_number(publisher: KvEventPublisher) -> None:
    def publish() -> None:
        for _ in range(200):
            publisher.publish_all_cleared()

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [int.from_bytes(frames[1], "big") for frames in replay(publisher, *start_at(0))]
    assert numbers == list(range(800))


def test_signed_hashes_keep_their_64_bits() -> None:
    whole = [0, 2**63 - 1, 2**63, 2**64 - 1, -1]
    assert signed_hashes(whole) == [0, 2**63 - 1, -(2**63), -1, -1]


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        *(("tcp://*:5557", 0, "tcp://*:5557"), ("tcp://*:5557", 3, "tcp://*:5560")),
        *(("tcp://[::]:5557", 1, "tcp://[::]:5558"), ("tcp://127.0.0.1:0", 2, "tcp://127.0.0.1:0")),
        *(("tcp://127.0.0.1:*", 2, "tcp://127.0.0.1:*"), ("ipc:///run/kv", 2, "ipc:///run/kv_dp2")),
        ("inproc://kv", 1, "inproc://kv_dp1"),
    ],
)
def test_rank_endpoint_adds_the_rank(endpoint: str, rank: int, expected: str) -> None:
    assert rank_endpoint(endpoint, rank) == expected


@pytest.mark.parametrize("endpoint", ["tcp://*:65535", "tcp://*:http", "tcp://host"])
def test_rank_endpoint_refuses_what_has_no_such_port(endpoint: str) -> None:
    with pytest.raises(ValueError, match="no port for dp_rank 1"):
        rank_endpoint(endpoint, 1)


def test_a_publisher_needs_a_block_size_and_an_address_that_is_free(
    publisher: KvEventPublisher,
) -> None:
    with pytest.raises(ValueError, match="kv_block_size"):
        KvEventPublisher(endpoint=ANY_PORT)
    with pytest.raises(zmq.ZMQError, match="in use"):
        KvEventPublisher(kv_block_size=4, endpoint=publisher.endpoint)
    with pytest.raises(zmq.ZMQError, match="in use"):
        KvEventPublisher(
            kv_block_size=4, endpoint=ANY_PORT, replay_endpoint=publisher.replay_endpoint
        )


@pytest.mark.parametrize("service", ["ours", pytest.param("1.3.1", marks=pytest.mark.reference)])
def test_a_service_follows_what_is_published_also_what_it_missed(
    publisher: KvEventPublisher, service: str, request: pytest.FixtureRequest
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "lean_selector", "--port", str(port)]
    if service != "ours":
        python = str(request.getfixturevalue("reference_131"))
        command = [python, "-m", "dynamo.select_service", "--port", str(port)]
    tokens = list(range(12))
    worker = {
        "worker_id": 1,
        "endpoint": "http://engine:8000",
        "block_size": 4,
        "max_num_batched_tokens": 8_192,
        "kv_events_endpoints": {"0": publisher.endpoint},
        "replay_endpoint": publisher.replay_endpoint,
    }
    # Before anyone listens: the first live message makes the service ask for these two.
    publisher.publish_stored(1, tokens[:8], [4, 4], [2**64 - 1, 2**64 - 2])
    publisher.publish_stored(2, tokens[8:], [4], [-3], parent_hash=2**64 - 2)
    with ChildService(command, port, env=plain_environment()) as child:

        def holds(blocks: int) -> Callable[[], bool]:
            def asked() -> bool:
                (row,) = child.call("POST", "/overlap_scores", {"token_ids": tokens})["workers"]
                publisher.publish_removed(block_hashes=[77])  # unknown; a sign of life
                return bool(row["device_blocks"] == blocks)

            return asked

        child.call("POST", "/workers", worker)
        wait_until(holds(3), "three blocks are held")
        with publisher.batch() as batch:
            batch.publish_removed(block_hashes=[2**64 - 3])
            batch.publish_removed(block_hashes=[-4])  # unknown
        wait_until(holds(2), "two blocks are held")
        publisher.publish_all_cleared()
        wait_until(holds(0), "no block is held")
