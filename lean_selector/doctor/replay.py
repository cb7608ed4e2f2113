"""Asks an engine's replay endpoint, as the service does, for its last batches or for an end."""

import asyncio
from typing import Final

import zmq
import zmq.asyncio

from lean_selector.core.index.kv_batch import BlockStored
from lean_selector.sockets.kv_sockets import replay_frames, replay_request
from lean_selector.wire.kv_events import NotABatch, batch_slices

# No engine has numbered so many batches: the answer is the end alone.
BEYOND_ALL: Final = 1 << 62
_MOST_BATCHES: Final = 10_000


async def stored_since(endpoint: str, first: int, timeout_s: float) -> list[BlockStored] | None:
    """What batches from number `first` on stored; None when no end of the replay came in time."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    stored: list[BlockStored] = []
    try:
        async with asyncio.timeout(timeout_s):
            socket.connect(endpoint)
            await socket.send_multipart(replay_request(first))
            for _ in range(_MOST_BATCHES):
                reply = replay_frames(await socket.recv_multipart())
                if reply is None:
                    return None
                if not reply[1]:
                    break
                stored += _stored_in(reply[1])
    except (TimeoutError, zmq.ZMQError):
        return None
    finally:
        socket.close()
        context.term()
    return stored


def _stored_in(payload: bytes) -> list[BlockStored]:
    try:
        return [
            event
            for batch in batch_slices(payload)
            if batch is not None
            for event in batch.events
            if isinstance(event, BlockStored)
        ]
    except NotABatch:
        return []
