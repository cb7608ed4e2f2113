"""Whatever a peer publishes, the replica does not fail: frames of the reference and of ours that
were right once, damaged or with odd values in them, go the whole way into slots and sessions.

What is refused changes nothing, and what was booked is all there is: when it ends, no load is left.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import ReplicaApplier, Verdict
from lean_selector.core.replication.ledger import ReplicaTarget
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.core.sessions.table import SessionTables
from lean_selector.core.settings import SessionSettings
from lean_selector.wire.replica_frames import (
    SESSION_TOPIC,
    UndecodableFrames,
    decode_event,
    decode_heartbeat,
    decode_session,
    encode_event,
    encode_heartbeat,
)
from tests.support.damage import messages
from tests.support.reservations import replica_event

DATA = Path(__file__).parents[1] / "data"
SCOPE = ("llama", "t1")


def recorded(name: str, key: str) -> list[bytes]:
    """The last frame of every message under that key, however deep it lies."""
    found: list[bytes] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            frames = value.get(key)
            if isinstance(frames, list) and frames:
                found.append(bytes.fromhex(frames[-1]))
            for each in value.values():
                walk(each)
        elif isinstance(value, list):
            for each in value:
                walk(each)

    walk(json.loads((DATA / name).read_text(encoding="utf-8")))
    return found


def own(kind: EventKind, request_id: str) -> bytes:
    hashes = b"".join(number.to_bytes(8, "little") for number in range(5))
    prompt = (hashes, True, 48, None, 7) if kind is EventKind.ADD else ()
    event = replica_event(kind, *SCOPE, 16, request_id, 7, 0, 2, None, *prompt)
    return encode_event(event, 5)


FRAMES = [
    *recorded("replica_frames.json", "frames_hex"),
    *(own(kind, name) for kind in EventKind for name in ("a", "b", "req-1")),
]
SESSIONS = recorded("session_affinity_frames.json", "frames_hex")


class Replica:
    """One partition, of two ranks of worker 7."""

    model_name, tenant_id = SCOPE
    block_size = 16

    def __init__(self) -> None:
        self.slots = Slots()
        for dp_rank in (0, 1):
            self.slots.add_rank(7, dp_rank)
        self.applier = ReplicaApplier(1, self.lookup)

    def lookup(self, model_name: str, tenant_id: str) -> ReplicaTarget | None:
        return self if (model_name, tenant_id) == SCOPE else None

    def loads(self) -> list[tuple[int, int, int]]:
        return [
            (rank.active_prefill_tokens, rank.active_decode_blocks, rank.active_requests)
            for rank in self.slots.ranks.values()
        ]


def apply(replica: Replica, event: ReplicaEvent) -> None:
    before = replica.loads()
    verdict = replica.applier.apply(event, 0.0)
    assert verdict is Verdict.APPLIED or replica.loads() == before
    assert min(min(load) for load in replica.loads()) >= 0
    assert sum(load[2] for load in replica.loads()) == len(replica.slots.reservations)


@settings(max_examples=120)
@given(st.lists(messages(FRAMES), min_size=1, max_size=8))
def test_a_frame_may_be_anything(payloads: list[bytes]) -> None:
    replica = Replica()
    for payload in payloads:
        with contextlib.suppress(UndecodableFrames):
            apply(replica, decode_event(payload))
    for request_id in list(replica.slots.reservations):
        replica.slots.free(request_id, 0.0)
    assert replica.loads() == [(0, 0, 0)] * 2


@settings(max_examples=100)
@given(st.lists(messages(SESSIONS), min_size=1, max_size=8))
def test_a_frame_of_sessions_may_be_anything(payloads: list[bytes]) -> None:
    table = SessionTables(SessionSettings(ttl_s=60.0)).new_table("m", "t")
    for number, payload in enumerate(payloads):
        with contextlib.suppress(UndecodableFrames):
            table.apply(decode_session([SESSION_TOPIC, payload]), float(number))
        assert len(table) <= number + 1
        assert len(list(table.live(float(number)))) <= len(table)
    table.sweep(10_000.0, 100)
    assert len(table) == 0, "each is let go in its time"


@given(messages([encode_heartbeat(2**64 - 1, 7)]))
def test_a_heartbeat_may_be_anything(payload: bytes) -> None:
    with contextlib.suppress(UndecodableFrames):
        assert 0 <= decode_heartbeat([b"", payload]).lean_sequence < 2**64
