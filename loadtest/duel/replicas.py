"""A service, and where a case wants it a second of its kind with replica sync between them.

Owns how the two are linked and how one tells that they are. Without a peer it is the service alone.
"""

import time
from collections.abc import Collection
from types import TracebackType
from typing import Self

import msgspec

from loadtest.child_service import free_port
from loadtest.duel.prompts import MODEL_NAME
from loadtest.duel.targets import Service, Target, TargetError

_LINK_TIMEOUT_S = 20.0
_POLL_S = 0.05


class _Load(msgspec.Struct):
    active_requests: int


class _Partition(msgspec.Struct):
    loads: list[_Load]


_decode_loads = msgspec.json.Decoder(list[_Partition]).decode


class Pair:
    """`main` gets the load; `peer` only hears of it."""

    def __init__(self, target: Target, replicated: bool, cpus: Collection[int]) -> None:
        """Start one or both. Raises TargetError."""
        self.peer: Service | None = None
        if not replicated:
            self.main = Service(target, cpus=cpus)
            return
        here, there = free_port(), free_port()
        self.main = Service(target, _flags(here, there), cpus)
        try:
            self.peer = Service(target, _flags(there, here), cpus)
        except BaseException:
            self.main.stop()
            raise

    @property
    def services(self) -> list[Service]:
        return [self.main] if self.peer is None else [self.main, self.peer]

    def peer_cpu_ns(self) -> int:
        return 0 if self.peer is None else self.peer.cpu_ns()

    def wait_until_linked(self) -> None:
        """Return when the peer hears of reservations; they are freed again. Raises TargetError."""
        if self.peer is None:
            return
        deadline, number = time.monotonic() + _LINK_TIMEOUT_S, 0
        while not _active(self.peer):
            if time.monotonic() > deadline:
                raise TargetError(f"{self.main.target.name}: the replicas do not hear each other")
            self.main.call(
                "POST",
                "/reservations",
                {
                    "model_name": MODEL_NAME,
                    self.main.id_field: f"link-{number}",
                    "worker_id": 1,
                    "dp_rank": 0,
                    "isl_tokens": 0,
                    "sequence_hashes": [],
                    "block_hashes": [],
                },
            )
            number += 1
            time.sleep(_POLL_S)
        for at in range(number):
            self.main.call("DELETE", f"/reservations/link-{at}")
        self.wait_until_equal()

    def wait_until_equal(self) -> None:
        """Return when the peer counts as many active requests as main does. Raises TargetError."""
        if self.peer is None:
            return
        deadline = time.monotonic() + _LINK_TIMEOUT_S
        while (here := _active(self.main)) != (there := _active(self.peer)):
            if time.monotonic() > deadline:
                name = self.main.target.name
                raise TargetError(f"{name}: {here} requests are active, its peer says {there}")
            time.sleep(_POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for service in self.services:
            service.stop()


def _active(service: Service) -> int:
    parts = _decode_loads(service.call("GET", "/loads"))
    return sum(row.active_requests for part in parts for row in part.loads)


def _flags(port: int, peer_port: int) -> list[str]:
    peer = f"tcp://127.0.0.1:{peer_port}"
    return ["--replica-sync-port", str(port), "--replica-sync-peers", peer]
