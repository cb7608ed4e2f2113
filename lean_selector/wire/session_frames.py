"""What replicas send each other of sessions: frames as the reference's, and a list when asked.

The frames are those of selection_16.md section 6.1, strict and lenient as it is; the list is ours.
It is JSON as a whole, and each session stands on a line of its own, so that a reader can take it
apart without parsing all of it at once. Knows nothing of sockets, nor of what a binding does.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from lean_selector.core.sessions.shapes import LiveSession, SessionEvent
from lean_selector.wire.messagepack import first_value
from lean_selector.wire.replica_frames import TooBig, UndecodableFrames
from lean_selector.wire.replica_shapes import SessionEnvelope, SessionLine, SessionListHead
from lean_selector.wire.replica_snapshot import BadSnapshot

SESSION_TOPIC = b"dynamo.session-affinity.v1"
# An id has 256 bytes at most, the names of a model and a group a few more.
MAX_SESSION_BYTES = 64 << 10

_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(SessionEnvelope).decode
_encode_json = msgspec.json.Encoder().encode
_decode_head = msgspec.json.Decoder(SessionListHead).decode
_decode_line = msgspec.json.Decoder(SessionLine).decode


def encode_session(event: SessionEvent) -> bytes:
    """The second frame; the first is always SESSION_TOPIC."""
    return _encode(
        SessionEnvelope(
            model_name=event.model_name,
            routing_group=event.tenant_id,
            session_id=event.session_id,
            worker_id=event.worker_id,
            dp_rank=event.dp_rank,
            sequence=event.sequence,
            writer_id=event.writer_id,
        )
    )


def decode_session(frames: Sequence[bytes]) -> SessionEvent:
    """The binding in a received message; raises UndecodableFrames."""
    if len(frames) != 2:
        raise UndecodableFrames(f"{len(frames)} frames instead of 2")
    payload = frames[1]
    if len(payload) > MAX_SESSION_BYTES:
        raise TooBig(f"a session of more than {MAX_SESSION_BYTES} bytes")
    try:
        envelope = first_value(_decode_envelope, payload)  # bytes after the map are ignored
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableFrames(f"session: {error}") from None
    return SessionEvent(
        envelope.model_name,
        envelope.routing_group,
        envelope.session_id,
        envelope.worker_id,
        envelope.dp_rank,
        envelope.sequence,
        envelope.writer_id,
    )


def encode_session_list(sessions: Iterable[LiveSession]) -> Iterator[bytes]:
    """The text of GET /replica_sync/sessions, in parts."""
    yield b'{"version":1,"sessions":['
    end = b"\n"
    for live in sessions:
        event = live.event
        yield end + _encode_json(
            SessionLine(
                event.model_name,
                event.tenant_id,
                event.session_id,
                event.worker_id,
                event.dp_rank,
                event.sequence,
                event.writer_id,
                round(live.idle_s, 3),
            )
        )
        end = b",\n"
    yield b"\n]}"


def split_session_list(text: bytes) -> list[bytes]:
    """Takes the text apart by lines; raises BadSnapshot."""
    head, *lines = text.rstrip().split(b"\n")
    try:
        _decode_head(head + b"]}")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadSnapshot(f"no list of sessions: {error}") from None
    if not lines or lines.pop() != b"]}":
        raise BadSnapshot("no list of sessions: its end is missing")
    return lines


def decode_session_line(line: bytes) -> LiveSession:
    """One session; raises BadSnapshot."""
    try:
        read = _decode_line(line.removesuffix(b","))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadSnapshot(str(error)) from None
    event = SessionEvent(
        read.model_name,
        read.tenant_id,
        read.session_id,
        read.worker_id,
        read.dp_rank,
        read.sequence,
        read.writer_id,
    )
    return LiveSession(event, read.idle_s)
