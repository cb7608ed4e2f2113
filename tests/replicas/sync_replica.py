"""A ReplicaSync of a test, over real sockets, and what it heard."""

import itertools
import struct
import time

import zmq.asyncio

from lean_selector.core.replication.events import Verdict
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.links.curve_keys import CurveGate
from lean_selector.replicas.mesh import HIGH_WATER_MARK, ReplicaSync
from tests.support.on_loop import DEADLINE_S, until
from tests.support.reservations import changed, replica_event

EVENT = replica_event(
    EventKind.ADD, "llama", "t1", 16, "r", 7, 0, 1, None, struct.pack("<3Q", 1, 2, 3), True, 48
)
ANY_PORT = "tcp://127.0.0.1:*"
_ROUTER_IDS = itertools.count(1)


class Replica:
    def __init__(
        self,
        context: zmq.asyncio.Context,
        bind: int | str = ANY_PORT,
        high_water_mark: int = HIGH_WATER_MARK,
        gate: CurveGate | None = None,
    ) -> None:
        self.heard: list[ReplicaEvent] = []
        self.verdict = Verdict.APPLIED
        self.router_id = next(_ROUTER_IDS)
        self.sync = ReplicaSync(
            context,
            bind,
            [],
            self.hear,
            router_id=self.router_id,
            high_water_mark=high_water_mark,
            gate=gate,
        )
        self.sync.start()

    def hear(self, event: ReplicaEvent, now: float) -> Verdict:
        assert abs(now - time.monotonic()) < DEADLINE_S
        self.heard.append(changed(event, sequence=None))
        return self.verdict

    async def connect_to(self, other: "Replica") -> None:
        """Subscribe, and wait until the other's events arrive."""
        assert self.sync.register_peer(other.sync.bound_endpoint)
        await self.hear_one_from(other)

    async def hear_one_from(self, other: "Replica") -> None:
        ours = changed(EVENT, router_id=other.router_id)  # whose numbers they bear
        marker = changed(ours, request_id="are you there")

        def heard() -> bool:
            other.sync.publish(marker)
            return marker in self.heard

        await until(heard)
        last = changed(ours, request_id="you are")
        other.sync.publish(last)
        await until(lambda: last in self.heard)
        self.heard.clear()
