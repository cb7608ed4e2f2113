"""Replica frames read at once, however long it takes; the service reads large ones in steps."""

from collections.abc import Sequence

from lean_selector.core.replication.shapes import ReplicaEvent
from lean_selector.wire.replica_frames import decode_in_steps, decode_quickly, payload_of


def decode_frames(frames: Sequence[bytes]) -> ReplicaEvent:
    """The event in a received message; raises UndecodableFrames."""
    return decode_event(payload_of(frames))


def decode_event(payload: bytes) -> ReplicaEvent:
    """The event in a second frame; raises UndecodableFrames."""
    event = decode_quickly(payload)
    if event is not None:
        return event
    steps = decode_in_steps(payload)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            read: ReplicaEvent = end.value
            return read
