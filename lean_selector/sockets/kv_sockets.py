"""The two sockets of a source: SUB for live batches, DEALER for one replay, and their frames.

Owns socket options and frame layouts, nothing that lasts. Spec: indexer.md 1.1, 1.2 and 1.5.
"""

import struct

import zmq
import zmq.asyncio

# An engine that comes back is found again within 5 s, a host that is gone is noticed within 20 s.
# No ZMTP heartbeats, whatever the reference does: a SUB that sends them while its queue is full for
# longer than their time-out aborts the process when it is read again (libzmq 4.3.5, issue 4767).
RECONNECT_MS = 100
RECONNECT_MAX_MS = 5_000
KEEPALIVE_S = 5
KEEPALIVE_PROBES = 3

# What vLLM's publisher queues per subscriber: a burst that it can hold, we can hold.
LIVE_RCVHWM = 100_000
# libzmq answers this limit by dropping the peer for good, and tells nobody: it is only the wall
# before memory runs out, batches have a smaller bound of ours.
MAX_MESSAGE_BYTES = 512 * 1024 * 1024

_SEQ = struct.Struct(">Q")
_NOW = int(zmq.DONTWAIT)


def open_live(context: zmq.asyncio.Context, endpoint: str) -> zmq.asyncio.Socket:
    """A SUB connecting to an engine's PUB. Raises zmq.ZMQError if libzmq refuses the endpoint."""
    sub = _socket(context, zmq.SUB, endpoint)
    sub.setsockopt(zmq.RCVHWM, LIVE_RCVHWM)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    return _connected(sub, endpoint)


def open_replay(context: zmq.asyncio.Context, endpoint: str) -> zmq.asyncio.Socket:
    """A DEALER for one replay. Raises zmq.ZMQError if libzmq refuses the endpoint.

    A replay comes at once and whole (vLLM: 10 000 batches); a bounded queue would stop the engine,
    which answers between its own publications.
    """
    dealer = _socket(context, zmq.DEALER, endpoint)
    dealer.setsockopt(zmq.RCVHWM, 0)
    return _connected(dealer, endpoint)


def received(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """The frames of the next message. Raises zmq.Again if there is none.

    Asking each frame whether more follow costs half of what asking the socket does, which
    recv_multipart() does.
    """
    frame = socket.recv(_NOW, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(_NOW, copy=False)
        frames.append(frame.bytes)
    return frames


def replay_request(start: int) -> list[bytes]:
    return [b"", _SEQ.pack(start)]


def live_frames(frames: list[bytes]) -> tuple[int, bytes] | None:
    """(seq, payload) of `[topic, seq u64 BE, payload]`; None for any other shape."""
    if len(frames) != 3 or len(frames[1]) != _SEQ.size:
        return None
    return _SEQ.unpack(frames[1])[0], frames[2]


def replay_frames(frames: list[bytes]) -> tuple[int, bytes] | None:
    """(seq, payload) of a reply, the payload empty at the end; None for any other shape.

    Read from the back: newer engines put a topic before the number (`["", topic, seq, payload]`).
    """
    if len(frames) < 2 or len(frames[-2]) != _SEQ.size:
        return None
    return _SEQ.unpack(frames[-2])[0], frames[-1]


def _socket(context: zmq.asyncio.Context, kind: int, endpoint: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    return socket


def _connected(socket: zmq.asyncio.Socket, endpoint: str) -> zmq.asyncio.Socket:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket
