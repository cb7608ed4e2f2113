"""Open an engine's ZMQ connections, and parse received frames. SUB sockets receive KV events. A
DEALER socket requests missed KV events. Spec: indexer.md 1.1, 1.2, 1.5."""

import struct
from collections.abc import Callable

import zmq

from lean_selector.links.link import Link
from lean_selector.links.links import Links
from lean_selector.wire.kv_events import MAX_BATCH_BYTES

_SEQ = struct.Struct(">Q")


def open_live(
    links: Links, endpoint: str, on_message: Callable[[], None], on_state: Callable[[], None]
) -> Link:
    """Return a connection, not yet started, that subscribes to an engine's KV events. If too many
    received messages wait, the oldest are dropped."""
    return Link(
        links,
        endpoint,
        zmq.SUB,
        lambda socket: socket.setsockopt(zmq.SUBSCRIBE, b""),
        on_message,
        on_state,
        max_message_bytes=MAX_BATCH_BYTES,
    )


def open_replay(links: Links, endpoint: str, first: int, on_news: Callable[[], None]) -> Link:
    """Return a connection, not yet started, that requests an engine's batches of KV events from
    number `first` on. If too many received bytes wait, the connection ends, and the caller must
    request the remaining batches again."""
    return Link(
        links,
        endpoint,
        zmq.DEALER,
        lambda socket: _send(socket, replay_request(first)),
        on_news,
        on_news,
        max_message_bytes=MAX_BATCH_BYTES,
        once=True,
    )


def _send(socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
    socket.send_multipart(frames, zmq.NOBLOCK)


def replay_request(start: int) -> list[bytes]:
    return [b"", _SEQ.pack(start)]


def live_frames(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Return (sequence number, payload) of a published message `[topic, u64 BE, payload]`; None for
    any other shape."""
    if len(frames) != 3 or len(frames[1]) != _SEQ.size:
        return None
    return _SEQ.unpack(frames[1])[0], frames[2]


def replay_frames(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Return (sequence number, payload) of a reply from an engine's replay endpoint; None for other
    shapes. The last reply has an empty payload. Newer engines put a topic before the sequence
    number: `["", topic, sequence number, payload]`."""
    if len(frames) < 2 or len(frames[-2]) != _SEQ.size:
        return None
    return _SEQ.unpack(frames[-2])[0], frames[-1]
