"""Open the links to an engine and parse their frames: a SUB for live batches, a DEALER for one
replay, a SUB for load. No state. Spec: indexer.md 1.1, 1.2 and 1.5."""

import struct
from collections.abc import Callable
from typing import Final

import zmq

from lean_selector.events.link import Link
from lean_selector.events.links import Links
from lean_selector.wire.kv_events import MAX_BATCH_BYTES

MAX_LOAD_BYTES: Final = 4096  # of a load report; usual reports have about forty

_SEQ = struct.Struct(">Q")


def open_live(
    links: Links, endpoint: str, on_message: Callable[[], None], on_state: Callable[[], None]
) -> Link:
    """Return a link that will subscribe to an engine's KV events. If too many messages wait, the
    oldest are dropped."""
    return Link(
        links,
        endpoint,
        zmq.SUB,
        lambda socket: socket.setsockopt(zmq.SUBSCRIBE, b""),
        on_message,
        on_state,
        max_message_bytes=MAX_BATCH_BYTES,
        curve=links.engine_keys,
    )


def open_load(links: Links, endpoint: str, on_message: Callable[[], None]) -> Link:
    """Return a link that will subscribe to an engine's load, and keep only the newest report."""
    return Link(
        links,
        endpoint,
        zmq.SUB,
        lambda socket: socket.setsockopt(zmq.SUBSCRIBE, b""),
        on_message,
        max_message_bytes=MAX_LOAD_BYTES,
        max_backlog_bytes=MAX_LOAD_BYTES,
        curve=links.engine_keys,
    )


def open_replay(links: Links, endpoint: str, first: int, on_news: Callable[[], None]) -> Link:
    """Return a link that will request a replay from batch `first` on. The engine sends the whole
    replay at once (vLLM: 10 000 batches) and drops what is not read in time, so the link reads
    everything. If too many bytes wait, the link ends; then request the rest again."""
    return Link(
        links,
        endpoint,
        zmq.DEALER,
        lambda socket: _send(socket, replay_request(first)),
        on_news,
        on_news,
        max_message_bytes=MAX_BATCH_BYTES,
        curve=links.engine_keys,
        once=True,
    )


def _send(socket: "zmq.Socket[bytes]", frames: list[bytes]) -> None:
    socket.send_multipart(frames, zmq.NOBLOCK)


def replay_request(start: int) -> list[bytes]:
    return [b"", _SEQ.pack(start)]


def live_frames(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Return (seq, payload) of `[topic, seq u64 BE, payload]`; None for any other shape."""
    if len(frames) != 3 or len(frames[1]) != _SEQ.size:
        return None
    return _SEQ.unpack(frames[1])[0], frames[2]


def replay_frames(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Return (seq, payload) of a reply; None for other shapes. An empty payload means the end.

    Reads the last two frames: newer engines put a topic before them (`["", topic, seq,
    payload]`)."""
    if len(frames) < 2 or len(frames[-2]) != _SEQ.size:
        return None
    return _SEQ.unpack(frames[-2])[0], frames[-1]
